"""Checks arguments. All modules of tfdpx use these checks, and all errors have the same form."""

import math
import numbers

# Names of Opacus and scikit-learn, with the text that tells what to write in tfdpx instead;
# docs/coming_from.md has the same table.
ELSEWHERE = {
    "target_epsilon": "Write `epsilon`.",
    "target_delta": "Write `delta`.",
    "sample_rate": "Write `batch_size`, the rate times `num_examples`.",
    "max_grad_norm": "Write `l2_norm_clip`, and multiply the learning rate of plain SGD by it.",
    "max_physical_batch_size": "Write `microbatch_size`; one step is one update.",
    "PrivacyEngine": "Write `tfdpx.make_private_model`, then train by `fit`.",
    "get_epsilon": "Write `model.optimizer.ledger.epsilon(delta)`.",
    "virtual_step": "Write `microbatch_size`; one step is one update.",
    "random_state": "Write `seed`; noise of a known seed gives no privacy.",
    "class_weight": "Leave it out: estimators count labels with noise. Choose a threshold instead.",
    "sample_weight": "Leave it out: clipping would undo it. To give a row no weight, remove it.",
}


def refuse_elsewhere(function, names):
    """Raises TypeError for an argument that other libraries have, and names tfdpx's equivalent.

    Args:
        function: String, the name of the function that was called.
        names: Strings, the names of arguments that were passed but that the function lacks.
    """
    for name in names:
        if name in ELSEWHERE:
            raise TypeError(f"{function} takes no argument `{name}`. {ELSEWHERE[name]}")


def require(is_valid, name, value, must, hint=""):
    """Raises ValueError unless the argument `name` is valid.

    Args:
        is_valid: Bool, whether the argument is valid.
        name: String, the name of the argument.
        value: The received value, for the error.
        must: String, the requirement in the error, for example "be an int >= 1".
        hint: String, the end of the error, for example " Use 1."
    """
    if not is_valid:
        raise ValueError(
            f"Argument `{name}` must {must}. Received: {name}={shortened(value)}.{hint}"
        )


def has_arrays(value):
    """Returns whether `value` is an array of rank >= 1, or a list or tuple that contains one."""
    return any(
        len(getattr(part, "shape", None) or ())
        for part in (value if isinstance(value, list | tuple) else [value])
    )


def shortened(value):
    """Returns the text of a value for an error.

    Arrays may be private, so the text has only their type and shape.
    """
    if not has_arrays(value):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shortened, value))})"
    return f"<{type(value).__name__} of shape {tuple(value.shape)}>"


def first_names(names, most=3):
    """Returns the text of at most `most` names, which tells how many others there are."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f", ... ({others} more)" if others > 0 else "")


def is_integer(value, least):
    """Returns whether `value` is a Python or NumPy integer >= `least`, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


def is_number(value):
    """Returns whether `value` is a real number of Python or NumPy, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_positive_integer(name, value, hint=""):
    """Raises ValueError unless the argument `name` has an integer `value` >= 1."""
    require(is_integer(value, 1), name, value, "be a positive integer", hint)


def check_choice(name, value, choices):
    """Raises ValueError unless the argument `name` has a `value` among `choices`."""
    require(value in choices, name, value, f"be one of {list(choices)}")


def exactly_one_missing(values, spelling="`{}`"):
    """Returns the name of the only argument that is None. The caller computes that argument.

    Args:
        values: Dict from names of arguments to their values.
        spelling: Format string for names in the error, for example "--{}" for flags.

    Raises:
        ValueError: If no value, or more than one, is None.
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
    """Returns the value of a setting that an optimizer may get as an argument or from its plan.

    Args:
        name: String, the name of the argument, for example "batch_size".
        value: The optimizer's value, or None to use the plan's.
        plan: A `tfdpx.PrivacyPlan`, or None.

    Raises:
        ValueError: If neither has a value, or the two values differ.
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
