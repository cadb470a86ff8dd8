"""What a run really spent on each example: per-instance differential privacy.

For weights and an example z, Wang 2019 ("Per-instance differential privacy", which AdaMix cites)
asks how far the outputs with and without z lie apart, all else being as it was. With Gaussian
noise on full batches that is one Gaussian mechanism again: with n_t(z) the norm of what z adds to
the release of step t, its clip C_t and the noise multiplier sigma,

    mu(z) = sqrt(sum_t (n_t(z) / (C_t sigma))^2)  <=  sqrt(T) / sigma.

It is a function of the private example and of the run's outputs: nothing here is private, and none
of it bounds what a loss at other data or other outputs would have been.
"""

import dataclasses
import math

import numpy as np
from scipy.special import softmax

from tfdpx.accounting import accountants

# Steps that the range of mu is cut into: epsilon is that of the next larger one.
_GRID = 1000


@dataclasses.dataclass(frozen=True)
class Step:
    """One release of a run, as the public knows it.

    Attributes:
        kernel: float32 `[d, m]`, the weights at which gradients were taken.
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
        y: Array `[n, m]`, zeros and a single one a row.
        lengths: float64 `[n]`, the l2 norms of the rows of `x`.
    """
    residuals = np.linalg.norm(softmax(x @ step.kernel, axis=1) - y, axis=1)
    factors = np.minimum(1.0, step.l2_norm_clip / np.maximum(residuals * lengths, 1e-300))
    if step.subspace is not None:
        lengths = np.linalg.norm(x @ step.subspace, axis=1)
    return factors * residuals * lengths / step.l2_norm_clip


def epsilons(steps, chunks, noise_multiplier, delta):
    """float64 `[n]`: the epsilon of each example, rounded up by at most 0.1% of mu's range.

    Args:
        steps: List of `Step`.
        chunks: Iterable of pairs of features `[n, d]` and targets `[n, m]`.
        noise_multiplier: Float > 0, sigma.
        delta: Float in (0, 1).
    """
    squares = []
    for x, y in chunks:
        x = np.where(np.isfinite(x).all(axis=1)[:, np.newaxis], x, 0.0).astype("float64")
        lengths = np.linalg.norm(x, axis=1)
        squares.append(sum(shares(step, x, y, lengths) ** 2 for step in steps))
    mus = np.sqrt(np.concatenate(squares)) / noise_multiplier
    grid = math.sqrt(len(steps)) / noise_multiplier / _GRID
    # A hair less, so that the largest, which rounding may have raised, stays what it is.
    places = np.ceil(mus / grid - 1e-6).astype(int)
    found = {
        place: accountants.epsilon(1 / (place * grid), 1.0, 1, delta, "gdp") if place else 0.0
        for place in set(places.tolist())
    }
    return np.array([found[place] for place in places.tolist()])
