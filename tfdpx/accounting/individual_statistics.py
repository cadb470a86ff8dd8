"""Releases statistics of individual epsilons with noise (Yu et al. 2022, appendix E)."""

import dataclasses
import math
import secrets

import numpy as np

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Entry, Ledger

_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
# The mean has less noise than a quantile, and counts as this number of releases.
_OF_THE_MEAN = 4
_NOTHING = Ledger()


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The result of `release_statistics`. All attributes may be published.

    Attributes:
        mean: Float, the noisy mean.
        quantiles: Dict from shares in (0, 1) to noisy quantiles. For example, half of the values
            are at most `quantiles[0.5]`.
        epsilon: Float, the epsilon of this release only, at `delta`.
        total_epsilon: Float, the epsilon of this release and the earlier ledger, at `delta`.
        delta: Float in (0, 1).
        ledger: `Ledger` of this release only.
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
    """Releases the noisy mean and quantiles of numbers, one per example, by Gaussian mechanisms.

    Guarantee: for adding or removing one example, the release costs as much as 4 + `steps` Gaussian
    mechanisms with `noise_multiplier` on the full data. Without quantiles, it costs as much as 4.
    The number of examples is public. A value may depend only on its example and on public
    information. This condition holds for the epsilons of an `IndividualAccountant`, which depend on
    the example and on noisy weights.

    Mean: noise is added to the sum of `value - bound / 2`, which one example changes by at most
    `bound / 2`. The noise multiplier of this sum is half of `noise_multiplier`, so the sum counts
    as four mechanisms.

    Quantiles: for m shares there are m thresholds. Each step counts the values below each threshold
    with noise, and then moves the thresholds toward the quantiles by a step of gradient descent on
    the loss of Andrew et al. 2021 (arXiv:1905.03871). Half of the number of examples is subtracted
    from each count, so one example changes all m counts together by `sqrt(m) / 2` in l2 norm. At
    the end, one increasing curve is fitted to all noisy counts, and the quantiles are read from it.
    The fit averages the noise and costs no privacy.

    Args:
        values: Float array [num_examples], the numbers. They are clipped to [0, `bound`].
        bound: Float > 0, a public upper limit of the values, for example the plan's epsilon.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0, the noise multiplier of each release.
        quantiles: Tuple of floats in (0, 1), the shares; empty for the mean only.
        steps: Int >= 1, the number of noisy counts for each quantile.
        seed: Optional int for tests. Noise of a known seed can be subtracted.
        before: `Ledger` of the earlier costs on the same data.
        accountant: As for `tfdpx.accounting.epsilon`, used for `total_epsilon`.

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

    # Clipping does not remove NaN.
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
    """Returns noisy quantiles of private values.

    Args:
        share_below: Function that takes thresholds, a float array [m], and returns the noisy share
            of the private values below each threshold, a float array [m].
        shares: Float array [m] of values in (0, 1), for example 0.5 for the median.
        bound: Float, the upper limit of the values.
        steps: Int, the number of calls of `share_below`.

    Returns:
        Float array [m] of values in [0, bound], a quantile for each of `shares`.
    """
    from sklearn import isotonic  # Imported here, because it would double the time of the import.

    thresholds = shares * bound
    at, shown = [np.zeros(1)], [np.zeros(1)]
    for step in range(1, steps + 1):
        below = share_below(thresholds)
        at.append(thresholds)
        shown.append(below)
        rate = 2 * bound / step**0.75
        thresholds = np.clip(thresholds - rate * (below - shares), 0, bound)
    points, heights = np.concatenate([*at, [bound]]), np.concatenate([*shown, [1.0]])
    # The shares at 0 and at `bound` have no noise, so the curve must pass through both ends.
    weights = np.where((points == 0) | (points == bound), 1e6, 1.0)
    curve = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(points, heights, weights)
    ascending = np.sort(points)
    levels, place = np.unique(curve.predict(ascending), return_inverse=True)
    # The fitted curve consists of flat pieces. Each piece is replaced by a point at its middle.
    middles = np.bincount(place, ascending) / np.bincount(place)
    return np.interp(shares, levels, middles)
