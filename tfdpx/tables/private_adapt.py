"""Keras's `adapt` for private tables: noisy statistics of columns, counted in the ledger.

Each statistic is one release: Gaussian noise is added to an exact array. The `sensitivity` of a
release bounds the L2 norm by which one row can change the exact array.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from tfdpx._arguments import is_number, require
from tfdpx._keras import layer_internals
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import Ledger
from tfdpx.checks.adapted import spent_on
from tfdpx.heads.releases import Releases

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
STATISTICS = "statistics"  # The name of the releases in `Releases`.
# The widest range of a column. Keras squares ranges in float32, which would overflow.
_WIDEST = 1e18
# Keras needs at least one entry in a vocabulary. If no category is frequent, it is this public
# entry.
_NO_TEXT, _NO_INT = "(no frequent category)", -(2**31)


def private_adapt(
    layer: keras.Layer,
    x: Any,
    *,
    noise_multiplier: float,
    lower: Any = None,
    upper: Any = None,
    seed: int | None = None,
) -> Ledger:
    """Computes the statistics of `layer.adapt(x)` with Gaussian mechanisms.

    - `Normalization`: mean and variance of each column, clipped to `[lower, upper]`.
    - `Discretization`: boundaries of bins with about equally many rows, in `[lower, upper]`.
    - `StringLookup`, `IntegerLookup`: the categories with a noisy count that exceeds 1 by at least
      eight standard deviations of the noise, the most frequent first. All other categories are out
      of the vocabulary. The empty text, texts of several lines and Keras's own tokens are always
      out of the vocabulary, because Keras's files cannot hold them.
    - `keras.utils.FeatureSpace`: the statistics of each of its layers that `adapt` would change.

    Guarantee: pass the returned ledger as `PrivacyPlan(spent=...)`. The layers and the model that
    this plan trains are then together (epsilon, delta)-differentially private under adding or
    removing one row. Each release is a Gaussian mechanism with `noise_multiplier`. A category that
    only one row has is published with a probability below 1e-15; the share of delta that
    accountants reserve covers this. The number of rows, the columns, their types, `lower` and
    `upper` are public, so do not compute them from the data.

    Args:
        layer: One of the layers above, not adapted yet. Afterwards it is an ordinary layer that a
            private model may contain.
        x: The private values: an array `[rows]` or `[rows, columns]`; only `[rows]` for lookups and
            `Discretization`; a dict of arrays `[rows]` for a `FeatureSpace`. A missing number (NaN)
            counts as the middle of the bounds; `Discretization` leaves it out.
        noise_multiplier: Float > 0. Standard deviation of the noise divided by the sensitivity, for
            each release. There is one release per layer, and one more if bounds must be found.
        lower: The least possible value: a float, or a list with one for each column. For a
            `FeatureSpace`, a dict from features to values. With None, a power of two is found
            privately; magnitudes from 1e-6 to 1e12 can be found.
        upper: The largest possible value, in the same forms as `lower`.
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.

    Returns:
        The `tfdpx.accounting.Ledger` of the releases, for `PrivacyPlan(spent=...)`. For several
        layers, add their ledgers. The ledger of a model that contains the layer includes this
        ledger.

    Raises:
        TypeError: If `layer` is not one of these layers, or if `x` does not hold numbers (or texts,
            for lookups).
        ValueError: If another argument is invalid.

    Warns:
        UserWarning: If no category of a lookup is frequent enough, so all are out of the
            vocabulary.

    Example:
    >>> import keras, numpy as np, tfdpx
    >>> x = np.random.default_rng(0).uniform(20, 60, size=(10_000, 1))
    >>> ages = keras.layers.Normalization()
    >>> spent = tfdpx.private_adapt(ages, x, noise_multiplier=20.0, lower=0.0, upper=100.0)
    >>> plan = tfdpx.PrivacyPlan(10_000, 256, epochs=5, epsilon=2.0, delta=1e-5, spent=spent)
    >>> round(float(ages.mean[0, 0]))
    40
    """
    is_valid = is_number(noise_multiplier) and 0 < noise_multiplier < np.inf
    require(is_valid, "noise_multiplier", noise_multiplier, "be positive and finite", " Use 20.")
    if isinstance(layer, keras.utils.FeatureSpace):
        ledger, parts = Ledger(), layer_internals.adaptable_features(layer)
        least, most = ({} if limit is None else limit for limit in (lower, upper))
        if not all(isinstance(values, dict) for values in (x, least, most)) or not (
            least.keys() | most.keys() <= parts.keys() <= x.keys()
        ):
            raise ValueError(
                "Arguments `x`, `lower` and `upper` must be dicts of the features with statistics, "
                f"and `x` must have all of them: {', '.join(parts)}. Received: x of type "
                f"{type(x).__name__}, lower={lower!r}, upper={upper!r}."
            )
        for name, part in parts.items():
            arguments = dict(lower=least.get(name), upper=most.get(name), seed=seed)
            ledger += private_adapt(part, x[name], noise_multiplier=noise_multiplier, **arguments)
        layer_internals.finish_features(layer)
        return ledger
    kinds = (keras.layers.Normalization, keras.layers.Discretization, *_LOOKUPS)
    if not isinstance(layer, kinds) or layer_internals.has_statistics(layer):
        raise TypeError(
            "Argument `layer` must be a Normalization, Discretization(num_bins), StringLookup, "
            "IntegerLookup or FeatureSpace without values. Received: "
            f"{layer.name!r} of class {type(layer).__name__}. Give any other layer public values."
        )
    releases = Releases({STATISTICS: (float(noise_multiplier), 2)}, seed)
    released = releasing(releases, noise_multiplier)
    if isinstance(layer, _LOOKUPS):
        adapt_lookup(layer, x, released)
    else:
        _adapt_numbers(layer, _numbers(layer, x), lower, upper, released)
    ledger = releases.ledger()
    spent_on(layer, ledger)
    return ledger


def releasing(releases, noise_multiplier):
    """Returns a function that adds noise to an array and counts the release in `releases`.

    The returned function takes an exact array and the array's sensitivity. It returns the noisy
    array and the standard deviation of the noise. Other functions of this module take it as the
    argument `released`.

    Args:
        releases: `Releases` in which `STATISTICS` are planned.
        noise_multiplier: Float, the noise multiplier of each release.
    """

    def released(exact, sensitivity):
        noisy = releases.gaussian(STATISTICS, exact, sensitivity)
        return noisy, noise_multiplier * sensitivity

    return released


def _adapt_numbers(layer, x, lower, upper, released):
    least, most = limits(lower, upper, x.shape[1], "be one for all or one per column")
    if np.isnan([least, most]).any():
        least, most = bounds(x, released, least, most)
    if isinstance(layer, keras.layers.Discretization):
        ends = float(least[0]), float(most[0])
        boundaries = quantiles(x[:, 0], *ends, layer.num_bins, released)
        layer.bin_boundaries = boundaries.tolist()
    else:
        set_moments(layer, *moments(x, least, most, released))


def limits(lower, upper, columns, must, hint=""):
    """Returns public limits of columns, two float64 arrays [columns], with NaN in place of None.

    Args:
        lower: Number, list of numbers, or None.
        upper: Like `lower`.
        columns: Int.
        must: String, the condition on both arguments, for the error.
        hint: String, the end of the error.
    """
    try:
        pair = [np.full(columns, np.nan if v is None else v, "float64") for v in (lower, upper)]
        is_valid = not np.any(pair[0] >= pair[1]) and not np.any(np.abs(pair) >= _WIDEST)
    except (TypeError, ValueError):
        is_valid = False
    must += f", lower < upper, below {_WIDEST:g} in magnitude"
    require(is_valid, "lower, upper", (lower, upper), must, hint)
    return pair


def set_moments(layer, mean, variance):
    """Sets the statistics of a `Normalization`: mean and variance, arrays [columns]."""
    layer.build((None, len(mean)))
    layer.adapt_mean.assign(mean.reshape(layer.adapt_mean.shape))
    layer.adapt_variance.assign(variance.reshape(layer.adapt_variance.shape))
    layer.finalize_state()


def _numbers(layer, x):
    """Returns x as float64 [rows, columns], one column for each statistic of the layer."""
    x = np.asarray(x)
    if x.dtype.kind not in "biuf" or x.ndim not in (1, 2) or not x.size:
        raise TypeError(
            f"Argument `x` must be numbers of shape [rows] or [rows, columns] for {layer.name!r}. "
            f"Received: dtype {x.dtype}, shape {x.shape}. Turn dates and texts into numbers, or "
            "into categories for a StringLookup."
        )
    x = x.astype("float64").reshape(len(x), -1)
    over_columns = isinstance(layer, keras.layers.Normalization) and layer.axis in ((-1,), (1,))
    if x.shape[1] > 1 and not over_columns:
        raise ValueError(
            f"Layer {layer.name!r} takes one statistic over several values of a row. Received: x "
            f"of shape {x.shape}. Use one layer per column, or Normalization(axis=-1)."
        )
    return x


def adapt_lookup(layer, x, released):
    """Sets the vocabulary of a lookup: the frequent categories of a column, most frequent first.

    One row changes one count by 1. A value is published if its noisy count exceeds 1 by more than
    eight standard deviations of the noise. If only one row has a value, the probability that it is
    published is below 1e-15.

    Args:
        layer: `StringLookup` or `IntegerLookup` without a vocabulary.
        x: Array [rows].
        released: Function that `releasing` returns.
    """
    texts = isinstance(layer, keras.layers.StringLookup)
    x = np.asarray(x)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.dtype.kind not in ("OUST" if texts else "iu") or x.ndim != 1 or not len(x):
        raise TypeError(
            f"Argument `x` must be {'texts' if texts else 'ints'} of shape [rows] for "
            f"{layer.name!r}. Received: dtype {x.dtype}, shape {x.shape}. Use a layer per column."
        )
    x = np.array([text_of(v) for v in x.tolist()]) if texts else x.astype("int64")
    values, counts = np.unique(x, return_counts=True)
    noisy, deviation = released(counts.astype("float64"), 1.0)
    order = np.argsort(-noisy, kind="stable")
    frequent = [values[i].item() for i in order if noisy[i] > 1 + _RARE * deviation]
    tokens = layer.oov_token, layer.mask_token
    # Keras's file of the vocabulary has one value in each line.
    vocabulary = [v for v in frequent if v not in tokens and str(v).splitlines() == [str(v)]]
    if layer.max_tokens is not None:
        special = len(layer.get_vocabulary()) - len(layer.get_vocabulary(False))
        vocabulary = vocabulary[: layer.max_tokens - special]
    if not vocabulary:  # An error would reveal this result without a ledger that counts it.
        warn(
            f"No category of {layer.name!r} has enough rows for so much noise, so all its values "
            "are out of the vocabulary. Use a lower noise_multiplier, or a public vocabulary."
        )
    layer.set_vocabulary(vocabulary or [_NO_TEXT if texts else _NO_INT])


def text_of(value):
    """Converts a value, for example bytes, to the text for a lookup; a missing value to ""."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    # pandas's `NA` must be found by its name, because comparisons with it have no truth value.
    if value is None or type(value).__name__ == "NAType" or value != value:
        return ""
    return str(value)


