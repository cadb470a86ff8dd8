"""Membership inference: measures how well the losses of a model reveal its training examples.

An attack gives each example, or each run, a score that is high for members of the training set. The
module computes the AUC of the scores, the advantage, and the rate of true positives at a low rate
of false positives. For a single model, these numbers measure the average leakage of its examples.
They are not a bound on epsilon. A bound needs many models that were trained with and without one
example.
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
    """Measures of how well an attack's scores separate members from others.

    Attributes:
        members: Int, the number of members of the training set.
        others: Int, the number of other examples.
        auc: Float, the area under the ROC curve; 0.5 for random scores.
        advantage: Float, the rate of true positives minus the rate of false positives, at the
            threshold that is best for these scores.
        tpr_at_fpr: Dict from a rate of false positives to the largest rate of true positives. Rates
            below `1 / others` are left out.
        advantage_lower_bound: Float. With 95% confidence over the choice of members and others, the
            best threshold has at least this advantage on new scores. For random scores, this bound
            is usually 0, while `advantage` is above 0 by chance.
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
        members: Float array [M], the scores of members of the training set.
        others: Float array [N], the scores of other examples.

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
    # Massart 1990: with 95% confidence, both empirical distribution functions together differ from
    # the true ones by at most this much.
    chance = sum(math.sqrt(math.log(2 / _ERROR) / (2 * size)) for size in sizes)
    return MembershipReport(*sizes, auc(*scores), largest, true, max(0.0, largest - chance))


def example_losses(model: keras.Model, x: Any, y: Any, batch_size: int = 256) -> np.ndarray:
    """Returns the loss of each example in inference mode.

    Negated losses are the scores of a simple attack, which guesses that examples with a low loss
    are members (Yeom et al. 2018).

    Args:
        model: A compiled `keras.Model`.
        x: Array [N, ...], or a nested structure of arrays, the inputs.
        y: Array [N, ...], or a nested structure of arrays, the targets.
        batch_size: Int, the number of examples per forward pass.

    Returns:
        float64 [N].
    """
    losses = []
    for inputs, targets in tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size):
        outputs = model(inputs, training=False)
        losses.append(row_losses(model, inputs, targets, outputs, None).losses)
    return np.concatenate(losses).astype("float64")


def auc(members, non_members):
    """Returns the probability that a member has a higher score than a non-member; ties count half.

    Args:
        members: Float array [M], scores.
        non_members: Float array [N], scores.

    Returns:
        Float in [0, 1]; 0.5 for random scores.

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, non_members = checked(members, non_members)
    return float(
        scipy.stats.mannwhitneyu(members, non_members).statistic / (len(members) * len(non_members))
    )


def advantage(members, non_members):
    """Returns the rate of true positives minus the rate of false positives, at the best threshold.

    With few scores the result is too high, because the threshold is chosen to fit these scores.

    Args:
        members: Float array [M], scores.
        non_members: Float array [N], scores.

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN.
    """
    members, non_members = checked(members, non_members)
    thresholds = np.union1d(members, non_members)
    return float(np.max(_rates_above(members, thresholds) - _rates_above(non_members, thresholds)))


def tpr_at_fpr(members, non_members, fpr):
    """Returns the largest rate of true positives if the rate of false positives is at most `fpr`.

    An attack that recognises a few members with certainty harms them even if its AUC is low
    (Carlini et al. 2022, arXiv:2112.03570, section III).

    Args:
        members: Float array [M], scores.
        non_members: Float array [N], scores. N should be at least a few times `1 / fpr`.
        fpr: Float in [0, 1), the rate of false positives.

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If an array is empty, or holds a NaN, or `fpr` is out of range.
    """
    members, non_members = checked(members, non_members)
    require(is_number(fpr) and 0 <= fpr < 1, "fpr", fpr, "lie in [0, 1)")
    # Examples with scores above the threshold count as members, at most `allowed` non-members.
    allowed = math.floor(fpr * len(non_members) * (1 + 1e-12))
    threshold = np.sort(non_members)[len(non_members) - 1 - allowed]
    return float(_rates_above(members, threshold))


def checked(members, non_members):
    """Returns both arguments as float64 arrays; raises ValueError if one is empty or has a NaN."""
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
