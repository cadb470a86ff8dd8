"""How well scores tell members from others: AUC, advantage, and true positives at few false ones.

A score is high where an attack takes an example, or a run, for a member.
"""

import math

import numpy as np
import scipy.stats

from tfdpx._arguments import is_number, require


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


def advantage(members, others):
    """The rate of true positives minus the rate of false ones, of the best threshold.

    On few scores it is too high: the threshold was chosen on them.

    Args:
        members: Array of floats [M].
        others: Array of floats [N].

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, others = checked(members, others)
    thresholds = np.union1d(members, others)
    return float(np.max(_rates_above(members, thresholds) - _rates_above(others, thresholds)))


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


def checked(members, others):
    """Both as float64 arrays; raises ValueError for an empty one, or one with a NaN."""
    arrays = []
    for name, values in (("members", members), ("others", others)):
        array = np.asarray(values, "float64").ravel()
        missing = np.isnan(array).sum()
        sizes = f"{array.size} scores, {missing} of them NaN"
        require(array.size and not missing, name, sizes, "hold at least one score, and no NaN")
        arrays.append(array)
    return arrays


def _rates_above(scores, thresholds):
    return 1 - np.searchsorted(np.sort(scores), thresholds, side="right") / len(scores)
