"""Differentially private training for Keras 3 on TensorFlow.

`import tfdpx` gives the privacy core: `PrivacyPlan`, the optimizers, `PrivacyBudget`,
`make_private_model`, `RandomAccess` and the modules `accounting`, `audit`, `augment`, `callbacks`,
`checks`, `distributed`, `heads`, `per_example` and `synthetic`. It also installs the hook by which
`keras.Model.fit` lets a DP optimizer drive the training step, registers the layers of
`tfdpx.layers` with Keras, and keeps freed memory with the process (`tfdpx.training.allocator`).
`tfdpx.models` loads on first use.
"""

import importlib as _importlib
import importlib.util as _importlib_util
import os as _os
import sys as _sys

__version__ = "0.1.0"

# Folders beside the core, on which it does not depend.
_PARTS = ("layers", "models")
# What is imported from a part on first use.
_FROM_PARTS = {"make_private_model": "layers"}


def _check_backend(name):
    """Raises ImportError unless `name` is the TensorFlow backend of Keras."""
    if name != "tensorflow":
        raise ImportError(
            f"tfdpx needs the TensorFlow backend of Keras. Received: backend={name!r}. "
            "Set the environment variable KERAS_BACKEND=tensorflow before importing keras."
        )


def _check_installation():
    """Raises ImportError unless the folders beside the core are found, and belong to this core."""
    core = _os.path.dirname(_os.path.realpath(__file__))
    for name in _PARTS:
        spec = _importlib_util.find_spec(f"{__name__}.{name}")
        found = spec.origin and _os.path.dirname(_os.path.realpath(spec.origin)) if spec else None
        # They stand beside the core in a checkout and inside it when installed from a wheel.
        if not found or _os.path.dirname(found) not in (core, _os.path.dirname(core)):
            raise ImportError(
                f"tfdpx was imported from the folder {core!r}, and its part `tfdpx.{name}` was "
                f"{f'found in {found!r}, which is another copy' if found else 'not found'}. A "
                "checkout that is not installed shadows any installed tfdpx: run "
                "`pip install -e .` in the checkout, or change to another folder to use the "
                "installed tfdpx."
            )


def _is_for_numbers_alone():
    """Whether this process runs `python -m tfdpx.train.account`, which trains nothing.

    It starts in two seconds without TensorFlow and Keras, whose import takes many.
    """
    command = _sys.orig_argv
    return ("-m", "tfdpx.train.account") in zip(command, command[1:], strict=False)


# tensorflow-privacy 0.9 cannot be imported on TensorFlow >= 2.16, except for its analysis: this
# makes it leave out the rest.
_sys.skip_tf_privacy_import = True

_check_installation()

if not _is_for_numbers_alone():
    if "keras" not in _sys.modules:  # Importing keras with, say, no jax would hide the cause.
        _check_backend(_os.environ.get("KERAS_BACKEND") or "tensorflow")
    # TensorFlow's notices of processors and drivers, unless somebody asked for them.
    _os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

    import keras as _keras

    _check_backend(_keras.backend.backend())

    from tfdpx.training import allocator as _allocator

    _allocator.keep_freed_memory()

    from tfdpx import (
        accounting,
        audit,
        augment,
        callbacks,
        checks,
        distributed,
        heads,
        per_example,
        synthetic,
    )
    from tfdpx._keras import hook
    from tfdpx.accounting import PrivacyPlan
    from tfdpx.callbacks import PrivacyBudget
    from tfdpx.heads import AdaMix
    from tfdpx.sampling.random_access import RandomAccess
    from tfdpx.training.optimizers import DPSGD, DPAdam, DPAdamW, make_private

    hook.install()

    # Makes Keras know our layers, so that `load_model` works after a plain `import tfdpx`.
    _importlib.import_module("tfdpx.layers")

__all__ = [
    "AdaMix",
    "DPAdam",
    "DPAdamW",
    "DPSGD",
    "PrivacyBudget",
    "PrivacyPlan",
    "RandomAccess",
    "accounting",
    "audit",
    "augment",
    "callbacks",
    "checks",
    "distributed",
    "heads",
    "layers",
    "make_private",
    "make_private_model",
    "models",
    "per_example",
    "synthetic",
]


def __getattr__(name):
    if name in _PARTS:
        return _importlib.import_module(f"{__name__}.{name}")
    if name in _FROM_PARTS:
        return getattr(_importlib.import_module(f"{__name__}.{_FROM_PARTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*__all__, "__doc__", "__version__"]
