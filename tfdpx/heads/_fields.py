"""Arguments of heads: fields of a dataclass, each with the check of its values.

    learning_rate: float = argument(4.0, positive)

A check is a function of an argument's name and value that raises ValueError.
"""

import dataclasses
import math
import numbers
from typing import Any

from tfdpx._arguments import check_choice, is_integer, is_number, require
from tfdpx.per_example import rounding


def argument(default, check, **options) -> Any:
    """A field of a head's dataclass.

    Args:
        default: Default value.
        check: Function of a name and a value, such as those of this file.
        **options: As of `dataclasses.field`.
    """
    return dataclasses.field(default=default, metadata={"check": check}, **options)


def checked(head):
    """Dict from the names of a head's arguments to their values; NumPy's numbers as Python's.

    Args:
        head: Instance of a dataclass whose fields are `argument`s.

    Raises:
        ValueError: If a value does not fit.
    """
    values = {}
    for field in dataclasses.fields(head):
        value = getattr(head, field.name)
        field.metadata["check"](field.name, value)
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            value = int(value) if isinstance(value, numbers.Integral) else float(value)
        values[field.name] = value
    return values


def classes(name, value):
    """A number of classes."""
    hint = " Two classes are a binary problem too." if value == 1 else ""
    require(is_integer(value, 2), name, value, "be an integer >= 2", hint)


def budget(name, value):
    """An epsilon."""
    hint = " Values from 0.1 to 8 are common; math.inf is without privacy."
    require(is_number(value) and value > 0, name, value, "be a positive number", hint)


def norm_bound(name, value):
    """A clip: what bounds l2 norms."""
    fits = is_number(value) and value >= rounding.SMALLEST_CLIP
    require(fits, name, value, f"be a number >= {rounding.SMALLEST_CLIP}", " Use 1.0.")


def positive(name, value, hint=""):
    """A number above 0."""
    fits = is_number(value) and 0 < value < math.inf
    require(fits, name, value, "be a positive, finite number", hint)


def not_negative(name, value):
    """A number >= 0."""
    fits = is_number(value) and 0 <= value < math.inf
    require(fits, name, value, "be a finite number >= 0")


def finite(name, value):
    """Any finite number."""
    require(is_number(value) and math.isfinite(value), name, value, "be a finite number")


def boolean(name, value):
    """True or False."""
    require(isinstance(value, bool), name, value, "be True or False")


def share(name, value):
    """A number between 0 and 1."""
    fits = is_number(value) and 0 < value < 1
    require(fits, name, value, "lie strictly between 0 and 1", " None gives equal shares.")


def one_of(*choices):
    """The check that a value is one of `choices`."""
    return lambda name, value: check_choice(name, value, choices)


def optional(check):
    """The check that a value is None or passes `check`."""
    return lambda name, value: None if value is None else check(name, value)
