"""What a target epsilon buys: the least noise, the most steps, the largest batch.

Every solution is checked by the accountant itself, so none overshoots the target.
"""

import math

import dp_accounting

from tfdpx.accounting import accountants

# Beyond these the accountants need too much time and memory, or resolve nothing.
MIN_NOISE_MULTIPLIER = 0.1
MAX_NOISE_MULTIPLIER = 1e6
MAX_STEPS = {"rdp": 2**40}  # 2**22 for all others.

_RELATIVE_TOLERANCE = 1e-5
_MOST = 1e3  # Targets; epsilon can be infinite, and an interpolating search needs numbers.


def least_noise_multiplier(target, sampling_probability, steps, delta, accountant):
    """The smallest noise multiplier whose epsilon is at most `target`.

    Args:
        target: Float > 0. The epsilon to keep within.
        sampling_probability: Float in (0, 1].
        steps: Int >= 1.
        delta: Float in (0, 1).
        accountant: A name in `accountants.ACCOUNTANTS`.

    Returns:
        Float, within about 1e-5 (relative) of the smallest.

    Raises:
        ValueError: If the solution lies outside of [0.1, 1e6].
    """

    def spent(inverse, accountant=accountant):
        return accountants.epsilon(1 / inverse, sampling_probability, steps, delta, accountant)

    # Epsilon grows with the inverse, as it does with the steps and the batch size.
    low, high = 1 / MAX_NOISE_MULTIPLIER, 1 / MIN_NOISE_MULTIPLIER
    inverse = largest_within(spent, target, low, high, accountant)
    solution = 1 / inverse
    if spent(inverse) > target:
        raise _unreachable("noise_multiplier", solution, spent(inverse), target, delta)
    if solution <= MIN_NOISE_MULTIPLIER * (1 + _RELATIVE_TOLERANCE):
        raise _unbounded("noise_multiplier", solution, spent(inverse), target, delta)
    return solution


def most_steps(target, noise_multiplier, sampling_probability, delta, accountant):
    """The largest number of steps whose epsilon is at most `target`.

    Args:
        target: Float > 0. The epsilon to keep within.
        noise_multiplier: Float >= 0.
        sampling_probability: Float in (0, 1].
        delta: Float in (0, 1).
        accountant: A name in `accountants.ACCOUNTANTS`.

    Returns:
        Int >= 1.

    Raises:
        ValueError: If one step exceeds `target`, or 2**22 steps (RDP: 2**40) do not.
    """

    def spent(steps, accountant=accountant):
        return accountants.epsilon(noise_multiplier, sampling_probability, steps, delta, accountant)

    most = MAX_STEPS.get(accountant, 2**22)
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
        accountant: A name in `accountants.ACCOUNTANTS`.

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
    solution = largest_within(spent, target, 1, most, accountant)
    while spent(solution) > target and solution > 1:
        solution -= 1
    if spent(solution) > target:
        raise _unreachable(name, solution, spent(solution), target, delta)
    while solution < most and spent(solution + 1) <= target:
        solution += 1
    return solution


def largest_within(spent, target, low, high, accountant):
    """About the largest value in [low, high] with spent(value) <= target; `low` if none has.

    It may be too large by a hair: check it.

    RDP goes first: it is the quicker, and its solution is near that of PLD.

    Args:
        spent: Increasing function of a value and the name of an accountant.
        target: Float > 0.
        low: Number. If an int, the values are ints.
        high: Number.
        accountant: A name in `accountants.ACCOUNTANTS`.
    """
    number = type(low)

    def search(accountant, guess, factor):
        judge = _Judge(spent, target, accountant)

        def exceeds(value):
            return judge.compose(value).get_epsilon() > target

        lower = upper = guess
        while exceeds(lower) and lower > low:
            lower, upper, factor = max(low, number(lower / factor)), lower, factor**2
        while not exceeds(upper) and upper < high:
            lower, upper, factor = upper, min(high, number(upper * factor)), factor**2
        if exceeds(lower) or not exceeds(upper):
            return lower if exceeds(lower) else upper
        return dp_accounting.calibrate_dp_mechanism(
            lambda: judge,
            lambda value: value,
            target,
            0.0,  # Delta, which `spent` knows.
            dp_accounting.ExplicitBracketInterval(lower, upper),
            discrete=number is int,
            tol=_RELATIVE_TOLERANCE * lower,
        )

    value = search("rdp", guess=number(1), factor=math.e)
    return value if accountant == "rdp" else search(accountant, guess=value, factor=1.1)


class _Judge:
    """An accountant for `calibrate_dp_mechanism`, whose events are the values that it searches."""

    ledger = dp_accounting.NoOpDpEvent()

    def __init__(self, spent, target, accountant):
        self._spent, self._target, self._accountant = spent, target, accountant

    def compose(self, value):
        self._value = value
        return self

    def get_epsilon(self, delta=None):
        try:
            epsilon = self._spent(self._value, self._accountant)
        except ValueError:  # A loss too small to resolve; the solution itself is checked later.
            return 0.0
        # The search takes what lies strictly below the target: the target itself is within it.
        within = epsilon <= self._target
        return math.nextafter(epsilon, 0.0) if within else min(epsilon, _MOST * self._target)


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
