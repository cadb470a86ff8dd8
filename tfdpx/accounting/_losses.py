"""How the losses of single examples are added up and turned into epsilon."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tfdpx.accounting import accountants
from tfdpx.accounting._sampled_gaussian import CONVERSIONS, divergences, epsilons
from tfdpx.accounting.full_batch import exact_epsilons

_GRID = np.geomspace(1e-4, 1, 1000)
_Fractions = np.ndarray | Sequence[float]


@dataclasses.dataclass(frozen=True)
class Losses:
    """Losses of steps as rows of numbers that add up over steps.

    They are Renyi divergences at several orders. Gaussians of full batches have one number, the
    square of mu, which is exact; also where fractions are chosen in the course of training (Smith
    and Thakurta 2022, arXiv:2210.17520).

    Args:
        conversion: "improved" or "mironov".
        exact: Bool, whether all steps take the full batch. With "mironov" it changes nothing.
    """

    conversion: str
    exact: bool

    @property
    def _is_gaussian(self):
        return self.exact and self.conversion == "improved"

    def of_step(
        self,
        fractions: np.ndarray | Sequence[float],
        noise_multiplier: float,
        sampling_probability: float,
    ) -> np.ndarray:
        """float64 [n, numbers]: the loss of one step; arguments as of `divergences`."""
        if not noise_multiplier:
            return np.full([len(fractions), 1], np.inf)
        if self._is_gaussian:
            return (np.asarray(fractions, float)[:, np.newaxis] / noise_multiplier) ** 2
        orders = CONVERSIONS[self.conversion]
        return divergences(fractions, noise_multiplier, sampling_probability, orders)

    def interpolated(
        self,
        fractions: np.ndarray | Sequence[float],
        noise_multiplier: float,
        sampling_probability: float,
    ) -> np.ndarray:
        """`of_step` for many fractions of a sampled step: never too low, by little too high.

        exp((a - 1) RDP) - 1 is a power series of the fraction with positive coefficients, so its
        log is a convex function of the log of the fraction, and lies below its chords.
        """
        if sampling_probability == 1:
            return self.of_step(fractions, noise_multiplier, sampling_probability)
        orders = CONVERSIONS[self.conversion] - 1
        logs = self._logs(noise_multiplier, sampling_probability)
        array = np.asarray(fractions, float)
        at = np.log(np.maximum(array, _GRID[0]))
        found = np.stack([np.interp(at, np.log(_GRID), column) for column in logs.T], axis=1)
        return np.where(array[:, np.newaxis] > 0, np.logaddexp(0.0, found) / orders, 0.0)

    @functools.lru_cache(maxsize=8)  # noqa: B019 Of the arguments alone: losses are equal by value.
    def _logs(self, noise_multiplier, sampling_probability):
        """float64 [grid, orders]: log(exp((a - 1) RDP) - 1)."""
        exponents = self.of_step(_GRID, noise_multiplier, sampling_probability)
        exponents = exponents * (CONVERSIONS[self.conversion] - 1)
        return exponents + np.log(-np.expm1(-exponents))

    def epsilons(self, spent: np.ndarray, delta: float) -> np.ndarray:
        """float64 [n]: epsilon at `delta` of sums [n, numbers]; the reserve of delta is kept."""
        delta *= 1 - accountants.RESERVED_SHARE
        if self._is_gaussian:
            return exact_epsilons(np.sqrt(spent[:, 0]), delta)
        return epsilons(spent, CONVERSIONS[self.conversion], delta, self.conversion)
