"""Membership inference: from a trained model's losses, who was in its training set?

An attack gives each example a score, high for members; `tfdpx.audit.scores` and the lower bounds
say what the scores are worth. A bound on epsilon needs independent runs: many models, with and
without one example. Scores of many examples of one model show what it leaks on average.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import scipy.special
import scipy.stats
import tensorflow as tf

from tfdpx._arguments import require
from tfdpx.audit.scores import advantage, auc, checked, tpr_at_fpr
from tfdpx.per_example.loss import row_losses

_RATES = (0.001, 0.01, 0.1)
# Fewer shadow models give no useful deviation of an example's own: one is taken for all.
_OWN_DEVIATION = 32


@dataclasses.dataclass(frozen=True)
class MembershipReport:
    """How well scores tell members from others.

    Attributes:
        members: Int, number of members.
        others: Int, number of examples that were not trained on.
        auc: Float; 0.5 for a guess.
        advantage: Float, of the best threshold on these very scores.
        tpr_at_fpr: Dict from a rate of false positives to the rate of true ones. Rates below
            `1 / others` are left out.
    """

    members: int
    others: int
    auc: float
    advantage: float
    tpr_at_fpr: dict

    def __str__(self):
        rates = ", ".join(f"{tpr:.2%} at {fpr:.1%}" for fpr, tpr in self.tpr_at_fpr.items())
        return (
            f"Membership of {self.members} members and {self.others} others: AUC {self.auc:.3f}, "
            f"advantage {self.advantage:.3f}, true positives at false positives: {rates or '-'}."
        )


def membership_report(members: Any, others: Any) -> MembershipReport:
    """The `MembershipReport` of an attack's scores.

    Args:
        members: Array of floats [M], scores of members.
        others: Array of floats [N], scores of others.

    Raises:
        ValueError: If an array is empty, or holds a NaN.

    Example:
    >>> print(membership_report([2.0, 1.0], [0.0, 1.0]))
    Membership of 2 members and 2 others: AUC 0.875, advantage 0.500, true positives at false \
positives: -.
    """
    members, others = checked(members, others)
    rates = [rate for rate in _RATES if rate * len(others) >= 1]
    return MembershipReport(
        members=len(members),
        others=len(others),
        auc=auc(members, others),
        advantage=advantage(members, others),
        tpr_at_fpr={rate: tpr_at_fpr(members, others, rate) for rate in rates},
    )


def example_losses(model: keras.Model, x: Any, y: Any, batch_size: int = 256) -> np.ndarray:
    """The loss of each example, in inference mode. A function of the model and of the example.

    The attack that takes examples of low loss for members (Yeom et al. 2018) has `-losses` for
    scores.

    Args:
        model: A compiled `keras.Model`.
        x: Nest of arrays [N, ...].
        y: Nest of arrays [N, ...], as the loss takes them.
        batch_size: Int.

    Returns:
        float64 [N].
    """
    losses = []
    for inputs, targets in tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size):
        outputs = model(inputs, training=False)
        losses.append(row_losses(model, inputs, targets, outputs, None).losses)
    return np.concatenate(losses).astype("float64")


def true_class_logits(outputs, labels, from_logits=True):
    """`log(p / (1 - p))` of the probability p of each example's own class.

    It is near to normal over models that were trained alike, as losses are not (Carlini et al.
    2022, arXiv:2112.03570, section IV.C), and keeps its precision where p is near 1.

    Args:
        outputs: Array of floats [..., N, classes], two classes at least.
        labels: Int array [N].
        from_logits: Bool; False where `outputs` are probabilities.

    Returns:
        float64 [..., N].

    Raises:
        ValueError: If shapes or labels do not fit.
    """
    outputs, labels = np.asarray(outputs, "float64"), np.asarray(labels)
    fits = outputs.ndim >= 2 and outputs.shape[-1] >= 2 and labels.shape == outputs.shape[-2:-1]
    shapes = f"{outputs.shape} for labels {labels.shape}"
    require(fits, "outputs", shapes, "have shape [..., N, classes], for `labels` of shape [N]")
    fits = labels.dtype.kind in "iu" and np.isin(labels, np.arange(outputs.shape[-1])).all()
    require(fits, "labels", labels, f"hold ints from 0 to {outputs.shape[-1] - 1}")
    if not from_logits:
        outputs = np.log(np.maximum(outputs, np.finfo("float64").tiny))
    own = labels[:, np.newaxis] == np.arange(outputs.shape[-1])
    return np.sum(np.where(own, outputs, 0.0), -1) - scipy.special.logsumexp(
        np.where(own, -np.inf, outputs), axis=-1
    )


def likelihood_ratio(observed, shadows, trained_on):
    """Scores of the likelihood-ratio attack with shadow models (Carlini et al. 2022, LiRA).

    Each example's values on shadow models that were trained on it, and on those that were not, are
    fitted by normals, and the score is the log of the ratio of their densities at the value that
    was observed. An example that all shadow models left out has the one-sided score: how far the
    value lies above those without it. With fewer than 32 shadow models of a kind, an example's
    standard deviation is over all examples together.

    Args:
        observed: Array of floats [N]: values on the model under attack, as `true_class_logits`
            gives.
        shadows: Array of floats [S, N]: values on S shadow models.
        trained_on: Bool array [S, N]: which of these were trained on which example.

    Returns:
        float64 [N].

    Raises:
        ValueError: If shapes do not fit, or an example was in all shadow models.
    """
    observed, shadows = np.asarray(observed, "float64"), np.asarray(shadows, "float64")
    trained_on = np.asarray(trained_on, bool)
    fits = shadows.ndim == 2 and shadows.shape[1:] == observed.shape == trained_on.shape[1:]
    fits = fits and shadows.shape == trained_on.shape
    shapes = f"{shadows.shape}, {trained_on.shape} and {observed.shape}"
    require(fits, "shadows", shapes, "and `trained_on` have shape [S, N], `observed` [N]")
    without, without_deviation, left_out = _normals(shadows, ~trained_on)
    require(left_out.all(), "trained_on", trained_on, "leave each example out of some shadow model")
    within, within_deviation, known = _normals(shadows, trained_on)
    log_density = scipy.stats.norm.logpdf
    ratio = log_density(observed, within, within_deviation) - log_density(
        observed, without, without_deviation
    )
    one_sided = -scipy.stats.norm.logsf(observed, without, without_deviation)
    return np.where(known, ratio, one_sided)


def _normals(values, chosen):
    """Means and standard deviations of the chosen values [S, N] of each column; if there are any.

    Columns with none have mean 0.
    """
    count = chosen.sum(0)
    mean = np.where(chosen, values, 0.0).sum(0) / np.maximum(count, 1)
    squares = np.where(chosen, (values - mean) ** 2, 0.0)
    degrees = np.maximum(count - 1, 0)
    pooled = squares.sum() / max(degrees.sum(), 1)
    own = squares.sum(0) / np.maximum(degrees, 1)
    variance = np.where(count >= _OWN_DEVIATION, own, pooled)
    smallest = np.finfo("float64").eps * max(1.0, float(np.abs(values).max()))
    return mean, np.maximum(np.sqrt(variance), smallest), count > 0
