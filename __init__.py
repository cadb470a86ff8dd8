"""Makes `import tfdpx` right in the folder that contains a checkout named `tfdpx`.

There Python takes the whole checkout for the package, so this file loads the core in its place. No
installed copy has this file, and nothing else imports it.
"""

import importlib.util
import os
import sys

if __name__ == "tfdpx":
    _root = os.path.dirname(os.path.abspath(__file__))
    _core = os.path.join(_root, "tfdpx")
    _spec = importlib.util.spec_from_file_location(
        "tfdpx", os.path.join(_core, "__init__.py"), submodule_search_locations=[_core, _root]
    )
    # Python returns the module of this name that it finds here after the import.
    sys.modules["tfdpx"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["tfdpx"])
