"""Closed forms for Gaussian releases: full batches, Poisson samples, and noise with a finite tail.

Releases of full batches at noise multipliers s_1, s_2, ... compose to one Gaussian mechanism with
mu = sqrt(sum 1 / s_i^2) (Dong, Roth, Su 2022, "Gaussian Differential Privacy", Corollary 3.3), and
the epsilon of one mu has a closed form.

dp_accounting computes Renyi divergences of a Poisson-sampled step for one sensitivity at a time, as
the log of a number near 1. For small sensitivities that leaves only rounding errors. Here they are
computed for many sensitivities at once, and the 1 is subtracted first.
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
    """Composes Gaussian releases of full batches, under adding or removing one example.

    Args:
        conversion: Function of mu and delta to epsilon: `exact_epsilon` or `zcdp_epsilon`.
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
        """Returns the epsilon at `target_delta`."""
        return self._conversion(math.sqrt(self._squared_mu), target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Returns the exact delta at `target_epsilon`, for every conversion."""
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(1 / math.sqrt(self._squared_mu))
        return loss.get_delta_for_epsilon([target_epsilon])[0]


def exact_delta(mu: Any, epsilon: Any) -> Any:
    """Returns the least delta of the Gaussian mechanism (Balle and Wang 2018, Theorem 8).

    Args:
        mu: Float > 0, or an array of these. Sensitivity over the standard deviation of the noise.
        epsilon: Float, or an array of these.
    """
    tail = epsilon + scipy.special.log_ndtr(-mu / 2 - epsilon / mu)
    return scipy.special.ndtr(mu / 2 - epsilon / mu) - np.exp(tail)


def exact_epsilon(mu: float, delta: float) -> float:
    """Returns the least epsilon of the Gaussian mechanism at `delta` (Balle and Wang 2018, Thm. 8).

    Args:
        mu: Float > 0. Sensitivity over the standard deviation of the noise.
        delta: Float in (0, 1).
    """
    return float(exact_epsilons(np.array([mu]), delta)[0])


def exact_epsilons(mus: np.ndarray, delta: float) -> np.ndarray:
    """Returns `exact_epsilon` of a whole array.

    Args:
        mus: float64 array [n], at least 0.
        delta: Float in (0, 1).

    Returns:
        float64 array [n], never too low.
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

    It is looser than `exact_epsilon`, for example by a third at epsilon 1 and delta 1e-5.

    Args:
        mu: Float > 0, or an array of these. Sensitivity over the standard deviation of the noise.
        delta: Float in (0, 1).
    """
    rho = mu**2 / 2
    return rho + 2 * np.sqrt(rho * math.log(1 / delta))


# The orders of Yu et al. 2022: "integer orders up to 256".
PAPER_ORDERS = np.arange(2, 257)
# Small losses are converted best at large orders.
ORDERS = np.concatenate([PAPER_ORDERS, np.round(np.geomspace(288, 4096, 24)).astype(int)])
CONVERSIONS = {"improved": ORDERS, "mironov": PAPER_ORDERS}
# The sums below may be too small by this factor because of rounding.
_ROUNDING = 1 + 1e-9


def divergences(
    fractions: ArrayLike,
    noise_multiplier: float,
    sampling_probability: float,
    orders: np.ndarray,
) -> np.ndarray:
    """Returns the RDP of one step, for examples that move the sum by fractions of its sensitivity.

    At an integer order a, with s = noise_multiplier / fraction and sampling probability q,

        log(sum_k binomial(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 s^2))) / (a - 1)

    (Mironov, Talwar, Zhang 2019, arXiv:1908.10530, Section 3.3). It bounds both directions, adding
    and removing the example. If q is 1, it is a / (2 s^2).

    Args:
        fractions: float64 array [n], in [0, 1].
        noise_multiplier: Float > 0.
        sampling_probability: Float in (0, 1].
        orders: Int array [orders], at least 2.

    Returns:
        float64 array [n, orders].
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
    """Returns float64 [n] at one order, for `squares` = 1 / s^2 > 0."""
    drawn = np.arange(2, order + 1)[:, np.newaxis]
    log_binomial = -np.log(order + 1) - scipy.special.betaln(order - drawn + 1, drawn + 1)
    log_weight = (
        log_binomial + drawn * np.log(probability) + (order - drawn) * np.log1p(-probability)
    )
    exponent = drawn * (drawn - 1) / 2 * squares
    # The weights add up to 1, so the excess over 1 is their sum times exp(exponent) - 1.
    log_excess = log_weight + exponent + np.log(-np.expm1(-exponent))
    return np.logaddexp(0.0, scipy.special.logsumexp(log_excess, axis=0)) / (order - 1)


def epsilons(
    divergences: np.ndarray, orders: np.ndarray, delta: float, conversion: str
) -> np.ndarray:
    """Returns the epsilon at `delta` of each row of Renyi divergences, by the best order.

    "mironov": Mironov 2017, Proposition 3, as Yu et al. 2022 use it. "improved": Canonne, Kamath,
    Steinke 2020, Proposition 12.

    Args:
        divergences: float64 array [n, orders].
        orders: Int array [orders].
        delta: Float in (0, 1).
        conversion: "improved" or "mironov".

    Returns:
        float64 array [n], at least 0; exactly 0 where all divergences are 0.
    """
    if conversion == "mironov":
        extra = -np.log(delta) / (orders - 1)
    else:
        extra = np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    values = np.maximum(np.min(divergences + extra, axis=1), 0.0)
    return np.where(divergences.max(axis=1) > 0, values, 0.0)


# In standard deviations: a radius has 64 bits, and the smallest uniform number is half of 2**-64.
LARGEST_RADIUS = math.sqrt(2.0 * 65 * math.log(2.0))


def added_delta(
    noise_multiplier: float,
    sampling_probability: float,
    num_parameters: int,
    steps: int,
    largest_radius: float,
) -> float:
    """Bounds the delta that the largest value of the noise adds to the delta of Gaussian noise.

    Neighbours differ in one example, added or removed. The norm of its clipped gradient is at most
    the noise's sensitivity, over any number of entries. If both data sets can give an output, the
    ratio of their densities equals the ratio of Gaussians. If only one of them can, it does not.

    Noise comes in n pairs with a radius of at most R standard deviations. A pair shifted by t
    leaves that disc with probability at most

        f(t) = exp(-R^2/2) * (exp(t^2/2) * (I0(R t) + L0(R t) + 1) / 2 - 1),

    the mass of a normal pair within the disc that the shift moves out of it, with Bessel's I0 and
    Struve's L0. All coefficients of its power series are positive. So for shifts with squares that
    sum to T^2 = 1 / noise_multiplier^2

        sum f(t_i) <= f(T) + (sqrt(n) - 1) T R exp(-R^2/2) / pi:

    because the linear part is largest when spread evenly, the rest in a single pair. With sampling
    probability q, the probability of an output that is possible only with the example is q times
    that. Conversely, an output without the example can be one that only a step which skips it
    gives. Its loss is at most -log(1 - q) higher than a Gaussian's, which adds no more than that
    times the probability.

    In addition, the density on a disc is a Gaussian's divided by its mass, which multiplies delta
    by 1 + n steps exp(-R^2/2), for example 1 + 5e-7 for the longest run of De et al. 2022.

    Args:
        noise_multiplier: Float > 0. Standard deviation of the noise divided by the sensitivity.
        sampling_probability: Float in (0, 1].
        num_parameters: Int >= 1. Number of values with noise at each step.
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
