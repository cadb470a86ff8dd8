"""What a budget buys: the quantity of a run that is left out, solved from the others.

Epsilon grows with the steps, the sampling probability and the inverse of the noise. Every solution
is checked by the accountant itself, so none exceeds the target.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import scipy.optimize

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants

# Beyond these the accountants need too much time and memory, or resolve nothing.
MIN_NOISE_MULTIPLIER = 0.1
MAX_NOISE_MULTIPLIER = 1e6
MAX_STEPS = {"rdp": 2**40}  # 2**22 for all others.
_LEAST_PROBABILITY = 1e-9

_TOLERANCE = 1e-5
_MOST = 1e3  # Targets; epsilon can be infinite, and an interpolating search needs numbers.


def check(known: dict[str, Any]) -> None:
    """Checks the quantities of a run that are known.

    Args:
        known: Dict of any of `num_examples`, `batch_size`, `sampling_probability`, `steps`,
            `epochs`, `noise_multiplier` and `delta`; None is unknown.

    Raises:
        ValueError: If one is out of its range.
    """
    known = {name: value for name, value in known.items() if value is not None}
    for name in ("num_examples", "batch_size", "steps"):
        if name in known:
            check_positive_integer(name, known[name])
    if known.get("batch_size", 0) > known.get("num_examples", math.inf):
        raise ValueError(
            "Argument `batch_size` must not exceed `num_examples`. Received: "
            f"batch_size={known['batch_size']}, num_examples={known['num_examples']}."
        )
    if "sampling_probability" in known:
        accountants.check_probability(known["sampling_probability"])
    if "epochs" in known:
        fits = is_number(known["epochs"]) and 0 < known["epochs"] < math.inf
        require(fits, "epochs", known["epochs"], "be a positive, finite number")
    if "noise_multiplier" in known:
        accountants.check_noise_multiplier(known["noise_multiplier"])
    if "delta" in known:
        accountants.check_delta(known["delta"])


def check_target(epsilon: float) -> None:
    """Raises ValueError unless `epsilon` is a positive, finite number."""
    fits = is_number(epsilon) and 0 < epsilon < math.inf
    hint = " Values from 1 to 10 are common."
    require(fits, "epsilon", epsilon, "be a positive, finite number", hint)


def run_of(known: dict[str, Any]) -> tuple[float, float, int]:
    """The run of known quantities: noise multiplier, sampling probability and steps.

    Args:
        known: Dict as of `check`: a noise multiplier; a batch size and a number of examples, or a
            sampling probability, or neither for full batches; and steps or epochs.
    """
    probability = known.get("sampling_probability", 1.0)
    if known.get("batch_size") is not None and known.get("num_examples") is not None:
        probability = known["batch_size"] / known["num_examples"]
    steps = known.get("steps")
    if steps is None:
        # 30 epochs of 1/300 are 9000 steps, whatever the last bit of the quotient says.
        steps = max(1, math.ceil(known["epochs"] / probability * (1 - 1e-12)))
    return known["noise_multiplier"], probability, steps


def solve(
    unknown: str,
    known: dict[str, Any],
    accountant: str,
    epsilon_of: Callable[..., float] = accountants.epsilon,
) -> Any:
    """The value with the largest epsilon that is at most the target.

    Args:
        unknown: "noise_multiplier", "steps", "batch_size", "sampling_probability" or
            "num_examples".
        known: Dict as of `run_of`, without the unknown, and with the target `epsilon` and `delta`.
        accountant: A name in `accountants.ACCOUNTANTS`.
        epsilon_of: Function of a noise multiplier, a sampling probability, steps, delta and the
            name of an accountant.

    Returns:
        Float or int. Of noise and sampling probability within about 1e-5 (relative) of the best.

    Raises:
        ValueError: If `known["epsilon"]` is out of its range, or nothing meets or exceeds it: no
            noise in [0.1, 1e6], no number of steps up to 2**22 (RDP: 2**40).
    """
    target, delta = known["epsilon"], known["delta"]
    check_target(target)
    # What is searched grows with epsilon: the inverse of the noise, the rate of so many examples.
    low: float = 1 if unknown in ("steps", "batch_size") else _LEAST_PROBABILITY
    high: float = 1.0
    if unknown == "noise_multiplier":
        low, high = 1 / MAX_NOISE_MULTIPLIER, 1 / MIN_NOISE_MULTIPLIER
    elif unknown == "steps":
        high = MAX_STEPS.get(accountant, 2**22)
    elif unknown == "batch_size":
        high = known["num_examples"]

    def value_of(searched: float) -> Any:
        if unknown == "noise_multiplier":
            return 1 / searched
        return math.ceil(known["batch_size"] / searched) if unknown == "num_examples" else searched

    def spent(value: float, accountant: str = accountant) -> float:
        return epsilon_of(*run_of({**known, unknown: value}), delta, accountant)

    found = _largest_within(lambda x, by: spent(value_of(x), by), target, low, high, accountant)
    value = value_of(found)
    if isinstance(value, int):
        # One step more epsilon. Of millions of examples a part of them: each costs an evaluation.
        step = -max(1, value // 10**6) if unknown == "num_examples" else 1
        least, most = (low, high) if step > 0 else (known["batch_size"], math.inf)
        while spent(value) > target and value - step >= least:
            value -= step
        while least <= value + step <= most and spent(value + step) <= target:
            value += step
    if spent(value) > target:
        raise ValueError(
            f"No `{unknown}` keeps within the target: even {unknown}={value:g} gives epsilon="
            f"{spent(value):.4g}. Received: epsilon={target}, delta={delta}. Raise `epsilon`, or "
            "change the other arguments: more noise, fewer steps, smaller batches."
        )
    if found >= high * (1 - _TOLERANCE) and unknown in ("noise_multiplier", "steps"):
        raise ValueError(
            f"The target does not bound `{unknown}`: already {unknown}={value:g} gives epsilon="
            f"{spent(value):.4g}. Received: epsilon={target}, delta={delta}. Lower `epsilon` or "
            f"`delta`, or give `{unknown}`."
        )
    return value


def _largest_within(spent, target, low, high, accountant):
    """About the largest number in [low, high] with spent(number) <= target; `low` if none has.

    RDP goes first: it is the quicker, and its solution is near the other accountants'.

    Args:
        spent: Increasing function of a number and the name of an accountant.
        target: Float > 0.
        low: Number. If an int, integers may be off by one.
        high: Number.
        accountant: A name in `accountants.ACCOUNTANTS`.
    """
    number = round if isinstance(low, int) else float

    def search(accountant, guess, factor):
        @functools.cache
        def excess(value):
            try:
                return min(spent(number(value), accountant), _MOST * target) - target
            except ValueError:  # A loss too small to resolve; the solution itself is checked later.
                return -target

        lower = upper = guess
        while excess(lower) > 0 and lower > low:
            lower, upper, factor = max(low, lower / factor), lower, factor**2
        while excess(upper) <= 0 and upper < high:
            lower, upper, factor = upper, min(high, upper * factor), factor**2
        if excess(lower) > 0 or excess(upper) <= 0:
            return lower if excess(lower) > 0 else upper
        tolerance = 0.5 if number is round else _TOLERANCE * lower
        root = scipy.optimize.brentq(excess, lower, upper, xtol=tolerance)
        return root if excess(root) <= 0 else max(lower, root - tolerance)

    value = search("rdp", guess=1.0, factor=math.e)
    return number(value if accountant == "rdp" else search(accountant, guess=value, factor=1.1))
