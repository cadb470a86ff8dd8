"""Computes the missing argument of a plan, for example the noise, from a target epsilon.

Epsilon grows if the number of steps or the sampling probability grows, or if the noise shrinks. So
a search in one variable finds the solution. The chosen accountant checks each solution, so the
epsilon of a solution never exceeds the target.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import scipy.optimize

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants

# The range of the search. Outside of it the accountants need too much time and memory, or the
# privacy loss is too small for their precision.
MIN_NOISE_MULTIPLIER = 0.1
MAX_NOISE_MULTIPLIER = 1e6
MAX_STEPS = {"rdp": 2**40}  # 2**22 for all other accountants.
_LEAST_PROBABILITY = 1e-9

_TOLERANCE = 1e-5
# The search needs finite numbers. An epsilon above `_MOST` times the target counts as this product.
_MOST = 1e3


def check(quantities: dict[str, Any]) -> None:
    """Raises ValueError unless all quantities of a run are in range.

    Args:
        quantities: Dict with some of `num_examples`, `batch_size`, `sampling_probability`, `steps`,
            `epochs`, `noise_multiplier` and `delta`. A value of None is not checked.
    """
    quantities = {name: value for name, value in quantities.items() if value is not None}
    for name in ("num_examples", "batch_size", "steps"):
        if name in quantities:
            check_positive_integer(name, quantities[name])
    if quantities.get("batch_size", 0) > quantities.get("num_examples", math.inf):
        raise ValueError(
            "Argument `batch_size` must not exceed `num_examples`. Received: "
            f"batch_size={quantities['batch_size']}, num_examples={quantities['num_examples']}."
        )
    if "sampling_probability" in quantities:
        accountants.check_probability(quantities["sampling_probability"])
    if "epochs" in quantities:
        is_valid = is_number(quantities["epochs"]) and 0 < quantities["epochs"] < math.inf
        require(is_valid, "epochs", quantities["epochs"], "be a positive, finite number")
    if "noise_multiplier" in quantities:
        accountants.check_noise_multiplier(quantities["noise_multiplier"])
    if "delta" in quantities:
        accountants.check_delta(quantities["delta"])


def check_target(epsilon: float) -> None:
    """Raises ValueError unless `epsilon` is a positive, finite number."""
    is_valid = is_number(epsilon) and 0 < epsilon < math.inf
    hint = " Values from 1 to 10 are common."
    require(is_valid, "epsilon", epsilon, "be a positive, finite number", hint)


def run_of(quantities: dict[str, Any]) -> tuple[float, float, int]:
    """Returns the noise multiplier, the sampling probability and the number of steps of a run.

    Args:
        quantities: Dict, as for `check`. It has `noise_multiplier`, and `steps` or `epochs`. The
            sampling probability comes from `batch_size` and `num_examples`, or from
            `sampling_probability`. If all of these are missing, it is 1 (full batches).
    """
    probability = quantities.get("sampling_probability", 1.0)
    if quantities.get("batch_size") is not None and quantities.get("num_examples") is not None:
        probability = quantities["batch_size"] / quantities["num_examples"]
    steps = quantities.get("steps")
    if steps is None:
        # Rounding errors must not add a step. For example, 30 epochs at probability 1/300 are 9000
        # steps.
        steps = max(1, math.ceil(quantities["epochs"] / probability * (1 - 1e-12)))
    return quantities["noise_multiplier"], probability, steps


def solve(
    unknown: str,
    quantities: dict[str, Any],
    accountant: str,
    epsilon_of: Callable[..., float] = accountants.epsilon,
) -> Any:
    """Computes one quantity so that epsilon is as close to its target as possible, but not above.

    Args:
        unknown: The quantity to compute: "noise_multiplier", "steps", "batch_size",
            "sampling_probability" or "num_examples".
        quantities: Dict of the other quantities, as for `run_of`, and `epsilon` (the target) and
            `delta`.
        accountant: A name in `accountants.ACCOUNTANTS`.
        epsilon_of: Function that returns epsilon for a noise multiplier, a sampling probability, a
            number of steps, delta and the name of an accountant.

    Returns:
        Float or int. A noise multiplier or sampling probability has a relative error of about 1e-5,
        on the side of a smaller epsilon.

    Raises:
        ValueError: If the target is out of range, or if no value in the range of the search meets
            the target. For noise and steps also if all values in this range meet the target. The
            range of the noise multiplier is [0.1, 1e6]. The range of the steps is 1 to 2**22, or to
            2**40 for "rdp".
    """
    target, delta = quantities["epsilon"], quantities["delta"]
    check_target(target)
    # The searched number must increase epsilon. So the search is for the inverse of the noise
    # multiplier and, in place of the number of examples, for the sampling probability.
    low: float = 1 if unknown in ("steps", "batch_size") else _LEAST_PROBABILITY
    high: float = 1.0
    if unknown == "noise_multiplier":
        low, high = 1 / MAX_NOISE_MULTIPLIER, 1 / MIN_NOISE_MULTIPLIER
    elif unknown == "steps":
        high = MAX_STEPS.get(accountant, 2**22)
    elif unknown == "batch_size":
        high = quantities["num_examples"]

    def value_of(searched: float) -> Any:
        if unknown == "noise_multiplier":
            return 1 / searched
        return (
            math.ceil(quantities["batch_size"] / searched)
            if unknown == "num_examples"
            else searched
        )

    def spent(value: float, accountant: str = accountant) -> float:
        return epsilon_of(*run_of({**quantities, unknown: value}), delta, accountant)

    solution = _largest_within(lambda x, by: spent(value_of(x), by), target, low, high, accountant)
    value = value_of(solution)
    if isinstance(value, int):
        # Moves in the direction in which epsilon grows. With millions of examples, the moves are
        # larger than 1, for speed.
        step = -max(1, value // 10**6) if unknown == "num_examples" else 1
        least, most = (low, high) if step > 0 else (quantities["batch_size"], math.inf)
        while spent(value) > target and value - step >= least:
            value -= step
        while least <= value + step <= most and spent(value + step) <= target:
            value += step
    if spent(value) > target:
        raise ValueError(
            f"No `{unknown}` meets the target: even {unknown}={value:g} gives epsilon="
            f"{spent(value):.4g}. Received: epsilon={target}, delta={delta}. Raise `epsilon`, or "
            "change the other arguments: more noise, fewer steps, smaller batches."
        )
    if solution >= high * (1 - _TOLERANCE) and unknown in ("noise_multiplier", "steps"):
        raise ValueError(
            f"The target does not bound `{unknown}`: even {unknown}={value:g} gives only epsilon="
            f"{spent(value):.4g}. Received: epsilon={target}, delta={delta}. Lower `epsilon` or "
            f"`delta`, or pass `{unknown}`."
        )
    return value


def _largest_within(spent, target, low, high, accountant):
    """Returns, approximately, the largest number in [low, high] whose epsilon is at most `target`.

    For accountants other than "rdp", the search starts from the RDP solution, which is close and
    fast to compute.

    Args:
        spent: Function that takes a number and the name of an accountant, and returns an epsilon.
            The epsilon increases with the number.
        target: Float > 0, the largest epsilon.
        low: Number, the lower end of the range. If it is an int, the result is an int, which may be
            off by one.
        high: Number, the upper end.
        accountant: A name in `accountants.ACCOUNTANTS`.

    Returns:
        Number. It is `low` if no number in the range is within the target.
    """
    number = round if isinstance(low, int) else float

    def search(accountant, guess, factor):
        @functools.cache
        def excess(value):
            try:
                return min(spent(number(value), accountant), _MOST * target) - target
            except ValueError:  # The loss is too small. The solution is checked later.
                return -target

        lower = upper = guess
        while excess(lower) > 0 and lower > low:
            lower, upper, factor = max(low, lower / factor), lower, factor**2
        while excess(upper) <= 0 and upper < high:
            lower, upper, factor = upper, min(high, upper * factor), factor**2
        if excess(lower) > 0 or excess(upper) <= 0:
            return lower if excess(lower) > 0 else upper
        tolerance = 0.5 if number is round else _TOLERANCE * lower
        fine = tolerance if number is round else tolerance / 100
        root = scipy.optimize.brentq(excess, lower, upper, xtol=fine)
        below = (value for value in (root, root - fine) if excess(value) <= 0)
        return next(below, max(lower, root - tolerance))

    value = search("rdp", guess=1.0, factor=math.e)
    return number(value if accountant == "rdp" else search(accountant, guess=value, factor=1.1))
