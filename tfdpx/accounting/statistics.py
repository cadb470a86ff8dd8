"""Statistics of individual epsilons that may be published (Yu et al. 2022, appendix E)."""

import dataclasses
import math
import secrets

import numpy as np

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Entry, Ledger

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The noise of the mean is averaged over so many releases.
_OF_THE_MEAN = 4
_NOTHING = Ledger()


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What `release_statistics` found. All of it may be published.

    Attributes:
        mean: Float.
        quantiles: Dict from the share of examples at or below it to the value.
        epsilon: Float, what the release itself cost, at `delta`.
        total_epsilon: Float, what it cost together with the ledger before it, at `delta`.
        delta: Float.
        ledger: `Ledger` of the release alone.
    """

    mean: float
    quantiles: dict[float, float]
    epsilon: float
    total_epsilon: float
    delta: float
    ledger: Ledger


def release_statistics(
    values: np.ndarray,
    bound: float,
    delta: float,
    noise_multiplier: float,
    quantiles: tuple[float, ...] = _QUANTILES,
    steps: int = 20,
    seed: int | None = None,
    *,
    before: Ledger = _NOTHING,
    accountant: str = "pld",
) -> Statistics:
    """The mean and quantiles of numbers, one an example, by Gaussian releases.

    Guarantee: 4 + `steps` Gaussian mechanisms of `noise_multiplier` on the full batch, under adding
    or removing one example, at a public number of examples; the values are clipped to
    [0, `bound`]. A value must depend on its own example and on what is public alone. Of epsilons
    from an `IndividualAccountant` that is so: they follow from the noisy weights.

    The mean is the noisy sum of `value - bound / 2`, which one example changes by bound / 2; it
    gets half of the noise, and is counted four times. For m quantiles, noisy counts of values below
    m thresholds, each less half of the examples, change by sqrt(m) / 2 together; `steps` times,
    each threshold goes downhill on the loss of Andrew et al. 2021 (arXiv:1905.03871). At the end
    one rising curve is fitted to all counts, and read off; that costs nothing, and averages the
    noise.

    Args:
        values: Float array [num_examples].
        bound: Float > 0 and public, such as the plan's epsilon.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0. Of each of the releases.
        quantiles: Tuple of floats in (0, 1), or empty.
        steps: Int >= 1.
        seed: Optional int for tests: noise of a known seed can be subtracted.
        before: `Ledger` of what was spent on the same data.
        accountant: As of `tfdpx.accounting.epsilon`, for the total.

    Returns:
        `Statistics`.

    Raises:
        ValueError: If an argument is out of its range.
    """
    fits = is_number(bound) and 0 < bound < math.inf
    require(fits, "bound", bound, "be positive and finite", " Nothing was trained, or no noise?")
    accountants.check_noise_multiplier(noise_multiplier)
    require(noise_multiplier, "noise_multiplier", noise_multiplier, "be a finite number > 0")
    accountants.check_delta(delta)
    check_positive_integer("steps", steps)
    shares = np.asarray(quantiles, float)
    fits = shares.ndim == 1 and bool(((shares > 0) & (shares < 1)).all())
    require(fits, "quantiles", quantiles, "be a tuple of floats in (0, 1)")
    values = np.clip(np.asarray(values, float), 0.0, bound)
    key = secrets.randbits(128) if seed is None else seed
    draw = np.random.Generator(np.random.Philox(key)).standard_normal

    # What is not known must not pass: NaN is clipped to nothing.
    require(bool(np.isfinite(values).all()), "values", "NaN", "be finite")
    noise = noise_multiplier / math.sqrt(_OF_THE_MEAN) * bound / 2 * draw()
    mean = bound / 2 + (float(np.sum(values - bound / 2)) + noise) / len(values)
    found = {}
    if len(shares):
        deviation = noise_multiplier * math.sqrt(len(shares)) / 2

        def share_below(thresholds):
            below = np.sum((values[:, np.newaxis] <= thresholds) - 0.5, axis=0)
            return 0.5 + (below + deviation * draw(len(thresholds))) / len(values)

        at = _quantiles(share_below, shares, bound, steps)
        found = dict(zip(shares.tolist(), at.tolist(), strict=True))
    releases = _OF_THE_MEAN + (steps if len(shares) else 0)
    entry = Entry(
        *(noise_multiplier, 1.0, releases),
        run=secrets.randbits(52) | 1,
        seeded=seed is not None,
        kind="release",
    )
    ledger = Ledger((entry,))
    return Statistics(
        mean=min(max(mean, 0.0), bound),
        quantiles=found,
        epsilon=ledger.composed_epsilon(delta),
        total_epsilon=(before + ledger).composed_epsilon(delta, accountant),
        delta=delta,
        ledger=ledger,
    )


def _quantiles(share_below, shares, bound, steps):
    """The values [m] below which `shares` [m] lie, in [0, bound], from `steps` noisy looks."""
    from sklearn import isotonic  # On the call: it takes as long to import as all else.

    thresholds = shares * bound
    at, shown = [np.zeros(1)], [np.zeros(1)]
    for step in range(1, steps + 1):
        below = share_below(thresholds)
        at.append(thresholds)
        shown.append(below)
        rate = 2 * bound / step**0.75
        thresholds = np.clip(thresholds - rate * (below - shares), 0, bound)
    looked, seen = np.concatenate([*at, [bound]]), np.concatenate([*shown, [1.0]])
    # Both ends are known.
    weights = np.where((looked == 0) | (looked == bound), 1e6, 1.0)
    curve = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(looked, seen, weights)
    ascending = np.sort(looked)
    levels, place = np.unique(curve.predict(ascending), return_inverse=True)
    # The middle of each flat piece.
    middles = np.bincount(place, ascending) / np.bincount(place)
    return np.interp(shares, levels, middles)
