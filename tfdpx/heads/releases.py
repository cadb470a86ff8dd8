"""The noise of a head: every statistic that leaves the data is released and counted here.

A head declares its releases beforehand, with their number and noise multipliers. Any further one is
refused: no statistic is released without a payment from the budget.
"""

from __future__ import annotations

import collections
import functools
import math
import secrets
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx.accounting import accountants
from tfdpx.accounting.gaussian import added_delta
from tfdpx.accounting.ledger import RELEASE, Entry, Ledger


class Releases:
    """The Gaussian releases of one fit.

    Guarantee: each release is one Gaussian mechanism under adding or removing one example, given
    all releases before it, if `sensitivity` bounds the change of its value (of all its parts
    together) in the l2 norm. The `ledger` has their total cost.

    Args:
        planned: Dict from a name to `(noise_multiplier, times)`.
        seed: Optional int for repeatable experiments; None draws one from the operating system.
    """

    def __init__(self, planned: Mapping[str, tuple[float, int]], seed: int | None = None):
        self._planned = planned
        self._seed, self._seeded = noise.make_seed(seed), seed is not None
        self._run = secrets.randbits(52) | 1
        self._done: collections.Counter[tuple[str, int]] = collections.Counter()  # Name, part.
        self._drawn = 0

    def gaussian(
        self, name: str, value: np.ndarray, sensitivity: float, part: int = 0
    ) -> np.ndarray:
        """Returns `value` with noise N(0, (noise_multiplier sensitivity)^2) on every entry.

        Args:
            name: One of the planned names.
            value: float64 array.
            sensitivity: Float, l2 bound on the change by one example, over all parts together.
            part: Int. Parts of one release may come one by one, for example one per class.

        Raises:
            RuntimeError: If this part was already released as often as planned.
        """
        noise_multiplier = self._count(name, part)
        if not noise_multiplier:
            return value
        return value + self._noise(value.shape, noise_multiplier * sensitivity)

    def symmetric(
        self, name: str, value: np.ndarray, sensitivity: float, part: int = 0
    ) -> np.ndarray:
        """Returns a symmetric matrix with symmetric noise; arguments as for `gaussian`.

        The noise is (N + N^T) / 2 with N as in `gaussian`. Its standard deviation is s on the
        diagonal and s / sqrt(2) off it, half of the paper's variance. It is as private, because for
        a symmetric V the released matrix is the symmetric part of V + N, the paper's release, and
        taking that part reads no data. (So the sensitivity is the Frobenius norm of all entries.)
        """
        noisy = self.gaussian(name, value, sensitivity, part)
        return (noisy + noisy.T) / 2

    def _count(self, name, part):
        """Counts a release and returns its noise multiplier."""
        noise_multiplier, times = self._planned[name]
        done = self._done[name, part]
        if done >= times:
            raise RuntimeError(
                f"The statistic {name!r} was released {done} times, which is all that the budget "
                "of this head pays for. Plan every release."
            )
        self._done[name, part] += 1
        self._drawn += 1
        return noise_multiplier

    def _noise(self, shape, deviation):
        seed, index = tf.constant(self._seed, tf.int64), tf.constant(self._drawn, tf.int64)
        return deviation * np.asarray(_drawing(tuple(shape))(seed, index), "float64")

    def ledger(self) -> Ledger:
        """Returns the `tfdpx.accounting.Ledger` of all releases made, as full-batch steps."""
        times: dict[str, int] = {}
        for (name, _), done in self._done.items():
            times[name] = max(times.get(name, 0), done)
        return self._ledger_of(times)

    def planned_ledger(self) -> Ledger:
        """Returns the `ledger` as it will be after all planned releases."""
        return self._ledger_of({name: times for name, (_, times) in self._planned.items()})

    def _ledger_of(self, times):
        # By noise: entries of one run at the same noise are taken to be the same steps.
        steps: collections.Counter[float] = collections.Counter()
        for name, done in times.items():
            steps[self._planned[name][0]] += done
        return Ledger(
            tuple(
                Entry(sigma, 1.0, n, run=self._run, seeded=self._seeded, kind=RELEASE)
                for sigma, n in steps.items()
            )
        )


@functools.lru_cache(maxsize=64)
def _drawing(shape):
    """Returns a graph that draws; a hundred small eager operations take long."""

    def draw(seed, index):
        return noise.normal(shape, noise.fold_in(seed, index), 1.0)

    return tf.function(draw, autograph=False)


def check_tail(
    planned: Mapping[str, tuple[float, int]], values: Mapping[str, int], delta: float
) -> None:
    """Raises ValueError unless delta's reserve pays for the truncated tail of the noise.

    Args:
        planned: As for `Releases`.
        values: Dict from a name to the number of entries of a release, over all parts.
        delta: Float.
    """
    added = math.fsum(
        added_delta(sigma, 1.0, values[name], times, noise.LARGEST_RADIUS)
        for name, (sigma, times) in planned.items()
        if sigma and times
    )
    if added > accountants.RESERVED_SHARE * delta:
        raise ValueError(
            f"Argument `delta` is too small for the tail of the noise, which adds {added:.3g} to "
            f"it. Received: delta={delta}. Use a larger one, or a smaller epsilon."
        )
