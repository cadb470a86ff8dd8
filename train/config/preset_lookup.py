"""Presets by name, and the settings that a preset and the given flags make."""

import importlib
import math
import pkgutil

from tfdpx.train import presets
from tfdpx.train.config.training import PRIVACY, Training
from tfdpx.train.data import tfds
from tfdpx.train.errors import UserError, did_you_mean


def names():
    """Returns the names of all presets, such as `"digits"` and `"table12/eps8"`."""
    return [f"{m}/{c}" if c else m for m, columns in _modules().items() for c in columns or [None]]


def default_for(dataset):
    """Returns the preset of a run that names none.

    Args:
        dataset: What --dataset says, or None.
    """
    return tfds.FOLDER if (dataset or "").startswith(f"{tfds.FOLDER}:") else "digits"


def summary():
    """Returns the names of all presets as a phrase, those of a table together."""
    tables = _modules().items()
    return ", ".join(f"{m}/({'|'.join(columns)})" if columns else m for m, columns in tables)


def resolve(preset, given):
    """Returns the `Training` of a preset with the given values in place of its own.

    Of noise_multiplier, epsilon, steps and batch_size exactly one is to be left open. Given values
    stay; where they and the preset's are too many, the preset's noise_multiplier goes first, then
    its epsilon, its steps, its batch_size. So `epsilon` alone chooses the noise, and
    `noise_multiplier` alone gives the epsilon that follows from it. Without privacy
    (`private=False`) the preset's noise, clip and epsilon go.

    Args:
        preset: Name of a preset.
        given: Dict of the fields of `Training` that the user chose; `None` counts as not chosen.

    Raises:
        UserError: If there is no such preset or a value is out of its range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    epsilon = given.get("epsilon")
    if epsilon is not None and not 0 < epsilon < math.inf:  # Presets compute with it.
        raise UserError(
            f"Flag --epsilon must be positive and finite. Received: --epsilon={epsilon}. "
            "For a run without privacy use --private=false."
        )
    values = _values_of(preset, epsilon)
    if given.get("private", values.get("private", True)):
        values.update(given)
    else:
        values.pop("epsilon", None)
        values.update({"noise_multiplier": 0.0, "l2_norm_clip": math.inf, **given})
    left_open = None in (values.get("steps"), values.get("batch_size"))
    if left_open and "noise_multiplier" in given and "epsilon" not in given:
        values.pop("epsilon", None)  # What the preset leaves open is chosen, not solved for.
    if all(values.get(name) is not None for name in PRIVACY):
        values.pop(next((name for name in PRIVACY if name not in given), None), None)
    return Training(**values)


def _values_of(preset, epsilon):
    """Returns the values of a preset, at the given epsilon if it depends on that."""
    if preset not in names():
        raise UserError(
            f"There is no preset {preset!r}.{did_you_mean(preset, names())} Received: "
            f"--preset={preset}. Use one of: {summary()}."
        )
    name, _, column = preset.partition("/")
    module = _module(name)
    common, values = (module.COMMON, module.COLUMNS[column]) if column else ({}, module.settings)
    if callable(values):
        epsilon = module.EPSILON if epsilon is None else epsilon
        values = {"epsilon": epsilon, **values(epsilon)}
    return {**common, **values}


def _modules():
    """Returns the modules of presets with their columns, if any; table 2 before table 12."""
    found = [module.name for module in pkgutil.iter_modules(presets.__path__)]
    found.sort(key=lambda name: (len(name), name))
    return {name: getattr(_module(name), "COLUMNS", None) for name in found}


def _module(name):
    return importlib.import_module(f"{presets.__name__}.{name}")
