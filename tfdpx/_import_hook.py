"""Installs the hook of tfdpx into Keras as soon as both are imported, but never imports Keras.

`import tfdpx` therefore does not wait for TensorFlow to load, and `tfdpx.accounting` works without
TensorFlow. If Keras is imported after tfdpx, the import of Keras installs the wrappers of
`tfdpx._keras.hook`. The layers and optimizers of tfdpx are imported when Keras loads a file and
first looks up a class by its name.
"""

import importlib
import sys

# The modules that register something with Keras under the package name "tfdpx".
_REGISTERED = (
    *("augment", "heads", "layers"),
    *("training.clipping", "training.optimizers"),
)


def connect():
    """Installs the hook into Keras now, or right after Keras is imported."""
    if "keras" in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _AfterKeras())


def _install():
    if sys.modules["keras"].backend.backend() == "tensorflow":
        # `tfdpx._keras` cannot be half imported here, because it imports Keras before all else.
        from tfdpx._keras import hook

        hook.install(_import_registered)


def _import_registered():
    for name in _REGISTERED:
        importlib.import_module(f"tfdpx.{name}")


class _AfterKeras:
    """An import finder that waits until Keras is imported, and then installs the hook.

    Python's other finders still find Keras. This finder only wraps the loader that they return.
    """

    def find_spec(self, name, path=None, target=None):
        """Returns the spec of `keras`, as other finders find it; None for any other module."""
        if name != "keras":
            return None
        other_finders = [finder.find_spec for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (find(name, path, target) for find in other_finders)), None)
        if spec is not None and spec.loader is not None:
            self._watch(spec.loader)
        return spec

    def _watch(self, loader):
        load = loader.exec_module

        def exec_module(module):
            load(module)
            if module.__name__ == "keras" and self in sys.meta_path:
                sys.meta_path.remove(self)
                _install()

        # Only the object changes: `inspect` and `importlib.resources` need its class.
        loader.exec_module = exec_module