# The exponents of the smallest and the largest power of two for the bounds of a column.
_LEAST, _MOST = -20, 40
_HISTOGRAM = 1024
# Rough bounds are narrowed until they hold this share of the rows. The edges of the cells are the
# range divided by powers of 3, up to 3**5.
_NARROWED_TO, _CELL_RATIO, _CELLS = 0.8, 3.0, 5
# A category is frequent if its noisy count exceeds 1 by this many standard deviations. If only one
# row has the category, this happens with probability 6.2e-16, far below the share of delta that
# accountants reserve.
_RARE = 8.0


def bounds(x, released, lower=np.nan, upper=np.nan):
    """Returns a lower and an upper bound of each column, powers of two, float64 [columns] each.

    Each column has a histogram with a cell for each sign and each power of two. A row is in one
    cell of each of the d histograms, so it changes all counts together by at most sqrt(d) in L2
    norm.

    Args:
        x: float64 [rows, columns]; NaN is left out.
        released: Function that `releasing` returns.
        lower: float64 [columns], public bounds to return as they are; NaN for a bound to find.
        upper: Like `lower`.
    """
    powers = 2.0 ** np.arange(_LEAST, _MOST + 2)
    edges = np.concatenate([-powers[::-1], powers])
    noisy, deviation = released(_counts(x, edges[1:-1]), math.sqrt(x.shape[1]))
    # With a probability of at most 1/50, the noise of any cell exceeds this limit.
    limit = deviation * math.sqrt(2 * math.log(10 * noisy[:-1].size)) + 0.5
    starts, ends = edges[:-1].copy(), edges[1:].copy()
    starts[len(powers) - 1] = ends[len(powers) - 1] = 0.0  # The cell of tiny values is 0.
    starts, ends, present = starts[:, np.newaxis], ends[:, np.newaxis], noisy[:-1] > limit
    least = np.min(np.where(present, starts, np.inf), axis=0)
    most = np.max(np.where(present, ends, -np.inf), axis=0)
    least, most = (np.where(np.any(present, axis=0), v, w) for v, w in ((least, -1), (most, 1)))
    below = np.where(least >= upper, upper - 1 - np.abs(upper), least)
    lower = np.where(np.isnan(lower), below, lower)
    above = np.where(most <= lower, lower + 1 + np.abs(lower), most)
    return lower, np.where(np.isnan(upper), above, upper)


