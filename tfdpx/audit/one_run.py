"""Audits one training: coins put canaries into the data, and an attack guesses the coins.

After Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run"
(arXiv:2305.08846), in its black-box form: the attack sees the model before and after training.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdpx._arguments import is_integer, require
from tfdpx._keras import model_internals
from tfdpx.accounting.accountants import check_delta
from tfdpx.accounting.ledger import EXAMPLE
from tfdpx.audit.bounds import (
    check_confidence,
    epsilon_of_mu,
    one_run_epsilon_lower_bound,
    one_run_mu_lower_bound,
)
from tfdpx.audit.membership import MembershipReport, example_losses, membership_report
from tfdpx.training.private_optimizer import PrivateOptimizer

# Numbers of guesses that are tested by default, as fractions of the canaries.
_PARTS = (1, 2, 4, 8)
_FEWEST = 10


@dataclasses.dataclass(frozen=True)
class OneRunReport:
    """The leakage of canaries in one training.

    Attributes:
        canaries: Int, canaries that were inserted or left out.
        guesses: Int, number of guessed coins.
        correct: Int, number of right guesses.
        epsilon: Float, by the account; infinity without one.
        epsilon_lower_bound: Float; the true epsilon is at least this, with this confidence.
        gdp_epsilon_lower_bound: Float, the same for a mechanism that is mu-GDP for some mu. Exact
            for full batches; an estimate for sampled ones.
        delta: Float, of all three.
        confidence: Float.
        membership: `MembershipReport` of the canaries' scores.
    """

    canaries: int
    guesses: int
    correct: int
    epsilon: float
    epsilon_lower_bound: float
    gdp_epsilon_lower_bound: float
    delta: float
    confidence: float
    membership: MembershipReport

    @property
    def passed(self):
        """Bool: no finding contradicts the account."""
        return self.epsilon_lower_bound <= self.epsilon

    def __str__(self):
        verdict = "PASSED" if self.passed else "FAILED"
        account = f"{verdict}: epsilon {self.epsilon:.4g} by the account"
        if math.isinf(self.epsilon):
            account = "NOT PRIVATE by any account"
        return (
            f"{account} (delta={self.delta:.3g}); one training shows at least "
            f"{self.epsilon_lower_bound:.4g}, with {self.confidence:.4%} confidence "
            f"({self.gdp_epsilon_lower_bound:.4g} if it is Gaussian DP).\n"
            f"{self.correct} of {self.guesses} guesses were right, of {self.canaries} canaries.\n"
            f"{self.membership}"
        )


def one_run_report(scores, included, delta, epsilon=math.inf, confidence=0.95, guesses=None):
    """Returns the report on an attack's scores of canaries that fair coins included or left out.

    The half of the guesses with the highest scores are "in", those with the lowest "out".

    Args:
        scores: Array of floats [m], high for canaries that were in the data.
        included: Bool array [m], the coins; the scores must not depend on them.
        delta: Float in (0, 1).
        epsilon: Float, by the account.
        confidence: Float in (0, 1).
        guesses: Optional int in [2, m], chosen without the coins. None tests all canaries, a half,
            a quarter and an eighth, and splits the confidence between them.

    Returns:
        `OneRunReport`.

    Raises:
        ValueError: If an argument is out of range, or all coins were equal.

    Example:
    >>> coins = np.arange(200) % 2 == 0
    >>> one_run_report(coins * 1.0, coins, delta=1e-5).correct
    200
    """
    scores, included = np.asarray(scores, "float64"), np.asarray(included)
    is_valid = included.dtype == bool and included.ndim == 1 and scores.shape == included.shape
    shapes = f"{included.dtype} {included.shape} for scores of shape {scores.shape}"
    require(is_valid, "included", shapes, "be a bool array [m] like `scores`")
    check_delta(delta)
    check_confidence(confidence)
    # Refuses NaN, and coins that were all equal.
    membership = membership_report(scores[included], scores[~included])
    m = len(scores)
    counts = [m // part for part in _PARTS if part == 1 or m // part >= _FEWEST]
    if guesses is not None:
        is_valid = is_integer(guesses, 2) and guesses <= m
        require(is_valid, "guesses", guesses, f"be an int from 2 to the {m} canaries")
        counts = [guesses]
    confidence_of_each = 1 - (1 - confidence) / len(counts)
    order = np.argsort(-scores, kind="stable")
    bounds = []
    for count in counts:
        high = included[order[: count // 2]]
        low = included[order[m - (count - count // 2) :]]
        correct = int(high.sum() + (~low).sum())
        bound = one_run_epsilon_lower_bound(correct, count, m, delta, confidence_of_each)
        mu = one_run_mu_lower_bound(correct, count, m, confidence_of_each)
        bounds.append((bound, mu, correct, count))
    bound, _, correct, count = max(bounds)
    epsilons = epsilon, bound, epsilon_of_mu(max(mu for _, mu, *_ in bounds), delta)
    return OneRunReport(m, count, correct, *epsilons, delta, confidence, membership)


class OneRunAudit(keras.callbacks.Callback):
    """Audits the training that it is a callback of, with canaries in the data.

    Each canary is in the data or not by a fair coin. The attack knows the canaries and the model
    before and after, but not the coins. It takes the canaries with the largest drop in loss to be
    trained on. The number of right guesses bounds epsilon from below
    (`one_run_epsilon_lower_bound`).

    The canaries are part of the data that the account covers. Each has a row, and counts in
    `num_examples`, in the sampling probability and in the data that the model learns from. A canary
    that is left out has a sample weight of zero, which is how tfdpx leaves out an example, so the
    number of rows reveals nothing about the coins. If accuracy matters, use at most a few percent
    of the data. Examples with wrong labels make good canaries.

    Guarantee: the same as `one_run_epsilon_lower_bound`, if the coins stay secret until the scores
    are computed. The attack is a weak one, so a low bound is no proof of privacy. Losses are
    measured when the first `fit` with this callback begins and when the last one ends. A program
    that resumes a training needs the same `seed` as before, and attacks only the part it has seen.

    Args:
        x: Nest of arrays [m, ...], canaries with the shape of the examples and of the model's
            inputs. Use at least a few hundred; 50 right guesses of 50 show epsilon 2.8 at most.
        y: Nest of arrays [m, ...], their targets.
        delta: Optional float in (0, 1). Defaults to the optimizer's plan's, or 1e-5.
        confidence: Float in (0, 1).
        guesses: Optional int, as for `one_run_report`.
        seed: Optional int for the coins. None takes them from the operating system.

    Raises:
        ValueError: If an argument is out of range. In `fit`, if the training data do not end with
            the canaries' sample weights (if they are visible, for example in `plan.batches` of
            arrays).

    Example:
    >>> audit = OneRunAudit(9 * np.eye(40, dtype="float32"), np.arange(40) % 2, seed=1)
    >>> x, y, sample_weight = audit.insert(np.zeros([60, 40], "float32"), np.arange(60) % 2)
    >>> x.shape, y.shape, sample_weight.shape
    ((100, 40), (100,), (100,))
    >>> model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(2)])
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> model.compile(keras.optimizers.SGD(0.3), loss, jit_compile=False)
    >>> history = model.fit(x, y, 100, 30, sample_weight=sample_weight, callbacks=audit, verbose=0)
    >>> audit.report().epsilon_lower_bound > 1.0
    True
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        delta: float | None = None,
        confidence: float = 0.95,
        guesses: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        lengths = {len(leaf) for leaf in tf.nest.flatten((x, y))}
        require(len(lengths) == 1 and min(lengths) >= 2, "x", f"lengths {sorted(lengths)}",
                "and `y` hold arrays of one length, at least 2")  # fmt: skip
        if delta is not None:
            check_delta(delta)
        check_confidence(confidence)
        self._x, self._y, self._count = x, y, lengths.pop()
        self._delta, self._confidence, self._guesses = delta, confidence, guesses
        self._coins = np.random.default_rng(seed).integers(0, 2, self._count) == 1
        self._rows: int | None = None
        self._before: np.ndarray | None = None
        self._after: np.ndarray | None = None

    @property
    def included(self) -> np.ndarray:
        """Bool array [m]: the coins. Secret until the scores are computed."""
        return self._coins.copy()

    @property
    def scores(self) -> np.ndarray:
        """float64 [m]: the decrease of each canary's loss, or None before training."""
        return None if self._after is None else self._before - self._after

    def insert(self, x: Any, y: Any, sample_weight: Any = None) -> tuple:
        """Returns the data to train on: `x` and `y` followed by the canaries.

        Args:
            x: Nest of arrays [n, ...], like the canaries.
            y: Nest of arrays [n, ...].
            sample_weight: Optional array of floats [n]; 1 without it.

        Returns:
            `(x, y, sample_weight)` of n + m rows, for `plan.batches` or `fit`. Canaries that are
            left out have sample weight 0, the others 1.
        """
        rows = len(tf.nest.flatten(x)[0])
        weights = np.ones([rows]) if sample_weight is None else np.asarray(sample_weight)
        self._rows = rows
        return (
            *(tf.nest.map_structure(_joined, *pair) for pair in ((x, self._x), (y, self._y))),
            np.concatenate([weights, self._coins]).astype("float32"),
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Measures the canaries' losses, when training first begins."""
        if self._rows is None:
            raise ValueError(
                "No canary is in the data. Train on the result of `insert`: "
                "`x, y, sample_weight = audit.insert(x, y)`."
            )
        self._check_data()
        if self._before is None:
            self._before = example_losses(self.model, self._x, self._y)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Measures the losses again."""
        self._after = example_losses(self.model, self._x, self._y)

    def report(self) -> OneRunReport:
        """Returns the `OneRunReport` of the training.

        Raises:
            RuntimeError: If there was no training.
        """
        if self._after is None:
            raise RuntimeError("There is nothing to report before `fit` has ended with this audit.")
        optimizer, delta = model_internals.innermost(self.model.optimizer), self._delta
        plan, epsilon = getattr(optimizer, "plan", None), math.inf
        if delta is None:
            delta = 1e-5 if plan is None else plan.delta
        if isinstance(optimizer, PrivateOptimizer):
            accountants = [] if plan is None else [plan.accountant]
            epsilon = optimizer.ledger.composed_epsilon(delta, *accountants)
        return one_run_report(
            self.scores, self._coins, delta, epsilon, self._confidence, self._guesses
        )

    def _check_data(self):
        """Refuses draws of data that do not end with the canaries, if the data are visible."""
        optimizer = model_internals.innermost(self.model.optimizer)
        draws = getattr(getattr(optimizer, "session", None), "draws", None)
        if draws is None or draws.examples is None:
            return
        unit = EXAMPLE if draws.plan is None else draws.plan.unit
        require(unit == EXAMPLE, "plan.unit", unit, "be of examples, as canaries are")
        examples, count = draws.examples, self._rows + self._count
        same = examples.count == count
        if same:  # The coins mark the canaries: no other data have these weights.
            rows = tf.range(self._rows, count, dtype=tf.int64)
            same = np.array_equal(examples.batch(rows, self._count)[2] > 0, self._coins)
        if not same:
            raise ValueError(
                "The data do not end with the canaries of this audit. Make the batches from the "
                "result of `insert`: `plan.batches(x, y, sample_weight)`, with "
                f"num_examples={count}. Received: batches of {examples.count} examples."
            )


def _joined(examples, canaries):
    examples = np.asarray(examples)
    return np.concatenate([examples, np.asarray(canaries, examples.dtype)])
