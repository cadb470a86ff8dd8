"""Checks of arguments, with one form of error; used by the core, layers and models."""

import math
import numbers

# Arguments of Opacus and scikit-learn, with the remedy; docs/coming_from.md has the same table.
ELSEWHERE = {
    "target_epsilon": "Write `epsilon`.",
    "target_delta": "Write `delta`.",
    "sample_rate": "Write `batch_size`, the rate times `num_examples`.",
    "max_grad_norm": "Write `l2_norm_clip`, and multiply the learning rate of plain SGD by it.",
    "max_physical_batch_size": "Write `microbatch_size`; one step is one update.",
    "random_state": "Write `seed`; noise of a known seed gives no privacy.",
    "class_weight": "Leave it out: a noisy count finds rare labels. Choose by `predict_proba`.",
    "sample_weight": "Leave it out: clipping would undo it. Or leave rows out.",
}


def refuse_elsewhere(function, names):
    """Raises TypeError for an argument of another library, with the argument here.

    Args:
        function: String, the name of the function.
        names: Strings, the names of its arguments that it does not know itself.
    """
    for name in names:
        if name in ELSEWHERE:
            raise TypeError(f"{function} takes no argument `{name}`. {ELSEWHERE[name]}")


def require(is_valid, name, value, must, hint=""):
    """Raises ValueError unless the argument `name` is valid.

    Args:
        is_valid: Bool.
        name: String, of the argument.
        value: The received value.
        must: String, what the argument must do, for example "be an int >= 1".
        hint: String for the end of the error, for example " Use 1."
    """
    if not is_valid:
        raise ValueError(
            f"Argument `{name}` must {must}. Received: {name}={shortened(value)}.{hint}"
        )


def has_arrays(value):
    """Returns whether `value` is an array with axes, or a list or tuple that holds one."""
    return any(
        len(getattr(part, "shape", None) or ())
        for part in (value if isinstance(value, list | tuple) else [value])
    )


def shortened(value):
    """Returns the text of a received value; of arrays, which may be private, only the shapes."""
    if not has_arrays(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shortened, value))})"
    return f"<{type(value).__name__} of shape {tuple(value.shape)}>"


def is_integer(value, least):
    """Returns whether `value` is an integer >= `least` of Python or NumPy, but not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


def is_number(value):
    """Returns whether `value` is a real number of Python or NumPy, but not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_positive_integer(name, value, hint=""):
    """Raises ValueError unless `value`, the argument `name`, is an integer >= 1."""
    require(is_integer(value, 1), name, value, "be a positive integer", hint)


def check_choice(name, value, choices):
    """Raises ValueError unless `value`, the argument `name`, is one of `choices`."""
    require(value in choices, name, value, f"be one of {list(choices)}")


def exactly_one_missing(values, spelling="`{}`"):
    """Returns the name of the one argument that is None, to be computed from the others.

    Args:
        values: Dict from names of arguments to their values.
        spelling: String, the form of a name in the error, for example "--{}" for flags.

    Raises:
        ValueError: If none or several are None.
    """
    missing = [name for name, value in values.items() if value is None]
    if len(missing) != 1:
        *names, last = map(spelling.format, values)
        raise ValueError(
            f"Exactly one of {', '.join(names)} and {last} must be left out, because it follows "
            f"from the others. Left out: {', '.join(map(spelling.format, missing)) or 'none'}."
        )
    return missing[0]


def check_image_shape(input_shape, with_size=False):
    """Raises ValueError unless `input_shape` is `(height, width, channels)`.

    Height and width may be None, for images of any size, unless `with_size` is True.
    """
    require(
        len(input_shape) == 3 and input_shape[-1] is not None,
        "input_shape",
        input_shape,
        "be (height, width, channels), without the batch axis and with a known number of channels",
        " Use, e.g., (32, 32, 3); for images without a channel axis, add one of size 1.",
    )
    require(
        not with_size or None not in input_shape,
        "input_shape",
        input_shape,
        "give the height and width, because the dense layer depends on them",
        " Use, e.g., (28, 28, 1).",
    )


def agreed(name, value, plan):
    """Returns the value of an optimizer's argument that `plan`, a `PrivacyPlan` or None, has too.

    Raises:
        ValueError: If it is in neither, or the two differ.
    """
    if plan is None:
        if value is None:
            raise ValueError(
                f"Argument `{name}` is missing. Give the optimizer `plan=tfdpx.PrivacyPlan(...)`, "
                "or both `batch_size` and `noise_multiplier`."
            )
        return value
    planned = getattr(plan, name)
    if value is not None and not math.isclose(value, planned, rel_tol=1e-9):
        raise ValueError(
            f"Argument `{name}` disagrees with the plan. Received: {name}={value}, "
            f"plan.{name}={planned}. Leave `{name}` out."
        )
    return planned