def _counts(x, edges):
    """Counts the values of each column in cells, then the NaNs: float64 [cells + 1, columns].

    Args:
        x: float64 [rows, columns].
        edges: float64 [cells - 1] or [cells - 1, columns], the sorted edges between cells.
    """
    sums, edges = [], np.broadcast_to(edges.T, (x.shape[1], len(edges)))
    for inner, values in zip(edges, x.T, strict=True):
        cell = np.searchsorted(inner, values, side="right")
        cell[np.isnan(values)] = len(inner) + 1
        sums.append(np.bincount(cell, minlength=len(inner) + 2))
    return np.array(sums, "float64").T


def narrow(x, lower, upper, released):
    """Returns the narrowest bounds that hold 80% of each column's values, two float64 [columns].

    The range of a column is divided into cells, and the values in each cell are counted, with
    noise. The cells are smallest near zero: the distance of an edge from zero is a third of the
    distance of the next edge. (Or from the bound next to zero, if zero is not in the range.) A row
    is in one cell of each of the d columns, so it changes the counts by at most sqrt(d) in L2 norm.
    If no narrower bounds hold 80% of the values, the bounds do not change.

    Args:
        x: float64 [rows, columns]; NaN is counted separately.
        lower: float64 [columns], public. Smaller values count as `lower`.
        upper: float64 [columns], public, above `lower`.
        released: As for `bounds`.
    """
    rows, columns = x.shape
    zero = np.clip(0.0, lower, upper)
    powers = _CELL_RATIO ** -np.arange(1.0, _CELLS + 1)[:, np.newaxis]
    inner = zero + np.maximum(upper - zero, zero - lower) * np.vstack([-powers, powers[::-1]])
    clipped = np.clip(x, lower, np.nextafter(upper, lower))
    noisy, _ = released(_counts(clipped, inner), math.sqrt(columns))
    edges = np.vstack([lower, np.clip(inner, lower, upper), upper])
    inside = np.where(np.diff(edges, axis=0) > 0, noisy[:-1], 0.0)  # Empty cells hold no row.
    below = np.vstack([np.zeros(columns), np.cumsum(inside, axis=0)])
    first, last = np.triu_indices(len(edges), 1)
    widths, held = edges[last] - edges[first], below[last] - below[first]
    is_enough = (held >= _NARROWED_TO * (rows - noisy[-1])) & (widths > 0)
    is_enough |= ((first == 0) & (last == len(edges) - 1))[:, np.newaxis]
    best = np.argmin(np.where(is_enough, widths, np.inf), axis=0)
    return edges[first[best], np.arange(columns)], edges[last[best], np.arange(columns)]


