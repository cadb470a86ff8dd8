"""Connects tfdpx with Keras once both are imported, in either order, and imports neither.

So `import tfdpx` does not take the seconds of TensorFlow, and `tfdpx.accounting` works without it.
Importing Keras after tfdpx installs the wrappers of `tfdpx._keras.hook`. What Keras looks up by
name, layers and optimizers in files, is imported when Keras first asks for it.
"""

import importlib
import sys

# All that is registered with Keras under the package name "tfdpx".
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
        # Nothing of `tfdpx._keras` can be half imported here: the package imports Keras first.
        from tfdpx._keras import hook

        hook.install(_import_registered)


def _import_registered():
    for name in _REGISTERED:
        importlib.import_module(f"tfdpx.{name}")


class _AfterKeras:
    """A finder of modules that lets the others find Keras, and has its loader install the hook."""

    def find_spec(self, name, path=None, target=None):
        """The spec of `keras` as the other finders make it; None for any other module."""
        if name != "keras":
            return None
        others = [finder.find_spec for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
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

        # On the object, so that it stays what `inspect` and `importlib.resources` know.
        loader.exec_module = exec_module
