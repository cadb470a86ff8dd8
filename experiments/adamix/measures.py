"""Computes each example's privacy loss in a fit, and the success of an attack, without privacy.

Wang 2019 ("Per-instance differential privacy", cited by the paper) fixes the data and an example z,
and asks how far the outputs with and without z differ. With Gaussian noise on full batches, all
steps together are one Gaussian mechanism. Let n_t(z) be the norm of the contribution of z to the
release of step t, C_t the clip of this step, and sigma the noise multiplier. Then the mechanism has

    mu(z) = sqrt(sum_t (n_t(z) / (C_t sigma))^2)  <=  sqrt(T) / sigma.

The value mu(z) depends on the private example and on the outputs of the run. It does not bound the
privacy loss for other data or other outputs.
"""

import dataclasses
import math

import numpy as np
from scipy.special import logsumexp, softmax
from scipy.stats import rankdata

from tfdpx.accounting import accountants

# The range of mu is divided into this many steps. Epsilon is computed at the next larger step.
_GRID = 1000


@dataclasses.dataclass(frozen=True)
class Step:
    """The public information about a release of a run.

    Attributes:
        kernel: float64 `[d, m]`, the weights at which gradients were taken.
        l2_norm_clip: Float, C_t.
        subspace: float64 `[d, p]`, or None without a projection.
    """

    kernel: np.ndarray
    l2_norm_clip: float
    subspace: np.ndarray | None


def shares(step, x, y, lengths):
    """Returns the norm of each example's contribution to a step, as a fraction of the clip.

    The result is float64 `[n]`, with values from 0 to 1.

    Args:
        step: `Step`.
        x: float64 `[n, d]`, finite.
        y: Integers `[n]`.
        lengths: float64 `[n]`, the l2 norms of the rows of `x`.
    """
    residuals = softmax(x @ step.kernel, axis=1)
    residuals[np.arange(len(y)), y] -= 1
    residuals = np.linalg.norm(residuals, axis=1)
    factors = np.minimum(1.0, step.l2_norm_clip / np.maximum(residuals * lengths, 1e-300))
    if step.subspace is not None:
        lengths = np.linalg.norm(x @ step.subspace, axis=1)
    return factors * residuals * lengths / step.l2_norm_clip


def individual_epsilons(head, features, labels):
    """Returns the epsilon of each private example, float64 `[n]`.

    Values of mu are rounded up, by at most 0.1% of the range of mu. Except for the accountant's
    rounding, no example's epsilon exceeds the epsilon of the fit.

    Args:
        head: Fitted `methods.Recording`.
        features: Array `[n, d]` of the private examples.
        labels: Integers `[n]`.
    """
    x = np.asarray(features, "float64")
    lengths = np.linalg.norm(x, axis=1)
    squares = sum(shares(step, x, labels, lengths) ** 2 for step in head.kept)
    mus = np.sqrt(squares) / head.noise_multiplier
    grid = math.sqrt(len(head.kept)) / head.noise_multiplier / _GRID
    # Subtracts a little, so rounding errors do not move the largest mu to the next place.
    places = np.ceil(mus / grid - 1e-6).astype(int)
    epsilons = {
        place: accountants.epsilon(1 / (place * grid), 1.0, 1, head.delta, "gdp") if place else 0.0
        for place in set(places.tolist())
    }
    return np.array([epsilons[place] for place in places.tolist()])


def losses(head, features, labels):
    """Returns float32 `[n]`, the cross-entropy of each example.

    Args:
        head: Fitted head.
        features: Array `[n, d]`.
        labels: Integers `[n]`.
    """
    scores = head.predict(features)
    return logsumexp(scores, axis=1) - scores[np.arange(len(scores)), labels]


def membership_auc(member_losses, other_losses):
    """Returns the area under the ROC curve (AUC) of an attack by the loss.

    The attack guesses that an example with a small loss was trained on. The AUC is the probability
    that a member has a smaller loss than an example that is not a member; ties count half. Guessing
    gives 0.5.

    Args:
        member_losses: Array `[n]`, losses of private training examples.
        other_losses: Array `[m]`, losses of examples that were not trained on.
    """
    members, non_members = len(member_losses), len(other_losses)
    ranks = rankdata(np.concatenate([member_losses, other_losses]))[:members]
    smaller = ranks.sum() - members * (members + 1) / 2
    return float(1 - smaller / (members * non_members))
