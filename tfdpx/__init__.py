"""Differentially private training for Keras 3 on TensorFlow.

Each public name is imported on first use, and `tfdpx.accounting` needs neither TensorFlow nor
Keras. As soon as both tfdpx and Keras are imported, in either order, a hook changes two things in
Keras. If a model is compiled with a DP optimizer, `fit` runs the private training step instead of
the ordinary one. And Keras can load files that name layers or optimizers of tfdpx. Other models are
not affected. `docs/api.md` lists the public names.
"""

import importlib as _importlib
import importlib.util as _importlib_util
import os as _os
from typing import TYPE_CHECKING as _TYPE_CHECKING

from tfdpx import _import_hook
from tfdpx._arguments import ELSEWHERE as _ELSEWHERE

if _TYPE_CHECKING:  # For type checkers only: at run time `__getattr__` imports these names.
    from tfdpx import (  # type: ignore[attr-defined]
        accounting,
        audit,
        augment,
        callbacks,
        checks,
        distributed,
        heads,
        layers,
        models,
        per_example,
        sklearn,
        synthetic,
    )
    from tfdpx.account import copy_weights
    from tfdpx.accounting import PrivacyPlan
    from tfdpx.callbacks import PrivacyBudget
    from tfdpx.heads import AdaMix
    from tfdpx.layers.private_model import make_private_model
    from tfdpx.report.report import report
    from tfdpx.sampling.examples import RandomAccess
    from tfdpx.suggestion import suggest
    from tfdpx.tables.private_adapt import private_adapt
    from tfdpx.training.clipping import AdaptiveClip
    from tfdpx.training.gradient_norms import gradient_norms
    from tfdpx.training.optimizers import DPSGD, DPAdam, DPAdamW, make_private

__version__ = "0.2.0"

# The module that defines each public class or function.
_HOMES = {
    "AdaMix": "heads",
    "AdaptiveClip": "training.clipping",
    "DPAdam": "training.optimizers",
    "DPAdamW": "training.optimizers",
    "DPSGD": "training.optimizers",
    "PrivacyBudget": "callbacks",
    "PrivacyPlan": "accounting",
    "RandomAccess": "sampling.examples",
    "copy_weights": "account",
    "gradient_norms": "training.gradient_norms",
    "make_private": "training.optimizers",
    "make_private_model": "layers.private_model",
    "private_adapt": "tables.private_adapt",
    "report": "report.report",
    "suggest": "suggestion",
}
# Packages in other folders than the core (`tfdpx/`). The core does not import them.
_PARTS = ("layers", "models")


def _check_installation():
    """Raises ImportError unless `layers` and `models` exist and belong to this copy of tfdpx."""
    core = _os.path.dirname(_os.path.realpath(__file__))
    for name in _PARTS:
        spec = _importlib_util.find_spec(f"{__name__}.{name}")
        folder = spec.origin and _os.path.dirname(_os.path.realpath(spec.origin)) if spec else None
        # In a checkout these folders are next to the core; a wheel has them inside of it.
        if not folder or _os.path.dirname(folder) not in (core, _os.path.dirname(core)):
            raise ImportError(
                f"tfdpx was imported from the folder {core!r}, and its part `tfdpx.{name}` was "
                f"{f'found in {folder!r}, which is another copy' if folder else 'not found'}. A "
                "checkout that is not installed shadows any installed tfdpx: run "
                "`pip install -e .` in the checkout, or change to another folder to use the "
                "installed tfdpx."
            )


_check_installation()
_import_hook.connect()
# `tfdpx.report` is a function, but importing the package of the same name sets the attribute to the
# package. So the package is imported here and the attribute deleted; `__getattr__` then returns the
# function.
_importlib.import_module("tfdpx.report")
del report

__all__ = [
    "AdaMix",
    "AdaptiveClip",
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
    "copy_weights",
    "distributed",
    "gradient_norms",
    "heads",
    "layers",
    "make_private",
    "make_private_model",
    "models",
    "per_example",
    "private_adapt",
    "report",
    "sklearn",
    "suggest",
    "synthetic",
]


def __getattr__(name):
    if name not in __all__:
        text = f"module {__name__!r} has no attribute {name!r}. {_ELSEWHERE.get(name, '')}"
        raise AttributeError(text.removesuffix(". "))
    home = _HOMES.get(name, name)
    if home != "accounting":
        # Imported first: it raises an error in one sentence if Keras has another backend.
        _importlib.import_module(f"{__name__}._keras")
    module = _importlib.import_module(f"{__name__}.{home}")
    return getattr(module, name) if name in _HOMES else module


def __dir__():
    return [*__all__, "__doc__", "__version__"]
