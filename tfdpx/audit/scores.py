"""How well scores tell members from others: AUC, advantage, and true positives at few false ones.

A score is high where an attack takes an example, or a run, for a member.
"""

import math

import numpy as np
import scipy.stats

from tfdpx._arguments import is_number, require
from tfdpx.accounting.accountants import check_delta


def auc(members, others):
    """The probability that a member's score is above another's, ties counted half.

    Args:
        members: Array of floats [M].
        others: Array of floats [N].

    Returns:
        Float in [0, 1]; 0.5 for a guess.

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, others = checked(members, others)
    return float(scipy.stats.mannwhitneyu(members, others).statistic / (len(members) * len(others)))


def advantage(members, others, threshold=None):
    """The rate of true positives minus the rate of false ones, `1 - beta - alpha`.

    Args:
        members: Array of floats [M].
        others: Array of floats [N].
        threshold: Optional float; members are taken to score above it. None takes the largest
            advantage of any threshold, which is too high on few scores: it was chosen on them.

    Returns:
        Float in [-1, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, others = checked(members, others)
    thresholds = np.union1d(members, others) if threshold is None else np.array([threshold])
    return float(np.max(_rates_above(members, thresholds) - _rates_above(others, thresholds)))


def advantage_upper_bound(epsilon, delta):
    """The most that `advantage` can be, in expectation, for an (epsilon, delta)-private mechanism.

    It is `(exp(epsilon) - 1 + 2 delta) / (exp(epsilon) + 1)` (Humphries et al. 2020,
    arXiv:2010.12112), the last column of Table 8 of De et al. 2022.

    Args:
        epsilon: Float >= 0.
        delta: Float in (0, 1).

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an argument is out of its range.

    Example:
    >>> [round(advantage_upper_bound(epsilon, delta=0.01), 2) for epsilon in (1, 2, 4, 8)]
    [0.47, 0.76, 0.96, 1.0]
    """
    check_delta(delta)
    fits = is_number(epsilon) and epsilon >= 0
    require(fits, "epsilon", epsilon, "be a number >= 0")
    # Divided by exp(epsilon), which overflows.
    small = math.exp(-epsilon)
    return min(1.0, (1 - small + 2 * delta * small) / (1 + small))


def tpr_at_fpr(members, others, fpr):
    """The rate of true positives of the best threshold with at most this rate of false ones.

    An attack that is sure of a few members harms them, whatever its AUC (Carlini et al. 2022,
    arXiv:2112.03570, section III).

    Args:
        members: Array of floats [M].
        others: Array of floats [N]; `fpr * N` of them at least should be a few.
        fpr: Float in [0, 1).

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN, or `fpr` is out of its range.
    """
    members, others = checked(members, others)
    require(is_number(fpr) and 0 <= fpr < 1, "fpr", fpr, "lie in [0, 1)")
    # Scores above the threshold are taken for members: at most `allowed` of the others.
    allowed = math.floor(fpr * len(others) * (1 + 1e-12))
    threshold = np.sort(others)[len(others) - 1 - allowed]
    return float(_rates_above(members, threshold))


def best_threshold(members, others):
    """The threshold of the largest advantage, a float; scores above it are taken for members.

    Choose it on some runs and count errors on others.

    Args:
        members: Array of floats [M].
        others: Array of floats [N].

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, others = checked(members, others)
    thresholds = np.union1d(members, others)
    gains = _rates_above(members, thresholds) - _rates_above(others, thresholds)
    best = int(np.argmax(gains))
    # Between two scores: new ones fall on both sides.
    return float(np.mean(thresholds[best : best + 2]))


def errors(members, others, threshold):
    """What the lower bounds take: false positives, negatives, false negatives, positives.

    Args:
        members: Array of floats [M].
        others: Array of floats [N].
        threshold: Float; scores above it are taken for members.

    Returns:
        Tuple of four ints.

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, others = checked(members, others)
    missed = int(np.sum(members <= threshold))
    return int(np.sum(others > threshold)), len(others), missed, len(members)


def checked(members, others):
    """Both as float64 arrays; raises ValueError for an empty one, or one with a NaN."""
    arrays = []
    for name, values in (("members", members), ("others", others)):
        array = np.asarray(values, "float64").ravel()
        if not array.size or np.isnan(array).any():
            raise ValueError(
                f"Argument `{name}` must hold at least one score, and no NaN. Received: "
                f"{array.size} scores, {int(np.isnan(array).sum())} of them NaN."
            )
        arrays.append(array)
    return arrays


def _rates_above(scores, thresholds):
    return 1 - np.searchsorted(np.sort(scores), thresholds, side="right") / len(scores)