def moments(x, lower, upper, released):
    """Returns mean and variance of each column, clipped to its bounds, float64 [columns] each.

    The middle of the range is subtracted from a value, and the result is divided by half the range.
    This gives u in [-1, 1]. The function sums the vectors (u, u^2 - 1/2), which have a squared norm
    of at most 1.25. So a row changes the sums of all d columns together by at most sqrt(1.25 d) in
    L2 norm.

    Args:
        x: float64 [rows, columns]; NaN counts as the middle.
        lower: float64 [columns].
        upper: float64 [columns], above `lower`.
        released: As for `bounds`.
    """
    rows, columns = x.shape
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    u = np.nan_to_num(np.clip((x - middle) / half, -1, 1))
    sums = np.sum([u, u**2 - 0.5], axis=1)
    (first, second), deviation = released(sums, math.sqrt(1.25 * columns))
    mean = np.clip(first / rows, -1, 1)
    # A variance below the level of its noise is meaningless. Dividing by it would inflate the
    # column.
    variance = np.clip(second / rows + 0.5 - mean**2, min(deviation / rows, 1.0), 1.0)
    return middle + half * mean, np.maximum(half**2 * variance, np.finfo("float32").tiny)


def quantiles(x, lower, upper, num_bins, released):
    """Returns the inner boundaries of `num_bins` bins with about equally many rows, sorted float64.

    The boundaries come from a noisy histogram with 1,024 equal bins over the range. One row changes
    one count of the histogram by 1.

    Args:
        x: float64 [rows]; NaN is ignored.
        lower: Float.
        upper: Float, above `lower`.
        num_bins: Int.
        released: As for `bounds`.
    """
    edges = np.linspace(lower, upper, _HISTOGRAM + 1)
    counts, _ = np.histogram(np.clip(x[~np.isnan(x)], lower, upper), edges)
    noisy, deviation = released(counts.astype("float64"), 1.0)
    total = np.cumsum(np.where(noisy > 2 * deviation, noisy, 0.0))
    wanted = total[-1] * np.arange(1, num_bins) / num_bins
    if not total[-1]:
        return np.linspace(lower, upper, num_bins + 1)[1:-1]
    return np.unique(np.interp(wanted, [0.0, *total], edges))
