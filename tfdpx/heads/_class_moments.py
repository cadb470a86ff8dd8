"""Second moments and sums of each class, released and solved a few classes at a time."""

import functools
import math

import numpy as np

from tfdpx.heads import _solves
from tfdpx.heads._moments import ROWS, ClippedRows, SecondMoment

# Rows that are kept until the products of each class are worth their calls.
_WAITING = 16_384

NAMES = ("class moments", "class sums")


def sizes(num_classes, dimension):
    """Dict from the names of the two releases to how many numbers get noise in each."""
    return dict(zip(NAMES, (num_classes * dimension**2, num_classes * dimension), strict=True))


def least_squares(
    examples,
    released,
    shared,
    *,
    num_classes,
    l2_norm_clip,
    max_positives,
    memory,
    ridge_of,
):
    """float64 `[d, m]`: solutions of `(A_j + shared + ridge I) theta_j = b_j`, lines 4 to 6.

    Guarantee: all A_j together have the sensitivity `sqrt(max_positives) l2_norm_clip^2`, all b_j
    `sqrt(max_positives) l2_norm_clip`, under adding or removing one example.

    Args:
        examples: `FeatureSource`.
        released: `Releases` that has both of `NAMES` planned.
        shared: The released matrix `[d, d]` that all classes have, weighted.
        num_classes: Int, m.
        l2_norm_clip: Float.
        max_positives: Int: classes of an example that count, the first ones.
        memory: Int, bytes for the matrices of a group of classes.
        ridge_of: Function from a released matrix to its ridge.
    """
    root = math.sqrt(max_positives)
    group = max(1, memory // (8 * examples.dimension**2))
    kernel = np.zeros([examples.dimension, num_classes])
    # Without noise a clip may be infinite, and no sensitivity matters.
    for start in range(0, num_classes, group):
        classes = range(start, min(start + group, num_classes))
        found = functools.cache(lambda of=classes: _sums(examples, of, l2_norm_clip, max_positives))
        for i, j in enumerate(classes):
            # Called at once, and only where the value was not released before.
            moment, total = (lambda i=i: found()[i][0].value(), lambda i=i: found()[i][1])  # noqa: B023
            a = released.symmetric(NAMES[0], moment, root * l2_norm_clip**2, part=j)
            b = released.gaussian(NAMES[1], total, root * l2_norm_clip, part=j)
            a += shared
            kernel[:, j] = _solves.Positive(a, ridge_of(a)).solve(b)
    return kernel


def first_positives(targets, most):
    """`targets` `[n, m]` of zeros and ones, with the first `most` ones of each row alone."""
    return targets * (np.cumsum(targets, axis=1) <= most)


def _sums(examples, classes, l2_norm_clip, max_positives):
    """Pairs of a `SecondMoment` and a float64 sum `[d]` for each of a range of classes."""
    found = [(SecondMoment(examples.dimension), np.zeros(examples.dimension)) for _ in classes]
    clipped = ClippedRows(l2_norm_clip)
    kept, waiting = [], 0
    for x, targets in examples.chunks(ROWS):
        targets = first_positives(targets, max_positives)[:, classes.start : classes.stop]
        rows = np.flatnonzero(targets.any(axis=1))
        kept.append((x[rows], targets[rows]))
        waiting += len(rows)
        if waiting >= _WAITING:
            _add(kept, found, clipped)
            kept, waiting = [], 0
    _add(kept, found, clipped)
    return found


def _add(kept, found, clipped):
    if not kept:
        return
    x, targets = (np.concatenate(pieces) for pieces in zip(*kept, strict=True))
    for (moment, total), positive in zip(found, targets.T, strict=True):
        rows = clipped(x[positive > 0])
        moment.add(rows)
        total += rows.sum(axis=0)
