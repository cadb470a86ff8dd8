"""Connects tfdpx with Keras once both are imported, in either order, and imports neither.

So `import tfdpx` does not take the seconds that TensorFlow takes, and `tfdpx.accounting` works
without it. Importing Keras after tfdpx installs the wrappers of `tfdpx._keras.hook`. Layers and
optimizers, which Keras looks up by name in files, are imported when Keras first asks for them.
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
        # No module of `tfdpx._keras` can be half imported here: it imports Keras first.
        from tfdpx._keras import hook

        hook.install(_import_registered)


def _import_registered():
    for name in _REGISTERED:
        importlib.import_module(f"tfdpx.{name}")


class _AfterKeras:
    """A module finder that lets others find Keras, and makes its loader install the hook."""

    def find_spec(self, name, path=None, target=None):
        """Returns the spec of `keras` from the other finders; None for any other module."""
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

        # On the object: `inspect` and `importlib.resources` still recognise the loader.
        loader.exec_module = exec_module
