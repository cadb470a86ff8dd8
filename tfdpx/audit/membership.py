"""Membership inference: finds members of the training set from the losses of a trained model.

An attack gives each example, or each run, a score that is high for members. AUC, advantage and true
positives at few false ones measure the scores. A bound on epsilon needs independent runs, that is
many models, with and without one example. Scores of many examples of one model only measure its
average leakage.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import scipy.stats
import tensorflow as tf

from tfdpx._arguments import is_number, require
from tfdpx.per_example.loss import row_losses

_RATES = (0.001, 0.01, 0.1)
_ERROR = 0.05


@dataclasses.dataclass(frozen=True)
class MembershipReport:
    """Measures of how well scores separate members from others.

    Attributes:
        members: Int, number of members.
        others: Int, number of examples that were not trained on.
        auc: Float; 0.5 for a guess.
        advantage: Float, of the best threshold on these same scores.
        tpr_at_fpr: Dict from a rate of false positives to the rate of true ones. Rates below
            `1 / others` are left out.
        advantage_lower_bound: Float, with 95% confidence over the draw of members and others: the
            best threshold on new scores has at least this advantage. It is usually 0 for scores
            that know nothing, where `advantage` is above 0 by chance.
    """

    members: int
    others: int
    auc: float
    advantage: float
    tpr_at_fpr: dict
    advantage_lower_bound: float

    def __str__(self):
        rates = ", ".join(f"{tpr:.2%} at {fpr:.1%}" for fpr, tpr in self.tpr_at_fpr.items())
        return (
            f"Membership of {self.members} members and {self.others} others: AUC {self.auc:.3f}, "
            f"advantage {self.advantage:.3f} (at least {self.advantage_lower_bound:.3f} with 95% "
            f"confidence), true positives at false positives: {rates or '-'}."
        )


def membership_report(members: Any, others: Any) -> MembershipReport:
    """Returns the `MembershipReport` of an attack's scores.

    Args:
        members: Array of floats [M], scores of members.
        others: Array of floats [N], scores of others.

    Raises:
        ValueError: If an array is empty, or holds a NaN.

    Example:
    >>> print(membership_report([2.0, 1.0], [0.0, 1.0]))
    Membership of 2 members and 2 others: AUC 0.875, advantage 0.500 (at least 0.000 with 95% \
confidence), true positives at false positives: -.
    """
    scores = checked(members, others)
    rates = [rate for rate in _RATES if rate * len(scores[1]) >= 1]
    true = {rate: tpr_at_fpr(scores[0], scores[1], rate) for rate in rates}
    sizes = len(scores[0]), len(scores[1])
    largest = advantage(*scores)
    # Massart 1990: each distribution is this near to its scores, with half of the error each.
    chance = sum(math.sqrt(math.log(2 / _ERROR) / (2 * size)) for size in sizes)
    return MembershipReport(*sizes, auc(*scores), largest, true, max(0.0, largest - chance))


def example_losses(model: keras.Model, x: Any, y: Any, batch_size: int = 256) -> np.ndarray:
    """Returns the loss of each example, in inference mode, a function of only model and example.

    For the attack that takes examples with a low loss for members (Yeom et al. 2018), the scores
    are `-losses`.

    Args:
        model: A compiled `keras.Model`.
        x: Nest of arrays [N, ...].
        y: Nest of arrays [N, ...], as for the loss.
        batch_size: Int.

    Returns:
        float64 [N].
    """
    losses = []
    for inputs, targets in tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size):
        outputs = model(inputs, training=False)
        losses.append(row_losses(model, inputs, targets, outputs, None).losses)
    return np.concatenate(losses).astype("float64")


def auc(members, non_members):
    """Returns the probability that a member's score is above another's; ties count half.

    Args:
        members: Array of floats [M].
        non_members: Array of floats [N].

    Returns:
        Float in [0, 1]; 0.5 for a guess.

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, non_members = checked(members, non_members)
    return float(
        scipy.stats.mannwhitneyu(members, non_members).statistic / (len(members) * len(non_members))
    )


def advantage(members, non_members):
    """Returns the rate of true positives minus the rate of false positives, at the best threshold.

    On few scores it is too high: the threshold was chosen on them.

    Args:
        members: Array of floats [M].
        non_members: Array of floats [N].

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, non_members = checked(members, non_members)
    thresholds = np.union1d(members, non_members)
    return float(np.max(_rates_above(members, thresholds) - _rates_above(non_members, thresholds)))


def tpr_at_fpr(members, non_members, fpr):
    """Returns the rate of true positives at the best threshold with at most `fpr` false ones.

    An attack that is sure of a few members harms them, whatever its AUC is (Carlini et al. 2022,
    arXiv:2112.03570, section III).

    Args:
        members: Array of floats [M].
        non_members: Array of floats [N]; `fpr * N` should be at least a few of them.
        fpr: Float in [0, 1).

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN, or `fpr` is out of range.
    """
    members, non_members = checked(members, non_members)
    require(is_number(fpr) and 0 <= fpr < 1, "fpr", fpr, "lie in [0, 1)")
    # Scores above the threshold are taken for members: at most `allowed` non-members.
    allowed = math.floor(fpr * len(non_members) * (1 + 1e-12))
    threshold = np.sort(non_members)[len(non_members) - 1 - allowed]
    return float(_rates_above(members, threshold))


def checked(members, non_members):
    """Returns both as float64 arrays; raises ValueError for an empty one, or one with a NaN."""
    arrays = []
    for name, values in (("members", members), ("others", non_members)):
        array = np.asarray(values, "float64").ravel()
        missing = np.isnan(array).sum()
        sizes = f"{array.size} scores, {missing} of them NaN"
        require(array.size and not missing, name, sizes, "hold at least one score, and no NaN")
        arrays.append(array)
    return arrays


def _rates_above(scores, thresholds):
    return 1 - np.searchsorted(np.sort(scores), thresholds, side="right") / len(scores)
