"""Renyi divergences of one Poisson-sampled Gaussian step, for many sensitivities at once.

dp_accounting computes these for one mechanism at a time, behind private names, and as the log of a
number near 1, which for small sensitivities is rounding alone. Here the 1 is taken out first.
"""

import numpy as np
import scipy.special
from numpy.typing import ArrayLike

# Those of Yu et al. 2022: "integer orders up to 256".
PAPER_ORDERS = np.arange(2, 257)
# Small losses are converted best at large orders.
ORDERS = np.concatenate([PAPER_ORDERS, np.round(np.geomspace(288, 4096, 24)).astype(int)])
CONVERSIONS = {"improved": ORDERS, "mironov": PAPER_ORDERS}
# So much the sums below may lack, by rounding.
_ROUNDING = 1 + 1e-9


def divergences(
    fractions: ArrayLike,
    noise_multiplier: float,
    sampling_probability: float,
    orders: np.ndarray,
) -> np.ndarray:
    """The RDP of one step, for examples that move the sum by fractions of its sensitivity.

    At an integer order a, with s = noise_multiplier / fraction and sampling probability q,

        log(sum_k binomial(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 s^2))) / (a - 1)

    (Mironov, Talwar, Zhang 2019, arXiv:1908.10530, Section 3.3); it bounds both directions, of
    adding and of removing the example. a / (2 s^2) where q is 1.

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
    found = np.zeros([len(at), len(orders)])
    positive = np.array([square for square in at if square > 0])
    if len(positive):
        columns = [_divergence(positive, sampling_probability, int(order)) for order in orders]
        found[-len(positive) :] = np.stack(columns, axis=1) * _ROUNDING
    return found[[at[square] for square in squares]]


def _divergence(squares, probability, order):
    """float64 [n] at one order, for `squares` = 1 / s^2 > 0."""
    drawn = np.arange(2, order + 1)[:, np.newaxis]
    log_binomial = -np.log(order + 1) - scipy.special.betaln(order - drawn + 1, drawn + 1)
    log_weight = (
        log_binomial + drawn * np.log(probability) + (order - drawn) * np.log1p(-probability)
    )
    exponent = drawn * (drawn - 1) / 2 * squares
    # The weights add up to 1: what is above 1 is their sum times exp(exponent) - 1.
    log_excess = log_weight + exponent + np.log(-np.expm1(-exponent))
    return np.logaddexp(0.0, scipy.special.logsumexp(log_excess, axis=0)) / (order - 1)


def epsilons(
    divergences: np.ndarray, orders: np.ndarray, delta: float, conversion: str
) -> np.ndarray:
    """Epsilon at `delta` of each row of Renyi divergences, by the best order.

    "mironov": Mironov 2017, Proposition 3, as Yu et al. 2022 use it. "improved": Canonne, Kamath,
    Steinke 2020, Proposition 12.

    Args:
        divergences: float64 array [n, orders].
        orders: Int array [orders].
        delta: Float in (0, 1).
        conversion: "improved" or "mironov".

    Returns:
        float64 array [n], at least 0. 0 where all divergences are.
    """
    if conversion == "mironov":
        extra = -np.log(delta) / (orders - 1)
    else:
        extra = np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1)
    found = np.maximum(np.min(divergences + extra, axis=1), 0.0)
    return np.where(divergences.max(axis=1) > 0, found, 0.0)
