"""Solves for the one quantity of a run that was left out, within a budget.

Epsilon grows with the steps, the sampling probability and the inverse of the noise. Every solution
is checked with the accountant itself: none exceeds the target.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import scipy.optimize

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants

# Beyond these the accountants need too much time and memory, or cannot resolve the loss.
MIN_NOISE_MULTIPLIER = 0.1
MAX_NOISE_MULTIPLIER = 1e6
MAX_STEPS = {"rdp": 2**40}  # 2**22 for all other accountants.
_LEAST_PROBABILITY = 1e-9

_TOLERANCE = 1e-5
_MOST = 1e3  # An epsilon can be infinite, but an interpolating search needs finite numbers.


def check(quantities: dict[str, Any]) -> None:
    """Checks the known quantities of a run.

    Args:
        quantities: Dict of any of `num_examples`, `batch_size`, `sampling_probability`, `steps`,
            `epochs`, `noise_multiplier` and `delta`. None means unknown.

    Raises:
        ValueError: If one is out of range.
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
    """Returns noise multiplier, sampling probability and steps of a run.

    Args:
        quantities: Dict as for `check`: a noise multiplier; a batch size and a number of examples,
            or a sampling probability, or neither for full batches; and steps or epochs.
    """
    probability = quantities.get("sampling_probability", 1.0)
    if quantities.get("batch_size") is not None and quantities.get("num_examples") is not None:
        probability = quantities["batch_size"] / quantities["num_examples"]
    steps = quantities.get("steps")
    if steps is None:
        # 30 epochs of 1/300 are 9000 steps, even if the quotient is off by its last bit.
        steps = max(1, math.ceil(quantities["epochs"] / probability * (1 - 1e-12)))
    return quantities["noise_multiplier"], probability, steps


def solve(
    unknown: str,
    quantities: dict[str, Any],
    accountant: str,
    epsilon_of: Callable[..., float] = accountants.epsilon,
) -> Any:
    """Returns the value with the largest epsilon that is at most the target.

    Args:
        unknown: "noise_multiplier", "steps", "batch_size", "sampling_probability" or
            "num_examples".
        quantities: Dict as for `run_of`, without the unknown, and with `epsilon` and `delta`.
        accountant: A name in `accountants.ACCOUNTANTS`.
        epsilon_of: Function of a noise multiplier, a sampling probability, steps, delta and the
            name of an accountant.

    Returns:
        Float or int. Noise and sampling probability are within about 1e-5 (relative) of the best.

    Raises:
        ValueError: If `quantities["epsilon"]` is out of range, or no value in the search range
            meets it or exceeds it: noise in [0.1, 1e6], up to 2**22 steps (RDP: 2**40).
    """
    target, delta = quantities["epsilon"], quantities["delta"]
    check_target(target)
    # The searched number grows with epsilon: the inverse of the noise, the rate of the examples.
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
        # One step more costs more epsilon. Of millions of examples skip parts, for speed.
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
    """Returns about the largest number in [low, high] with spent(number) <= target, else `low`.

    RDP is solved first: it is faster, and its solution is close to the other accountants'.

    Args:
        spent: Increasing function of a number and the name of an accountant.
        target: Float > 0.
        low: Number. If it is an int, so is the result, which may be off by one.
        high: Number.
        accountant: A name in `accountants.ACCOUNTANTS`.
    """
    number = round if isinstance(low, int) else float

    def search(accountant, guess, factor):
        @functools.cache
        def excess(value):
            try:
                return min(spent(number(value), accountant), _MOST * target) - target
            except ValueError:  # The loss is too small to resolve; the solution is checked later.
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
