"""The noise of a head: every statistic that leaves the data passes here, and is counted.

A head says beforehand what it will release, how often and at which noise multiplier. More than that
is refused, so that no statistic can be released and not paid for.
"""

from __future__ import annotations

import collections
import functools
import math
import secrets
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx.accounting import accountants
from tfdpx.accounting.gaussian import added_delta
from tfdpx.accounting.ledger import RELEASE, Entry, Ledger
from tfdpx.heads._journal import Journal


class Releases:
    """The Gaussian releases of one fit.

    Guarantee: each release is one Gaussian mechanism under adding or removing one example, given
    all releases before it, if `sensitivity` bounds the change of its value (of all its parts
    together) in the l2 norm. What they cost together is the `ledger`'s.

    Args:
        planned: Dict from a name to `(noise_multiplier, times)`.
        seed: Optional int for repeatable experiments; None asks the operating system.
        journal: Optional `tfdpx.heads._journal.Journal`: what it has was released before, and is
            neither computed nor spent again.
    """

    def __init__(
        self,
        planned: Mapping[str, tuple[float, int]],
        seed: int | None = None,
        journal: Journal | None = None,
    ):
        self._planned, self._journal = planned, journal
        self._seed, self._seeded = noise.make_seed(seed), seed is not None
        self._done: dict[tuple[str, int], int] = {}  # (name, part) -> times
        self._drawn = 0
        self._run = secrets.randbits(52) | 1
        # (name, time) -> the run that released its last part, and whether its seed was given.
        self._runs: dict[tuple[str, int], tuple[int, bool]] = {}

    def gaussian(
        self,
        name: str,
        value: np.ndarray | Callable[[], np.ndarray],
        sensitivity: float,
        part: int = 0,
    ) -> np.ndarray:
        """`value` with independent noise N(0, (noise_multiplier sensitivity)^2) on every entry.

        Args:
            name: One of the planned names.
            value: float64 array, or a function to it that reads the data.
            sensitivity: Float, l2 bound on what one example changes, over all parts together.
            part: Int: parts of one release, such as one a class, may come one by one.

        Returns:
            float64 array.

        Raises:
            RuntimeError: If this part was released as often as planned already.
        """
        return self._released(name, value, sensitivity, part, lambda noise: noise)

    def symmetric(
        self,
        name: str,
        value: np.ndarray | Callable[[], np.ndarray],
        sensitivity: float,
        part: int = 0,
    ) -> np.ndarray:
        """A symmetric matrix with symmetric noise; arguments as of `gaussian`.

        The noise is (N + N^T) / 2 with N as in `gaussian`: of standard deviation s on the diagonal
        and s / sqrt(2) off it, half of the paper's variance. That is as private: for a symmetric
        V the released matrix is the symmetric part of V + N, the paper's release, and taking that
        part reads no data. (So the sensitivity is the Frobenius norm, of all d^2 entries.)
        """
        return self._released(name, value, sensitivity, part, lambda noise: (noise + noise.T) / 2)

    def _released(self, name, value, sensitivity, part, shaped):
        sigma = self._count(name, part)
        known = None if self._journal is None else self._journal.recall(name, part)
        if known is not None:
            self._runs[name, self._done[name, part]], value = known
            return value
        value = value() if callable(value) else value
        if self._journal is not None:
            self._journal.check_examples()
        self._runs[name, self._done[name, part]] = made = self._run, self._seeded
        if sigma:
            value = value + shaped(self._noise(value.shape, sigma * sensitivity))
        if self._journal is not None:
            self._journal.keep(name, part, made, value)
        return value

    def _count(self, name, part):
        noise_multiplier, times = self._planned[name]
        done = self._done.get((name, part), 0)
        if done >= times:
            raise RuntimeError(
                f"The statistic {name!r} was released {done} times, which is all that the budget "
                "of this head pays for. Plan it as often as it is released."
            )
        self._done[name, part] = done + 1
        self._drawn += 1
        return noise_multiplier

    def _noise(self, shape, deviation):
        seed, index = tf.constant(self._seed, tf.int64), tf.constant(self._drawn, tf.int64)
        return deviation * np.asarray(_drawing(tuple(shape))(seed, index), "float64")

    def ledger(self) -> Ledger:
        """What was released, a `tfdpx.accounting.Ledger`: steps on the full batch."""
        # By noise: entries of one run at the same noise are taken for the same steps.
        steps = collections.Counter(
            (*made, self._planned[name][0]) for (name, _), made in self._runs.items()
        )
        entries = (
            Entry(sigma, 1.0, n, run=run, seeded=seeded, kind=RELEASE)
            for (run, seeded, sigma), n in steps.items()
        )
        return Ledger(tuple(entries))


@functools.lru_cache(maxsize=64)
def _drawing(shape):
    """A graph that draws: a hundred small operations take long one by one."""

    def draw(seed, index):
        return noise.normal(shape, noise.fold_in(seed, index), 1.0)

    return tf.function(draw, autograph=False)


def check_tail(
    planned: Mapping[str, tuple[float, int]], values: Mapping[str, int], delta: float
) -> None:
    """Raises ValueError unless delta's reserve pays for the finite tail of the noise.

    Args:
        planned: As of `Releases`.
        values: Dict from a name to how many numbers a release has, over all parts.
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
