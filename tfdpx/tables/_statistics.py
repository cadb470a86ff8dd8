"""What a table says about its columns, through Gaussian mechanisms.

Each function reads the data once, in a release whose `sensitivity` bounds what one row changes.
"""

import math

import numpy as np

# Powers of two between which the magnitudes of a column are looked for.
_LEAST, _MOST = -20, 40
_HISTOGRAM = 1024
# In deviations of the noise above one row: what a category that one row alone has exceeds with
# probability 6.2e-16, far below the share of delta that accountants keep back.
_RARE = 8.0


def bounds(x, released, lower=None, upper=None):
    """A lower and an upper bound of each column, as powers of two, float64 [columns] each.

    The histogram of signs and powers of two of a row's d values changes by sqrt(d) with the row.

    Args:
        x: float64 [rows, columns]; NaN is left out.
        released: Function of a function to the exact array, and of its sensitivity.
        lower: Optional float64 [columns], public: it stays.
        upper: As `lower`.
    """
    columns = x.shape[1]
    sensitivity = math.sqrt(columns)
    powers = np.arange(_LEAST, _MOST + 1)

    def counts():
        with np.errstate(divide="ignore", invalid="ignore"):
            power = np.clip(np.floor(np.log2(np.abs(x))), _LEAST, _MOST)
        small = np.abs(x) < 2.0**_LEAST
        found = [np.sum(small, axis=0)]
        for sign in (1, -1):
            own = (np.sign(x) == sign) & ~small
            found += [np.sum(own & (power == each), axis=0) for each in powers]
        return np.array(found, "float64")

    noisy, deviation = released(counts, sensitivity)
    # Noise alone exceeds it somewhere in one of fifty cases or fewer.
    present = noisy > deviation * math.sqrt(2 * math.log(10 * noisy.size)) + 0.5
    edges = np.array([0.0, *2.0 ** (powers + 1), *-(2.0**powers)])[:, np.newaxis]
    starts = np.array([0.0, *2.0**powers, *-(2.0 ** (powers + 1))])[:, np.newaxis]
    most = np.max(np.where(present, edges, -np.inf), axis=0)
    least = np.min(np.where(present, starts, np.inf), axis=0)
    least, most = (np.where(np.any(present, axis=0), v, w) for v, w in ((least, -1), (most, 1)))
    if upper is not None:
        return np.where(least < upper, least, upper - 1 - np.abs(upper)), upper
    lower = least if lower is None else lower
    return lower, np.where(most > lower, most, lower + 1 + np.abs(lower))


def moments(x, lower, upper, released):
    """Mean and variance of each column, clipped to its bounds, float64 [columns] each.

    In units of half the range around its middle a value u is in [-1, 1], and (u, u^2 - 1/2) has at
    most the squared norm 1.25; d columns together change by at most sqrt(1.25 d) with a row.

    Args:
        x: float64 [rows, columns]; NaN counts as the middle.
        lower: float64 [columns].
        upper: float64 [columns], above `lower`.
        released: As for `bounds`.
    """
    rows, columns = x.shape
    middle, half = (lower + upper) / 2, (upper - lower) / 2

    def sums():
        u = np.nan_to_num(np.clip((x - middle) / half, -1, 1))
        return np.sum([u, u**2 - 0.5], axis=1)

    (first, second), deviation = released(sums, math.sqrt(1.25 * columns))
    mean = np.clip(first / rows, -1, 1)
    # Below its own noise a variance says nothing, and would blow the column up.
    variance = np.clip(second / rows + 0.5 - mean**2, min(deviation / rows, 1.0), 1.0)
    return middle + half * mean, np.maximum(half**2 * variance, np.finfo("float32").tiny)


def quantiles(x, lower, upper, num_bins, released):
    """The inner boundaries of `num_bins` bins of about as many rows each, sorted float64.

    A histogram of the range changes by one with a row. Its bins are one 1,024th wide.

    Args:
        x: float64 [rows]; NaN is left out.
        lower: Float.
        upper: Float, above `lower`.
        num_bins: Int.
        released: As for `bounds`.
    """
    edges = np.linspace(lower, upper, _HISTOGRAM + 1)

    def counts():
        inside = np.clip(x[~np.isnan(x)], lower, upper)
        return np.histogram(inside, edges)[0].astype("float64")

    noisy, deviation = released(counts, 1.0)
    total = np.cumsum(np.where(noisy > 2 * deviation, noisy, 0.0))
    wanted = total[-1] * np.arange(1, num_bins) / num_bins
    if not total[-1]:
        return np.linspace(lower, upper, num_bins + 1)[1:-1]
    return np.unique(np.interp(wanted, [0.0, *total], edges))


def categories(x, most, released, fits=lambda value: True):
    """The frequent values of a column, the most frequent first, by noisy counts; a list.

    Counts change by one with a row. A value is named where its noisy count is eight deviations of
    the noise above one: one that a single row has is so with probability below 1e-15.

    Args:
        x: Array [rows] of strings or ints.
        most: Int, or None for all.
        released: As for `bounds`.
        fits: Function of a value: whether it may be named. It reads no other value.
    """
    values, counts = np.unique(x, return_counts=True)
    noisy, deviation = released(lambda: counts.astype("float64"), 1.0)
    order = np.argsort(-noisy, kind="stable")
    named = [values[i].item() for i in order if noisy[i] > 1 + _RARE * deviation]
    return [value for value in named if fits(value)][:most]
