"""Accountants of Gaussian releases that all examples take part in: no sampling.

Releases at noise multipliers s_1, s_2, ... compose to one Gaussian mechanism whose mu is
sqrt(sum 1 / s_i^2) (Dong, Roth, Su 2022, "Gaussian Differential Privacy", Corollary 3.3). So one
number says everything, and its epsilon has a closed form.
"""

import math
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
import scipy.special
from dp_accounting.pld import privacy_loss_mechanism


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
        """Epsilon at `target_delta`."""
        return self._conversion(math.sqrt(self._squared_mu), target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """The exact delta at `target_epsilon`, whatever the conversion is."""
        loss = privacy_loss_mechanism.GaussianPrivacyLoss(1 / math.sqrt(self._squared_mu))
        return loss.get_delta_for_epsilon([target_epsilon])[0]


def exact_epsilon(mu: float, delta: float) -> float:
    """The least epsilon of the Gaussian mechanism at `delta` (Balle and Wang 2018, Theorem 8).

    Args:
        mu: Float > 0. Sensitivity over the standard deviation of the noise.
        delta: Float in (0, 1).
    """
    return float(exact_epsilons(np.array([mu]), delta)[0])


def exact_epsilons(mus: np.ndarray, delta: float) -> np.ndarray:
    """`exact_epsilon` of an array, all at once.

    Args:
        mus: float64 array [n], at least 0.
        delta: Float in (0, 1).

    Returns:
        float64 array [n], not too low.
    """
    mus = np.asarray(mus, float)
    spent = np.where(np.isfinite(mus), np.maximum(mus, 1e-12), 1.0)

    def is_within(epsilon):
        tail = epsilon + scipy.special.log_ndtr(-spent / 2 - epsilon / spent)
        return scipy.special.ndtr(spent / 2 - epsilon / spent) - np.exp(tail) <= delta

    low, high = np.zeros(len(mus)), zcdp_epsilon(spent, delta)
    high = np.where(is_within(low), low, high)
    for _ in range(64):
        middle = (low + high) / 2
        within = is_within(middle)
        low, high = np.where(within, low, middle), np.where(within, middle, high)
    return np.where(np.isfinite(mus), np.where(mus > 0, high, 0.0), np.inf)


def zcdp_epsilon(mu: Any, delta: float) -> Any:
    """Epsilon by zero-concentrated privacy, rho = mu^2 / 2 (Bun and Steinke 2016, Prop. 1.3).

    Looser than `exact_epsilon`: by a third at epsilon 1 and delta 1e-5.

    Args:
        mu: Float > 0, or an array of these. Sensitivity over the standard deviation of the noise.
        delta: Float in (0, 1).
    """
    rho = mu**2 / 2
    return rho + 2 * np.sqrt(rho * math.log(1 / delta))
