"""Checks of the arguments of heads, each by its name: the same name means the same everywhere."""

import math
import numbers

import keras

from tfdpx._arguments import check_choice, check_positive_integer, is_integer, is_number, require
from tfdpx.per_example import rounding

STARTS = ("zeros", "least_squares")
OPTIMIZERS = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}


def checked(given):
    """Dict from names to the values of `given`, if all of them fit; NumPy's numbers as Python's.

    Args:
        given: Dict from names of arguments to values.

    Raises:
        ValueError: If one does not fit.
    """
    for name, value in given.items():
        _CHECKS[name](name, value)
    return {name: plain(value) for name, value in given.items()}


def plain(value):
    """`value`, as an int or float if it is a number of NumPy, which does not go into JSON."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def check_num_classes(value):
    """Raises ValueError unless `value` is an integer >= 2."""
    hint = " Two classes are a binary problem too." if value == 1 else ""
    require(is_integer(value, 2), "num_classes", value, "be an integer >= 2", hint)


def check_clip(name, value):
    """Raises ValueError unless `value` can bound norms."""
    fits = is_number(value) and value >= rounding.SMALLEST_CLIP
    require(fits, name, value, f"be a number >= {rounding.SMALLEST_CLIP}", " Use 1.0.")


def _check_positive(name, value):
    fits = is_number(value) and 0 < value < math.inf
    require(fits, name, value, "be a positive, finite number")


def _check_regularization(name, value):
    fits = is_number(value) and 0 <= value < math.inf
    require(fits, name, value, "be a finite number >= 0")


def _check_bool(name, value):
    require(isinstance(value, bool), name, value, "be True or False")


def _check_finite(name, value):
    require(is_number(value) and math.isfinite(value), name, value, "be a finite number")


def _check_share(name, value):
    fits = is_number(value) and 0 < value < 1
    require(fits, name, value, "lie strictly between 0 and 1", " None gives equal shares.")


def _or_none(check):
    return lambda name, value: value is None or check(name, value)


_CHECKS = {
    "steps": check_positive_integer,
    "max_positives": check_positive_integer,
    "class_memory": check_positive_integer,
    "learning_rate": _check_positive,
    "alpha": _check_positive,
    "start_scale": _check_positive,
    "l2_regularization": _or_none(_check_regularization),
    "covariance_share": _or_none(_check_share),
    "feature_norm_clip": _or_none(check_clip),
    "initial_bias": _check_finite,
    "average": _check_bool,
    "start": lambda name, value: check_choice(name, value, STARTS),
    "optimizer": lambda name, value: check_choice(name, value, OPTIMIZERS),
}
