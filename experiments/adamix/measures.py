"""The cost of a fit for each example, and the success of an attack. None of it is private.

For weights and an example z, Wang 2019 ("Per-instance differential privacy", cited by the paper)
asks how far the outputs with and without z differ if all else stays the same. With Gaussian
noise on full batches that is one Gaussian mechanism again. With n_t(z) the norm of the contribution
of z to the release of step t, its clip C_t and the noise multiplier sigma,

    mu(z) = sqrt(sum_t (n_t(z) / (C_t sigma))^2)  <=  sqrt(T) / sigma.

It is a function of the private example and of the run's outputs, and bounds no loss at other data
or other outputs.
"""

import dataclasses
import math

import numpy as np
from scipy.special import logsumexp, softmax
from scipy.stats import rankdata

from tfdpx.accounting import accountants

# Number of steps that divide the range of mu; epsilon is taken at the next larger one.
_GRID = 1000


@dataclasses.dataclass(frozen=True)
class Step:
    """The public information about one release of a run.

    Attributes:
        kernel: float64 `[d, m]`, the weights at which gradients were taken.
        l2_norm_clip: Float, C_t.
        subspace: float64 `[d, p]`, or None without a projection.
    """

    kernel: np.ndarray
    l2_norm_clip: float
    subspace: np.ndarray | None


def shares(step, x, y, lengths):
    """Returns float64 `[n]`, each example's part of the release of a step over the clip, 0 to 1.

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
    """Returns float64 `[n]`, the epsilon of each private example, rounded up by 0.1% of mu's range.

    None exceeds the epsilon of the fit, except for the accountant's rounding.

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
    # Slightly less: rounding may have raised the largest, which must stay the same.
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
    """Returns the area under the curve of an attack that takes examples of small loss for members.

    It is the probability that a member has a smaller loss than another example; ties count half.
    Guessing gives 0.5.

    Args:
        member_losses: Array `[n]`, losses of private training examples.
        other_losses: Array `[m]`, losses of examples that were not trained on.
    """
    members, non_members = len(member_losses), len(other_losses)
    ranks = rankdata(np.concatenate([member_losses, other_losses]))[:members]
    smaller = ranks.sum() - members * (members + 1) / 2
    return float(1 - smaller / (members * non_members))
