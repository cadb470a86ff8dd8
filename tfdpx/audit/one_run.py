"""Audits a training by an attack on canaries (artificial examples) in the training data.

A coin decides for each canary whether it is in the data, and the attack guesses the coins. The
method is from Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run"
(arXiv:2305.08846), in its black-box form: the attack uses the model before and after training.
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

# By default, several numbers of guesses are tried: the number of canaries divided by each of these.
_PARTS = (1, 2, 4, 8)
_FEWEST = 10


@dataclasses.dataclass(frozen=True)
class OneRunReport:
    """The result of `OneRunAudit`.

    Attributes:
        canaries: Int, the number of canaries, in the data or left out.
        guesses: Int, the number of guesses about canaries.
        correct: Int, the number of right guesses.
        epsilon: Float, the epsilon of the optimizer's ledger; infinity without a ledger.
        epsilon_lower_bound: Float. With the given confidence, the true epsilon is at least this.
        gdp_epsilon_lower_bound: Float, a tighter lower bound for a mechanism that is mu-GDP for
            some mu. It is valid for full batches, and an estimate for sampled batches.
        delta: Float, the delta of all three epsilons.
        confidence: Float in (0, 1), the confidence of both lower bounds.
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
        """Bool: whether the lower bound is at most the epsilon of the ledger."""
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
    """Returns the `OneRunReport` of an attack's scores.

    With g guesses, the attack guesses that the g/2 canaries with the highest scores were in the
    data, and that the g/2 canaries with the lowest scores were not.

    Args:
        scores: Float array [m], the score of each canary, which is high if the attack takes it for
            a member. The attack must not use the coins.
        included: Bool array [m], the coins: whether each canary was in the data.
        delta: Float in (0, 1).
        epsilon: Float, the epsilon of the ledger.
        confidence: Float in (0, 1).
        guesses: Optional int in [2, m], chosen without the coins. With None, the function tries m,
            m / 2, m / 4 and m / 8, and divides the allowed probability of an error among these
            four.

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
    # Raises an error for NaN, and if all coins are equal.
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
    """A callback that audits a training by canaries (artificial examples) in the training data.

    A fair coin decides whether each canary is in the data. The attack knows the canaries, and the
    model before and after training, but not the coins. It guesses that the canaries with the
    largest decrease of the loss were in the data. The number of right guesses gives a lower bound
    on epsilon (`one_run_epsilon_lower_bound`).

    The ledger treats canaries as examples: each canary is a row of the data and counts in
    `num_examples` and in the sampling probability, and the model learns from it. A canary that is
    left out is a row with a sample weight of zero, which tfdpx treats as absent, so the number of
    rows does not reveal the coins. If accuracy matters, at most a few percent of the data should
    be canaries. Examples with wrong labels are good canaries.

    Guarantee: as for `one_run_epsilon_lower_bound`, if the coins are secret until the scores are
    computed. The attack is weak, so a low bound does not prove privacy. Losses are measured when
    the first `fit` with this callback begins, and when the last one ends. A program that resumes a
    training must use the same `seed`. Its audit attacks only the part of the training after the
    resume.

    Args:
        x: Array [m, ...], or a nested structure of arrays: the canaries, with the shape of the
            model's inputs. Use at least a few hundred. With 50 canaries, the bound is at most 2.8.
        y: Array [m, ...], or a nested structure of arrays: the targets of the canaries.
        delta: Optional float in (0, 1). Defaults to the delta of the optimizer's plan, or 1e-5.
        confidence: Float in (0, 1).
        guesses: Optional int, as for `one_run_report`.
        seed: Optional int for the coins. With None the operating system draws them.

    Raises:
        ValueError: If an argument is out of range. Also in `fit`, if the training data do not end
            with the canaries. (Only data in memory are checked, for example arrays in
            `plan.batches`.)

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
        """Bool array [m], whether each canary is in the data. Keep it secret from the attack."""
        return self._coins.copy()

    @property
    def scores(self) -> np.ndarray:
        """float64 array [m], the decrease of each canary's loss; None before training."""
        return None if self._after is None else self._before - self._after

    def insert(self, x: Any, y: Any, sample_weight: Any = None) -> tuple:
        """Returns the data to train on: the user's examples, followed by the canaries.

        Args:
            x: Array [n, ...] or nested structure of arrays, like the canaries.
            y: Array [n, ...] or nested structure of arrays, the targets.
            sample_weight: Optional float array [n]. Defaults to ones.

        Returns:
            Tuple `(x, y, sample_weight)` with n + m rows, for `plan.batches` or `fit`. Canaries
            have the sample weight 1, or 0 if their coin left them out.
        """
        rows = len(tf.nest.flatten(x)[0])
        weights = np.ones([rows]) if sample_weight is None else np.asarray(sample_weight)
        self._rows = rows
        return (
            *(tf.nest.map_structure(_joined, *pair) for pair in ((x, self._x), (y, self._y))),
            np.concatenate([weights, self._coins]).astype("float32"),
        )

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Measures the canaries' losses when the first training begins."""
        if self._rows is None:
            raise ValueError(
                "No canary is in the data. Train on the result of `insert`: "
                "`x, y, sample_weight = audit.insert(x, y)`."
            )
        self._check_data()
        if self._before is None:
            self._before = example_losses(self.model, self._x, self._y)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Measures the canaries' losses again, after the training."""
        self._after = example_losses(self.model, self._x, self._y)

    def report(self) -> OneRunReport:
        """Returns the `OneRunReport` of the training.

        Raises:
            RuntimeError: If no training with this callback has ended.
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
        """Raises ValueError if the training data are in memory and do not end with the canaries."""
        optimizer = model_internals.innermost(self.model.optimizer)
        draws = getattr(getattr(optimizer, "session", None), "draws", None)
        if draws is None or draws.examples is None:
            return
        unit = EXAMPLE if draws.plan is None else draws.plan.unit
        require(unit == EXAMPLE, "plan.unit", unit, "be of examples, as canaries are")
        examples, count = draws.examples, self._rows + self._count
        same = examples.count == count
        if same:  # If the last sample weights equal the coins, these are hardly other data.
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
