"""Tests whether batches are Poisson samples. Batches of a fixed size or order fail the test.

Random sampling reduces the privacy loss, because an attacker does not know which examples a step
has used. The accountants compute this reduction for Poisson sampling: in each step, an independent
coin decides for each example whether it is drawn. Batches of equal size from a permutation of the
data are a different mechanism. Such a mechanism can be far less private at the same noise (Chua et
al. 2024, arXiv:2403.17673).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import scipy.stats
import tensorflow as tf

from tfdpx._arguments import check_positive_integer, require
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.audit.bounds import check_confidence


@dataclasses.dataclass(frozen=True)
class SamplingReport:
    """The result of `check_sampling`.

    Attributes:
        steps: Int, the number of batches that were examined.
        confidence: Float. Batches that are Poisson samples pass with about this probability.
        problems: Tuple of strings, the differences from Poisson sampling.
    """

    steps: int
    confidence: float
    problems: tuple[str, ...] = ()

    @property
    def passed(self):
        """Bool: whether no difference from Poisson sampling was found."""
        return not self.problems

    def __str__(self):
        verdict = "as Poisson sampling would be" if self.passed else "not what the plan counts on"
        first = f"{'PASSED' if self.passed else 'FAILED'}: {self.steps} batches are {verdict}."
        return "\n".join([first, *(f"- {problem}" for problem in self.problems)])


def check_sampling(
    plan: PrivacyPlan, batches: Any, steps: int = 200, confidence: float = 0.999
) -> SamplingReport:
    """Tests whether batches could be the Poisson samples of a plan.

    Run your input pipeline on the indices of examples in place of the examples, and pass the
    batches. The test compares three numbers with their distribution under Poisson sampling: the
    number of all drawn examples, the variance of the batch sizes, and the variance, over all
    examples, of how often an example is drawn. Batches of equal size fail the second comparison,
    and batches from a permutation the third.

    Guarantee: Poisson samples fail with a probability of about `1 - confidence`. (The two variances
    are compared with gamma distributions of the right mean and variance.) The test does not find
    dependencies that leave the three numbers unchanged.

    Args:
        plan: A `PrivacyPlan` with Poisson sampling.
        batches: Iterable of batches of indices, for example `plan.batches(ids, ids)` for
            `ids = np.arange(plan.num_examples)`. A batch is an int array [rows], or a tuple that
            begins with one. The third part of a tuple is the sample weight, 0 for an absent row.
        steps: Int, the number of batches to examine. If there are fewer, all are examined.
        confidence: Float in (0, 1).

    Returns:
        `SamplingReport`. Print it to read the result.

    Raises:
        ValueError: If the plan has another sampling, there are no batches, or a batch is not made
            of indices.

    Example:
    >>> plan = tfdpx.PrivacyPlan(500, batch_size=50, steps=40, noise_multiplier=1.0, delta=1e-5)
    >>> ids = np.arange(500)
    >>> check_sampling(plan, plan.batches(ids, ids, seed=1)).passed
    True
    >>> fixed = tf.data.Dataset.from_tensor_slices((ids, ids)).shuffle(500).batch(50).repeat(4)
    >>> check_sampling(plan, fixed).passed
    False
    """
    check_positive_integer("steps", steps)
    check_confidence(confidence)
    if plan.is_approximate:
        raise ValueError(
            f'This plan has sampling="{plan.sampling}", and calls its epsilon approximate: it '
            'does not claim Poisson sampling. Make it with sampling="poisson".'
        )
    n, q = plan.num_examples, plan.sampling_probability
    drawn = [_ids(batch, n) for _, batch in zip(range(steps), batches, strict=False)]
    require(drawn, "batches", drawn, "hold at least one batch")
    problems = []
    twice = sum(len(ids) - len(np.unique(ids)) for ids in drawn)
    if twice:
        problems.append(f"{twice} rows repeat an example of their own batch.")
    sizes = np.array([len(ids) for ids in drawn])
    often = np.bincount(np.concatenate(drawn), minlength=n)
    level = (1 - confidence) / 3
    total, trials = int(sizes.sum()), n * len(drawn)
    if scipy.stats.binomtest(total, trials, q).pvalue < level:
        problems.append(f"An example is drawn with probability {total / trials:.4g}, not {q:.4g}.")
    spreads = {"batch size": (sizes, n), "draws of an example": (often, len(drawn))}
    for name, (counts, coins) in spreads.items():
        ratio, chance = _spread(counts, coins, q)
        if chance < level:
            problems.append(
                f"The {name} varies {'too little' if ratio < 1 else 'too much'}: its variance is "
                f"{ratio:.3g} times the variance of independent coins."
            )
    return SamplingReport(len(drawn), confidence, tuple(problems))


def _ids(batch, count):
    """Returns the indices in a batch, without the indices of absent rows, as an int64 array [n]."""
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    ids = np.asarray(tf.nest.flatten(parts[0])[0])
    if len(parts) > 2 and parts[2] is not None:
        ids = ids[np.asarray(parts[2]) != 0]
    whole = ids.ndim == 1 and ids.dtype.kind in "iu"
    is_valid = whole and np.all((0 <= ids) & (ids < count))
    require(is_valid, "batches", f"{ids.dtype} of shape {ids.shape}",
            f"hold numbers of examples, ints [rows] from 0 to {count - 1}",
            " Make the batches of `ids = np.arange(plan.num_examples)`.")  # fmt: skip
    return ids.astype("int64")


def _spread(counts, coins, q):
    """Returns the variance of counts divided by the variance of Binomial(coins, q), and a p-value.

    The p-value is the probability that independent coins give a ratio that is at least as extreme.

    Args:
        counts: Int array [n], which should be samples of Binomial(coins, q).
        coins: Int, the number of coins that were tossed for each count.
        q: Float in (0, 1], the probability that a coin adds 1 to its count.
    """
    variance = coins * q * (1 - q)
    if variance == 0:
        return (1.0, 1.0) if np.all(counts == coins) else (np.inf, 0.0)
    ratio = np.mean((counts - coins * q) ** 2) / variance
    # The variance of `ratio`, from the fourth moment of the binomial distribution.
    spread = (2 + (1 - 6 * q * (1 - q)) / variance) / len(counts)
    law = scipy.stats.gamma(1 / spread, scale=spread)
    return ratio, 2 * min(law.cdf(ratio), law.sf(ratio))
