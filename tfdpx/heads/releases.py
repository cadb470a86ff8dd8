"""Adds noise to the statistics of a head, and counts how often each statistic is released.

A head declares in advance how often it releases each statistic, and with which noise multiplier.
Any further release raises an error, so the privacy budget covers every release.
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
    """Makes and counts the Gaussian releases of one fit.

    Guarantee: each release is a Gaussian mechanism for adding or removing one example, even if
    `value` depends on the results of earlier releases. The caller must pass a valid `sensitivity`:
    one example changes the value, or all parts of it together, by at most this much in l2 norm.
    `ledger` has the cost of all releases.

    Args:
        planned: Dict from the name of a statistic to a pair: its noise multiplier, and the number
            of its releases.
        seed: Optional int for repeatable experiments. With None, the operating system draws the
            seed.
    """

    def __init__(self, planned: Mapping[str, tuple[float, int]], seed: int | None = None):
        self._planned = planned
        self._seed, self._seeded = noise.make_seed(seed), seed is not None
        self._run = secrets.randbits(52) | 1
        # The number of releases so far of each (name, part).
        self._done: collections.Counter[tuple[str, int]] = collections.Counter()
        self._drawn = 0

    def gaussian(
        self, name: str, value: np.ndarray, sensitivity: float, part: int = 0
    ) -> np.ndarray:
        """Returns `value` with noise N(0, (noise_multiplier * sensitivity)^2) on every entry.

        Args:
            name: String, one of the planned names.
            value: float64 array.
            sensitivity: Float. One example changes `value` by at most this much in l2 norm. If the
                release has several parts, the bound is for all parts together.
            part: Int, the number of the part. A release may consist of parts that are computed one
                after the other, for example one for each class.

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
        """Returns a symmetric matrix with symmetric noise.

        The paper releases V + N for a symmetric matrix V, with noise N as in `gaussian`. This
        method releases the symmetric part of V + N, which is V + (N + N^T) / 2. This release is as
        private, because it is computed from V + N without data. Its noise has the standard
        deviation s = noise_multiplier * sensitivity on the diagonal, and only s / sqrt(2) in other
        entries.

        Args:
            name: As for `gaussian`.
            value: float64 array `[d, d]`, symmetric.
            sensitivity: As for `gaussian`. The l2 norm is the Frobenius norm of the whole matrix.
            part: As for `gaussian`.
        """
        noisy = self.gaussian(name, value, sensitivity, part)
        return (noisy + noisy.T) / 2

    def _count(self, name, part):
        """Counts a release, and returns its noise multiplier.

        Raises RuntimeError if the release was not planned.
        """
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
        """Returns the `tfdpx.accounting.Ledger` of all releases so far, as full-batch steps."""
        times: dict[str, int] = {}
        for (name, _), done in self._done.items():
            times[name] = max(times.get(name, 0), done)
        return self._ledger_of(times)

    def planned_ledger(self) -> Ledger:
        """Returns the `Ledger` after all planned releases."""
        return self._ledger_of({name: times for name, (_, times) in self._planned.items()})

    def _ledger_of(self, times):
        # There is one entry for each noise multiplier. Two entries of one run with the same noise
        # would count as the same steps.
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
    """Returns a `tf.function` that draws noise of shape `shape`. Eager operations would be slow."""

    def draw(seed, index):
        return noise.normal(shape, noise.fold_in(seed, index), 1.0)

    return tf.function(draw, autograph=False)


def check_tail(
    planned: Mapping[str, tuple[float, int]], values: Mapping[str, int], delta: float
) -> None:
    """Raises ValueError if delta is too small for the noise of tfdpx, which is bounded.

    The noise of tfdpx never exceeds a largest value, but accountants assume Gaussian noise. The
    reserved share of delta must cover the difference (`tfdpx.accounting.gaussian.added_delta`).

    Args:
        planned: As for `Releases`.
        values: Dict from the name of a statistic to the number of its entries, over all parts.
        delta: Float in (0, 1).
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
