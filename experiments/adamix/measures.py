"""What a fit spent on each example, and what an attack sees. None of it is private.

For weights and an example z, Wang 2019 ("Per-instance differential privacy", which the paper cites)
asks how far the outputs with and without z lie apart, all else being as it was. With Gaussian
noise on full batches that is one Gaussian mechanism again: with n_t(z) the norm of what z adds to
the release of step t, its clip C_t and the noise multiplier sigma,

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

# Steps that the range of mu is cut into: epsilon is taken at the next larger one.
_GRID = 1000


@dataclasses.dataclass(frozen=True)
class Step:
    """One release of a run, as the public knows it.

    Attributes:
        kernel: float64 `[d, m]`, the weights at which gradients were taken.
        l2_norm_clip: Float, C_t.
        subspace: float64 `[d, p]`, or None where nothing was projected.
    """

    kernel: np.ndarray
    l2_norm_clip: float
    subspace: np.ndarray | None


def shares(step, x, y, lengths):
    """float64 `[n]`: what each example adds to the release of a step, over the clip: 0 to 1.

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
    """float64 `[n]`: the epsilon of each private example, rounded up by at most 0.1% of mu's range.

    None exceeds the epsilon of the fit, but for what the accountant rounds.

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
    # A hair less, so that the largest, which rounding may have raised, stays what it is.
    places = np.ceil(mus / grid - 1e-6).astype(int)
    found = {
        place: accountants.epsilon(1 / (place * grid), 1.0, 1, head.delta, "gdp") if place else 0.0
        for place in set(places.tolist())
    }
    return np.array([found[place] for place in places.tolist()])


def losses(head, features, labels):
    """float32 `[n]`: the cross-entropy of each example.

    Args:
        head: Fitted head.
        features: Array `[n, d]`.
        labels: Integers `[n]`.
    """
    scores = head.predict(features)
    return logsumexp(scores, axis=1) - scores[np.arange(len(scores)), labels]


def membership_auc(member_losses, other_losses):
    """The area under the curve of an attacker who takes examples of small loss for members.

    It is the probability that a member has the smaller loss of a member and another example; ties
    count half. 0.5 is what guessing gives.

    Args:
        member_losses: Array `[n]`, losses of private training examples.
        other_losses: Array `[m]`, losses of examples that were not trained on.
    """
    members, others = len(member_losses), len(other_losses)
    ranks = rankdata(np.concatenate([member_losses, other_losses]))[:members]
    smaller = ranks.sum() - members * (members + 1) / 2
    return float(1 - smaller / (members * others))
