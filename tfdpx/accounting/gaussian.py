"""Formulas for Gaussian mechanisms: full batches, Poisson sampling, and bounded noise.

Full batches: releases at noise multipliers s_1, s_2, ... compose to one Gaussian mechanism with
mu = sqrt(sum 1 / s_i^2) (Dong, Roth, Su 2022, "Gaussian Differential Privacy", Corollary 3.3). Its
delta at an epsilon has a closed form.

Poisson sampling: individual accounting needs the Renyi divergences of a step for many
sensitivities, some of them very small. dp_accounting computes one divergence at a time, as the log
of a number near 1. For a small sensitivity the result is only a rounding error. This module
subtracts the 1 first, and computes the divergences of many sensitivities at once.

Bounded noise: the noise of tfdpx never exceeds a largest value, but the accountants assume Gaussian
noise. `added_delta` returns a bound on how much delta grows because of this difference.
"""

import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
import scipy.special
from dp_accounting.pld import privacy_loss_mechanism
from numpy.typing import ArrayLike


class FullBatchAccountant(dp_accounting.PrivacyAccountant):
    """An accountant of Gaussian releases on full batches, for adding or removing one example.

    Args:
        conversion: Function from mu and delta to epsilon: `exact_epsilon` or `zcdp_epsilon`.
    """

    def __init__(self, conversion: Callable[[float, float], float]):
        super().__init__(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        self._conversion = conversion
        self._squared_mu = 0.0

    def _maybe_compose(self, event, count, do_compose):
        if isinstance(event, dp_accounting.SelfComposedDpEvent):
            return self._maybe_compose(event.event, count * event.count, do_compose)
        if not isinstance(event, dp_accounting.GaussianDpEvent):
            return self.CompositionErrorDetails(event, "Only Gaussians of full batches compose.")
        if do_compose:
            self._squared_mu += count / event.noise_multiplier**2
        return None

    def get_epsilon(self, target_delta: float) -> float:
        """Returns the epsilon of all composed releases at `target_delta`."""
        return self._conversion(math.sqrt(self._squared_mu), target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Returns the exact delta of all composed releases at `target_epsilon`."""
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(1 / math.sqrt(self._squared_mu))
        return loss.get_delta_for_epsilon([target_epsilon])[0]


def exact_delta(mu: Any, epsilon: Any) -> Any:
    """Returns the least delta of the Gaussian mechanism (Balle and Wang 2018, Theorem 8).

    Args:
        mu: Float > 0, or an array. Sensitivity divided by the standard deviation of the noise.
        epsilon: Float, or an array of floats.
    """
    tail = epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu)
    return scipy.special.ndtr(mu / 2 - epsilon / mu) - np.exp(tail)


def exact_epsilon(mu: float, delta: float) -> float:
    """Returns the least epsilon of the Gaussian mechanism at `delta` (Balle and Wang 2018, Thm. 8).

    Args:
        mu: Float > 0. Sensitivity divided by the standard deviation of the noise.
        delta: Float in (0, 1).
    """
    return float(exact_epsilons(np.array([mu]), delta)[0])


def exact_epsilons(mus: np.ndarray, delta: float) -> np.ndarray:
    """Returns `exact_epsilon` for each mu in an array.

    Args:
        mus: float64 array [n] of values >= 0.
        delta: Float in (0, 1).

    Returns:
        float64 array [n] of epsilons, which are never too low.
    """
    mus = np.asarray(mus, float)
    spent = np.where(np.isfinite(mus), np.maximum(mus, 1e-12), 1.0)

    def is_within(epsilon):
        return exact_delta(spent, epsilon) <= delta

    low, high = np.zeros(len(mus)), zcdp_epsilon(spent, delta)
    high = np.where(is_within(low), low, high)
    for _ in range(64):
        middle = (low + high) / 2
        within = is_within(middle)
        low, high = np.where(within, low, middle), np.where(within, middle, high)
    return np.where(np.isfinite(mus), np.where(mus > 0, high, 0.0), np.inf)


def zcdp_epsilon(mu: Any, delta: float) -> Any:
    """Returns epsilon by zero-concentrated privacy, rho = mu^2 / 2 (Bun, Steinke 2016, Prop. 1.3).

    It is higher than `exact_epsilon`, for example by a third at epsilon 1 and delta 1e-5.

    Args:
        mu: Float > 0, or an array. Sensitivity divided by the standard deviation of the noise.
        delta: Float in (0, 1).
    """
    rho = mu**2 / 2
    return rho + 2 * np.sqrt(rho * math.log(1 / delta))


# The orders of Renyi divergences in Yu et al. 2022: "integer orders up to 256".
PAPER_ORDERS = np.arange(2, 257)
# Small privacy losses have their best epsilon at larger orders.
ORDERS = np.concatenate([PAPER_ORDERS, np.round(np.geomspace(288, 4096, 24)).astype(int)])
CONVERSIONS = {"improved": ORDERS, "mironov": PAPER_ORDERS}
# Computed divergences are multiplied by this factor, so rounding errors never make them too small.
_ROUNDING = 1 + 1e-9


def divergences(
    fractions: ArrayLike,
    noise_multiplier: float,
    sampling_probability: float,
    orders: np.ndarray,
) -> np.ndarray:
    """Returns the Renyi divergences of one step for examples that are clipped to different norms.

    At an integer order a, with s = noise_multiplier / fraction and sampling probability q, the
    divergence is

        log(sum_k binomial(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 s^2))) / (a - 1)

    (Mironov, Talwar, Zhang 2019, arXiv:1908.10530, Section 3.3), which bounds the divergence for
    adding and for removing the example. If q is 1, the formula becomes a / (2 s^2).

    Args:
        fractions: float64 array [n] of values in [0, 1]: the norm to which each example is clipped,
            divided by the sensitivity that `noise_multiplier` refers to.
        noise_multiplier: Float > 0.
        sampling_probability: Float in (0, 1].
        orders: Int array [m] of orders >= 2.

    Returns:
        float64 array [n, m].
    """
    squares = (np.asarray(fractions, float) / noise_multiplier) ** 2
    if sampling_probability == 1:
        return squares[:, np.newaxis] * orders / 2 * _ROUNDING
    at = {square: place for place, square in enumerate(np.unique(squares))}
    table = np.zeros([len(at), len(orders)])
    positive = np.array([square for square in at if square > 0])
    if len(positive):
        columns = [_divergence(positive, sampling_probability, int(order)) for order in orders]
        table[-len(positive) :] = np.stack(columns, axis=1) * _ROUNDING
    return table[[at[square] for square in squares]]


def _divergence(squares, probability, order):
    """Returns the divergences at one order, by the formula in the docstring of `divergences`.

    Args:
        squares: float64 array [n] of values > 0, which are 1 / s^2 in the formula.
        probability: Float in (0, 1), the sampling probability q.
        order: Int >= 2, the order a.

    Returns:
        float64 array [n].
    """
    drawn = np.arange(2, order + 1)[:, np.newaxis]
    log_binomial = -np.log(order + 1) - scipy.special.betaln(order - drawn + 1, drawn + 1)
    log_weight = (
        log_binomial + drawn * np.log(probability) + (order - drawn) * np.log1p(-probability)
    )
    exponent = drawn * (drawn - 1) / 2 * squares
    # The weights sum to 1. So the sum in the formula, minus 1, is the sum of
    # weight * (exp(exponent) - 1).
    log_excess = log_weight + exponent + np.log(-np.expm1(-exponent))
    return np.logaddexp(0.0, scipy.special.logsumexp(log_excess, axis=0)) / (order - 1)


def epsilons(
    divergences: np.ndarray, orders: np.ndarray, delta: float, conversion: str
) -> np.ndarray:
    """Converts Renyi divergences to epsilon. Uses the order that gives the least epsilon.

    Args:
        divergences: float64 array [n, m], for n examples at m orders.
        orders: Int array [m].
        delta: Float in (0, 1).
        conversion: "improved" for Canonne, Kamath, Steinke 2020, Proposition 12; "mironov" for
            Mironov 2017, Proposition 3, the conversion of Yu et al. 2022.

    Returns:
        float64 array [n] of epsilons >= 0. An epsilon is exactly 0 if all divergences are 0.
    """
    if conversion == "mironov":
        extra = -np.log(delta) / (orders - 1)
    else:
        extra = np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    values = np.maximum(np.min(divergences + extra, axis=1), 0.0)
    return np.where(divergences.max(axis=1) > 0, values, 0.0)


# The largest radius of a pair of noise values, in standard deviations (`tfdpx.noise`). The radius
# is computed from a uniform number; the smallest possible number is half of 2**-64.
LARGEST_RADIUS = math.sqrt(2.0 * 65 * math.log(2.0))


def added_delta(
    noise_multiplier: float,
    sampling_probability: float,
    num_parameters: int,
    steps: int,
    largest_radius: float,
) -> float:
    """Returns an upper limit of the delta that must be added because the noise is bounded.

    The accountants assume Gaussian noise, which has no largest value. Let two data sets differ in
    one example. For an output that is possible with both data sets, the ratio of the two densities
    is the same as with Gaussian noise. But some outputs are possible with only one of the data
    sets. Their probability must be added to delta, and this function bounds this probability.

    The noise consists of n pairs of values, and each pair lies in a disc with a radius of R
    standard deviations. The example shifts the center of a pair by t standard deviations. The
    shifted pair lies outside of the disc with a probability of at most

        f(t) = exp(-R^2/2) * (exp(t^2/2) * (I0(R t) + L0(R t) + 1) / 2 - 1),

    with the modified Bessel function I0 and the modified Struve function L0. Here f(t) is the
    probability that a pair of normal values lies in the disc, and outside of it after the shift.
    The norm of the clipped gradient limits the shifts: their squares sum to at most T^2 = 1 /
    noise_multiplier^2. All coefficients of the power series of f are positive, so

        sum f(t_i) <= f(T) + (sqrt(n) - 1) T R exp(-R^2/2) / pi,

    because the linear part of the sum is largest if all pairs are shifted equally, and the
    remaining part is largest if only one pair is shifted.

    Sampling: if a step draws the example with probability q, an output that is possible only with
    the example has q times that probability. In the other direction, an output may be possible only
    in a step that does not draw the example. The privacy loss of such an output is at most -log(1 -
    q) higher than with Gaussian noise. This adds to delta at most -log(1 - q) times the probability
    of such outputs.

    The bound leaves out one effect: the density in a disc is the Gaussian density, divided by the
    Gaussian's probability of the disc. This division multiplies delta by 1 + n steps exp(-R^2/2),
    for example by 1 + 5e-7 for the longest run of De et al. 2022.

    Args:
        noise_multiplier: Float > 0. Standard deviation of the noise divided by the sensitivity.
        sampling_probability: Float in (0, 1], q.
        num_parameters: Int >= 1. Number of values that get noise in each step, 2n.
        steps: Int >= 0. Number of updates.
        largest_radius: Float > 0, R, for example `LARGEST_RADIUS`.

    Returns:
        Float in [0, 1].
    """
    pairs = math.ceil(num_parameters / 2)
    shift, edge = 1 / noise_multiplier, largest_radius
    sampled = 1.0 if sampling_probability == 1 else min(1.0, -math.log1p(-sampling_probability))
    if shift > edge:
        return min(1.0, steps * sampled)
    bulge = scipy.special.i0(edge * shift) + scipy.special.modstruve(0, edge * shift) + 1
    concentrated = math.exp(shift**2 / 2) * bulge / 2 - 1
    spread = (math.sqrt(pairs) - 1) * shift * edge / math.pi
    return min(1.0, steps * sampled * math.exp(-(edge**2) / 2) * (concentrated + spread))
