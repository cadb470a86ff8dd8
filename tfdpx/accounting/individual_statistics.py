"""Statistics of individual epsilons that may be published (Yu et al. 2022, appendix E)."""

import dataclasses
import math
import secrets

import numpy as np

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Entry, Ledger

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The noise of the mean is averaged over this number of releases.
_OF_THE_MEAN = 4
_NOTHING = Ledger()


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The result of `release_statistics`. All of it may be published.

    Attributes:
        mean: Float.
        quantiles: Dict from the share of examples at or below it to the value.
        epsilon: Float, the cost of the release itself, at `delta`.
        total_epsilon: Float, its cost together with the ledger before it, at `delta`.
        delta: Float.
        ledger: `Ledger` of the release only.
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
    """Releases the mean and quantiles of numbers, one per example, by Gaussian mechanisms.

    Guarantee: 4 + `steps` Gaussian mechanisms of `noise_multiplier` on the full batch, under adding
    or removing one example, at a public number of examples; the values are clipped to
    [0, `bound`]. A value must depend only on its own example and on public information. Epsilons of
    an `IndividualAccountant` do, because they follow from the noisy weights.

    The mean is the noisy sum of `value - bound / 2`, which one example changes by bound / 2. It
    gets half of the noise, and counts as four releases. For m quantiles, noisy counts of values
    below m thresholds, each minus half of the examples, change by sqrt(m) / 2 together. In each of
    `steps` steps, every threshold goes downhill on the loss of Andrew et al. 2021
    (arXiv:1905.03871). At the end the quantiles are read from one rising curve that is fitted to
    all counts, which costs nothing and averages the noise.

    Args:
        values: Float array [num_examples].
        bound: Float > 0 and public, for example the plan's epsilon.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0, of each of the releases.
        quantiles: Tuple of floats in (0, 1), or empty.
        steps: Int >= 1.
        seed: Optional int for tests: noise of a known seed can be subtracted.
        before: `Ledger` of the earlier costs on the same data.
        accountant: As for `tfdpx.accounting.epsilon`, for the total.

    Returns:
        `Statistics`.

    Raises:
        ValueError: If an argument is out of range.
    """
    is_valid = is_number(bound) and 0 < bound < math.inf
    require(is_valid, "bound", bound, "be positive and finite", " Was anything trained with noise?")
    accountants.check_noise_multiplier(noise_multiplier)
    require(noise_multiplier, "noise_multiplier", noise_multiplier, "be a finite number > 0")
    accountants.check_delta(delta)
    check_positive_integer("steps", steps)
    shares = np.asarray(quantiles, float)
    is_valid = shares.ndim == 1 and bool(((shares > 0) & (shares < 1)).all())
    require(is_valid, "quantiles", quantiles, "be a tuple of floats in (0, 1)")
    values = np.clip(np.asarray(values, float), 0.0, bound)
    key = secrets.randbits(128) if seed is None else seed
    draw = np.random.Generator(np.random.Philox(key)).standard_normal

    # NaN must not pass: clipping does not remove it.
    require(bool(np.isfinite(values).all()), "values", "NaN", "be finite")
    noise = noise_multiplier / math.sqrt(_OF_THE_MEAN) * bound / 2 * draw()
    mean = bound / 2 + (float(np.sum(values - bound / 2)) + noise) / len(values)
    values_at = {}
    if len(shares):
        deviation = noise_multiplier * math.sqrt(len(shares)) / 2

        def share_below(thresholds):
            below = np.sum((values[:, np.newaxis] <= thresholds) - 0.5, axis=0)
            return 0.5 + (below + deviation * draw(len(thresholds))) / len(values)

        at = _quantiles(share_below, shares, bound, steps)
        values_at = dict(zip(shares.tolist(), at.tolist(), strict=True))
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
        quantiles=values_at,
        epsilon=ledger.composed_epsilon(delta),
        total_epsilon=(before + ledger).composed_epsilon(delta, accountant),
        delta=delta,
        ledger=ledger,
    )


def _quantiles(share_below, shares, bound, steps):
    """Returns the values [m] below which `shares` [m] lie, in [0, bound], from `steps` queries."""
    from sklearn import isotonic  # On the call: importing it takes as long as all else.

    thresholds = shares * bound
    at, shown = [np.zeros(1)], [np.zeros(1)]
    for step in range(1, steps + 1):
        below = share_below(thresholds)
        at.append(thresholds)
        shown.append(below)
        rate = 2 * bound / step**0.75
        thresholds = np.clip(thresholds - rate * (below - shares), 0, bound)
    points, heights = np.concatenate([*at, [bound]]), np.concatenate([*shown, [1.0]])
    # Both ends are known exactly.
    weights = np.where((points == 0) | (points == bound), 1e6, 1.0)
    curve = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(points, heights, weights)
    ascending = np.sort(points)
    levels, place = np.unique(curve.predict(ascending), return_inverse=True)
    # The middle of each flat piece.
    middles = np.bincount(place, ascending) / np.bincount(place)
    return np.interp(shares, levels, middles)
