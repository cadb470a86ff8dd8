"""What a target epsilon buys: the least noise, the most steps, the largest batch.

Every solution is checked by the accountant itself, so none overshoots the target.
"""

import math

import numpy as np
import scipy.optimize

from tfdpx.accounting import accountants

# Beyond these the accountants need too much time and memory, or resolve nothing.
MIN_NOISE_MULTIPLIER = 0.1
MAX_NOISE_MULTIPLIER = 1e6
MAX_STEPS = {"pld": 2**22, "rdp": 2**40}

_RELATIVE_TOLERANCE = 1e-5


def least_noise_multiplier(target, sampling_probability, steps, delta, accountant):
    """The smallest noise multiplier whose epsilon is at most `target`.

    Args:
        target: Float > 0. The epsilon to keep within.
        sampling_probability: Float in (0, 1].
        steps: Int >= 1.
        delta: Float in (0, 1).
        accountant: "pld" or "rdp".

    Returns:
        Float, within about 1e-5 (relative) of the smallest.

    Raises:
        ValueError: If the solution lies outside of [0.1, 1e6].
    """

    def spent(noise_multiplier, accountant=accountant):
        return accountants.epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    edge = _edge(
        lambda u, accountant: spent(math.exp(-u), accountant),
        target,
        low=-math.log(MAX_NOISE_MULTIPLIER),
        high=-math.log(MIN_NOISE_MULTIPLIER),
        accountant=accountant,
        tolerance=lambda upper: _RELATIVE_TOLERANCE,
    )
    solution = math.exp(-edge)
    while spent(solution) > target and solution < MAX_NOISE_MULTIPLIER:
        solution *= 1 + _RELATIVE_TOLERANCE
    if spent(solution) > target:
        raise _unreachable("noise_multiplier", solution, spent(solution), target, delta)
    if solution <= MIN_NOISE_MULTIPLIER * (1 + _RELATIVE_TOLERANCE):
        raise _unbounded("noise_multiplier", solution, spent(solution), target, delta)
    return solution


def most_steps(target, noise_multiplier, sampling_probability, delta, accountant):
    """The largest number of steps whose epsilon is at most `target`.

    Args:
        target: Float > 0. The epsilon to keep within.
        noise_multiplier: Float >= 0.
        sampling_probability: Float in (0, 1].
        delta: Float in (0, 1).
        accountant: "pld" or "rdp".

    Returns:
        Int >= 1.

    Raises:
        ValueError: If one step exceeds `target`, or 2**22 steps (RDP: 2**40) do not.
    """

    def spent(steps, accountant=accountant):
        return accountants.epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    most = MAX_STEPS[accountant]
    solution = _largest_integer("steps", spent, target, most, delta, accountant)
    if solution == most:
        raise _unbounded("steps", solution, spent(solution), target, delta)
    return solution


def largest_batch_size(target, num_examples, noise_multiplier, steps, delta, accountant):
    """The largest expected batch size whose epsilon is at most `target`.

    Args:
        target: Float > 0. The epsilon to keep within.
        num_examples: Int >= 1. The sampling probability is batch size / num_examples.
        noise_multiplier: Float >= 0.
        steps: Int >= 1.
        delta: Float in (0, 1).
        accountant: "pld" or "rdp".

    Returns:
        Int in [1, num_examples].

    Raises:
        ValueError: If even a batch of one exceeds `target`.
    """

    def spent(batch_size, accountant=accountant):
        return accountants.epsilon(
            noise_multiplier, batch_size / num_examples, steps, delta, accountant
        )

    return _largest_integer("batch_size", spent, target, num_examples, delta, accountant)


def _largest_integer(name, spent, target, most, delta, accountant):
    """The largest n in [1, most] with spent(n) <= target."""
    edge = _edge(
        lambda u, accountant: spent(round(math.exp(u)), accountant),
        target,
        low=0.0,
        high=math.log(most),
        accountant=accountant,
        tolerance=lambda upper: math.exp(-upper) / 4,
    )
    solution = round(math.exp(edge))
    while spent(solution) > target and solution > 1:
        solution -= 1
    if spent(solution) > target:
        raise _unreachable(name, solution, spent(solution), target, delta)
    while solution < most and spent(solution + 1) <= target:
        solution += 1
    return solution


def _edge(spent, target, low, high, accountant, tolerance):
    """About where in [low, high] the increasing function `spent` crosses `target`.

    RDP goes first: it is the quicker, and its solution is near that of PLD.
    """

    def excess(u, accountant):
        try:
            epsilon = spent(u, accountant)
        except ValueError:  # A loss too small to resolve; the solution itself is checked later.
            epsilon = 0.0
        with np.errstate(divide="ignore"):
            return float(np.clip(np.log(epsilon / target), -50.0, 50.0))

    def search(accountant, guess, stride):
        lower = upper = guess
        while excess(lower, accountant) > 0 and lower > low:
            lower, upper, stride = max(low, lower - stride), lower, 2 * stride
        while excess(upper, accountant) <= 0 and upper < high:
            lower, upper, stride = upper, min(high, upper + stride), 2 * stride
        if excess(lower, accountant) > 0:
            return lower
        if excess(upper, accountant) <= 0:
            return upper
        return scipy.optimize.brentq(
            excess, lower, upper, args=(accountant,), xtol=tolerance(upper)
        )

    edge = search("rdp", guess=0.0, stride=1.0)
    return edge if accountant == "rdp" else search(accountant, guess=edge, stride=0.1)


def _unreachable(name, value, spent, target, delta):
    return ValueError(
        f"No `{name}` keeps within the target: even {name}={value:g} gives epsilon={spent:.4g}. "
        f"Received: epsilon={target}, delta={delta}. Raise `epsilon`, or change the arguments "
        "that were given beside it: more noise, fewer steps, smaller batches."
    )


def _unbounded(name, value, spent, target, delta):
    return ValueError(
        f"The target does not bound `{name}`: already {name}={value:g} gives epsilon={spent:.4g}. "
        f"Received: epsilon={target}, delta={delta}. Lower `epsilon` or `delta`, or give `{name}`."
    )
