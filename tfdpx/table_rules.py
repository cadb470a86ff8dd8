"""Rules for private models of tables: the statistics to pay for, and the training to choose.

A part of the budget pays for statistics of the columns and for a count of the labels. The rest pays
for training a linear model or one hidden layer. The choice depends on epsilon times rows, by a rule
that was fitted on generated tables (docs/tables.md). All rules use public numbers only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops
from scipy.special import softmax

from tfdpx.accounting.ledger import EXAMPLE, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.heads.features import FeatureSet
from tfdpx.heads.gradients import gradient_sum
from tfdpx.heads.releases import Releases, check_tail
from tfdpx.tables import narrow, private_adapt
from tfdpx.training.optimizers import DPSGD

HIDDEN_UNITS = 64
# The noise of the label counts, as a multiple of the noise of the other releases.
NOISE_OF_LABELS = 2
# The share of the squared mu of Gaussian differential privacy, because squares of mu add up.
_SHARE_OF_RELEASES = 0.1
_LARGEST = 4.0  # Numbers are clipped to this many deviations.
_NOISIEST_MEAN = 0.05  # Relative to the range; noisier means are not worth their budget.
# Relative to the rows: noisier counts neither narrow bounds nor find a rare label.
_NOISIEST_CELL, _NOISIEST_LABEL = 0.12, 1 / 3
_RARE_LABEL = 0.5  # Relative to an even share, for example 25% for two labels.
# Ranges are found from noisy counts in bins of powers of two. The fullest bin of a column has about
# a third of the rows, and must stand out from the noise.
_FULLEST_BIN, _BINS = 1 / 3, 123
# Limits of epsilon times rows, and the values below and above them.
_NETWORK_FROM = 3_500
_FEW_STEPS_BELOW, FEW_STEPS, _STEPS = 300, 60, 180
_LARGEST_BATCH = 65_536


class TooFewRows(ValueError):
    """Raised if there are too few rows to find the ranges of columns.

    Attributes:
        rows: Int, the number of rows that would be enough.
        epsilon: Float, the epsilon that would be enough, rounded up.
    """

    def __init__(self, num_rows, num_columns, rows, epsilon):
        self.rows, self.epsilon = rows, epsilon
        super().__init__(
            f"{num_rows} rows are too few to find the ranges of {num_columns} columns privately, "
            f"which takes some {rows} rows, or epsilon={epsilon:g}. Give what is publicly known of "
            "the columns, even roughly, as `lower` and `upper`."
        )


class ReleasePlan(NamedTuple):
    """The statistics that a training pays for.

    Attributes:
        noise_multiplier: Float, for all statistics but the label counts, which have
            `NOISE_OF_LABELS` times as much.
        takes_moments: Bool, whether private means and variances of columns with bounds are taken.
        narrows: Bool, whether rough bounds are narrowed first.
        counts_labels: Bool, whether labels are counted.
    """

    noise_multiplier: float
    takes_moments: bool
    narrows: bool
    counts_labels: bool

    def releases(self, seed: int | None) -> Releases:
        """Returns the `Releases` of counts, for `number_scaling` and `rare_shares`."""
        noise = self.noise_multiplier
        planned = {"cells": (noise, 1), "labels": (NOISE_OF_LABELS * noise, 1)}
        return Releases(planned, seed)


def plan_releases(
    num_rows: int,
    epsilon: float,
    delta: float,
    *,
    unbounded: int = 0,
    bounded: int = 0,
    rough: int = 0,
    texts: int = 0,
    num_classes: int = 0,
) -> ReleasePlan:
    """Chooses the statistics to release of a table, and their noise.

    Args:
        num_rows: Int, the number of rows to train on, or of people.
        epsilon: Float > 0, for statistics and training together.
        delta: Float in (0, 1).
        unbounded: Int, the number of numeric columns without bounds.
        bounded: Int, the number of columns with bounds.
        rough: Int, the number of columns with bounds that may be too wide.
        texts: Int, the number of columns of categories.
        num_classes: Int; 0 for a regression.

    Raises:
        TooFewRows: If there are too few rows to find ranges.
    """
    budget: dict[str, Any] = {"delta": delta, "accountant": "gdp"}
    plan = PrivacyPlan(num_rows, num_rows, 1, epsilon=epsilon, **budget)
    of_one = plan.noise_multiplier / math.sqrt(_SHARE_OF_RELEASES)
    releases: float = 2 * bool(unbounded) + texts
    of_label = NOISE_OF_LABELS * of_one * math.sqrt(releases + 2)
    even_share = num_rows / max(num_classes, 1)
    counts_labels = num_classes > 1 and of_label < _NOISIEST_LABEL * _RARE_LABEL * even_share
    releases += counts_labels / NOISE_OF_LABELS**2
    of_cell = of_one * math.sqrt((releases + 2) * rough)
    narrows = bool(rough) and of_cell < _NOISIEST_CELL * num_rows
    of_mean = of_one * math.sqrt((releases + 1) * 1.25 * bounded) / (2 * num_rows)
    takes_moments = narrows or (bool(bounded) and of_mean < _NOISIEST_MEAN)
    noise_multiplier = of_one * math.sqrt(releases + takes_moments + narrows)
    if unbounded:
        of_bin = math.sqrt(unbounded * 2 * math.log(10 * _BINS * unbounded))
        if of_bin * noise_multiplier > _FULLEST_BIN * num_rows:
            # The other releases may follow with more rows or a larger epsilon.
            most = releases + (num_classes > 1) / NOISE_OF_LABELS**2 + 2 * bool(bounded)
            needed = math.ceil(of_bin * of_one * math.sqrt(most) / _FULLEST_BIN)
            enough = plan.noise_multiplier * num_rows / needed
            cost = PrivacyPlan(num_rows, num_rows, 1, noise_multiplier=enough, **budget)
            raise TooFewRows(num_rows, unbounded, needed, math.ceil(10 * cost.epsilon) / 10)
    return ReleasePlan(noise_multiplier, takes_moments, narrows, counts_labels)


def number_scaling(
    x: np.ndarray,
    lower: np.ndarray | None,
    upper: np.ndarray | None,
    rough: np.ndarray,
    plan: ReleasePlan,
    releases: Releases,
    seed: int | None,
) -> tuple[keras.layers.Normalization, Ledger]:
    """Returns a layer that centres and scales columns, and its cost in addition to `releases`.

    Columns are scaled by a private mean and variance within public bounds; rough bounds are
    narrowed first. If there are too few rows, the bounds themselves are used.

    Args:
        x: float64 `[rows, columns]`, NaN where missing.
        lower: float64 `[columns]`, public, or None to find them.
        upper: Like `lower`.
        rough: Bool array `[columns]`, whether the bounds of a column may be too wide.
        plan: The `ReleasePlan`.
        releases: Its `releases`.
        seed: Optional int for repeatable experiments.
    """
    noise = plan.noise_multiplier
    if lower is not None:
        lower, upper = np.array(lower, "float64"), np.array(upper, "float64")
        if plan.narrows:
            lower[rough], upper[rough] = narrow(
                *(x[:, rough], lower[rough], upper[rough]),
                lambda exact, bound: (releases.gaussian("cells", exact(), bound), noise * bound),
            )
        if not plan.takes_moments:
            mean, variance = (lower + upper) / 2, ((upper - lower) / 2) ** 2
            return keras.layers.Normalization(
                mean=mean.tolist(), variance=variance.tolist()
            ), Ledger()
    layer = keras.layers.Normalization()
    ledger = private_adapt(layer, x, noise_multiplier=noise, lower=lower, upper=upper, seed=seed)
    return layer, ledger


def cut_numbers(scaled: keras.KerasTensor) -> keras.KerasTensor:
    """Returns scaled numbers clipped at four deviations, with 0 for missing ones."""
    return ops.clip(ops.where(ops.isnan(scaled), 0.0, scaled), -_LARGEST, _LARGEST)


def rare_shares(
    target: np.ndarray, num_classes: int, plan: ReleasePlan, releases: Releases
) -> np.ndarray | None:
    """Returns noisy shares of the labels `[classes]`, or None if no label is known to be rare.

    Args:
        target: Int array `[rows]`.
        num_classes: Int.
        plan: The `ReleasePlan`.
        releases: Its `releases`.
    """
    if not plan.counts_labels:
        return None
    counts = np.bincount(target, minlength=num_classes).astype("float64")
    least = NOISE_OF_LABELS * plan.noise_multiplier
    counts = np.maximum(releases.gaussian("labels", counts, 1.0), least)
    is_rare = np.min(counts) < _RARE_LABEL * len(target) / num_classes
    return counts / np.sum(counts) if is_rare else None


class Training(NamedTuple):
    """The choices for the training of a model of a table.

    Attributes:
        name: "linear" or "network".
        plan: `tfdpx.PrivacyPlan`.
        learning_rate: Float.
        l2_norm_clip: Float, or "automatic".
    """

    name: str
    plan: PrivacyPlan
    learning_rate: float
    l2_norm_clip: float | str


def choose(
    num_rows: int,
    spent: Ledger,
    *,
    epsilon: float,
    delta: float,
    is_regression: bool,
    rare_columns: int | None = None,
    name: str | None = None,
    batch_size: int | None = None,
    steps: int | None = None,
    learning_rate: float | None = None,
    accountant: str = "pld",
    unit: str = EXAMPLE,
) -> Training:
    """Chooses a model, its plan, learning rate and clip, unless an argument sets them.

    Args:
        num_rows: Int, the number of rows to train on, or of people.
        spent: The `tfdpx.accounting.Ledger` of the preprocessing.
        epsilon: Float > 0, for preprocessing and training together.
        delta: Float in (0, 1).
        is_regression: Bool.
        rare_columns: Int, the number of inputs if a label is rare. The clip is then about the
            largest norm of a gradient, so that few gradients are clipped. Automatic clipping would
            weight all errors alike, and all probabilities would tend to the frequent label.
        name: "linear" or "network", or None.
        batch_size: Int, or None.
        steps: Int, or None.
        learning_rate: Float, or None.
        accountant: See `PrivacyPlan`.
        unit: See `PrivacyPlan`.

    Raises:
        ValueError: If the values contradict each other.
    """
    budget = epsilon * num_rows
    name = name or ("network" if budget >= _NETWORK_FROM else "linear")
    plan = PrivacyPlan(
        num_rows,
        batch_size or min(num_rows, _LARGEST_BATCH),
        steps or (FEW_STEPS if budget < _FEW_STEPS_BELOW else _STEPS),
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        spent=spent,
        unit=unit,
    )
    clip: float | str = "automatic"
    if is_regression:
        rate = min(_rate_of_noise(plan), 0.1)
    elif rare_columns:
        # The mean square of a column is 1, and of the tanh of a hidden unit about 1/2. The error of
        # the probabilities has a norm of at most sqrt(2).
        clip = math.sqrt(2 * (1 + (HIDDEN_UNITS / 2 if name == "network" else rare_columns)))
        rate = min(_rate_of_noise(plan) / 2, clip)
    elif name == "network":
        rate = min(_rate_of_noise(plan), 8.0)
    else:
        rate = 2.0  # A linear model predicts the same classes at any scale of its weights.
    return Training(name, plan, learning_rate or rate, clip)


def _rate_of_noise(plan):
    """Returns the rate at which the noise of all updates moves each weight by about 0.18."""
    noise = plan.noise_multiplier / plan.batch_size * math.sqrt(plan.steps)
    return 0.18 / noise if noise else math.inf


def train_linear(
    x: np.ndarray,
    y: np.ndarray,
    training: Training,
    num_classes: int,
    shares: np.ndarray | None = None,
    *,
    seed: int | None = None,
) -> tuple[keras.Model, Ledger]:
    """Trains a linear model on full batches like `train_head`, in a hundredth of the time.

    Guarantee: each update releases one sum of the gradients of all rows, clipped by
    `tfdpx.heads.gradients.gradient_sum`, with the noise of `training.plan`.

    Args:
        x: Like the following arguments, see `train_head`.
        y: Numbers outside of [-1, 1] are clipped.
        training: A `Training`; its plan has full batches.
        num_classes: Int.
        shares: Array `[classes]`, or None.
        seed: Optional int.

    Returns:
        A `keras.Model`, and the ledger of the updates and of `training.plan.spent`.
    """
    plan, clip, outputs = training.plan, training.l2_norm_clip, num_classes or 1
    # A `FeatureSet` holds targets in [0, 1].
    targets = y if num_classes else (np.clip(y, -1, 1)[:, np.newaxis] + 1) / 2
    link = functools.partial(softmax, axis=1) if num_classes else lambda values: (values + 1) / 2
    examples = FeatureSet(x, targets, outputs)
    planned = {"gradient": (plan.noise_multiplier, plan.steps)}
    weights = np.zeros([x.shape[1] + 1, outputs])
    check_tail(planned, {"gradient": weights.size}, plan.delta)
    releases = Releases(planned, seed)
    if shares is not None:
        weights[-1] = np.log(shares)
    sensitivity = 1.0 if isinstance(clip, str) else clip
    for _ in range(plan.steps):
        sums = gradient_sum(examples, weights[:-1], weights[-1], clip, link=link, use_bias=True)
        noisy = releases.gaussian("gradient", np.vstack(sums), sensitivity)
        weights -= training.learning_rate * noisy / (sensitivity * examples.count)
    inputs, last = keras.Input(x.shape[1:]), keras.layers.Dense(outputs)
    head = keras.Model(inputs, last(inputs), name="tfdpx.head")
    last.kernel.assign(weights[:-1])
    last.bias.assign(weights[-1])
    return head, plan.spent + releases.ledger()


def train_head(
    x: np.ndarray,
    y: np.ndarray,
    training: Training,
    num_classes: int,
    shares: np.ndarray | None = None,
    *,
    hidden: Callable[[keras.KerasTensor], keras.KerasTensor] | None = None,
    seed: int | None = None,
    **people: Any,
) -> tuple[keras.Model, DPSGD]:
    """Trains a model on scaled columns, and returns it with its optimizer, which holds the ledger.

    Args:
        x: float32 `[rows, features]`.
        y: Int labels `[rows]`, or numbers in about [-1, 1] for a regression.
        training: The `Training`.
        num_classes: Int; 0 for a regression.
        shares: Array `[classes]` returned by `rare_shares`, or None.
        hidden: Function from the symbolic `x` to the input of the last dense layer, or None for the
            model that `training` names.
        seed: Optional int for repeatable experiments.
        **people: `user_ids` and `examples_per_user`, see `PrivacyPlan.batches`.
    """
    inputs = values = keras.Input(x.shape[1:])
    if hidden is not None:
        values = hidden(inputs)
    elif training.name == "network":
        values = keras.layers.Dense(HIDDEN_UNITS, "tanh")(inputs)
    last = keras.layers.Dense(num_classes or 1, kernel_initializer="zeros")
    head = keras.Model(inputs, last(values), name="tfdpx.head")
    loss = "mean_squared_error"
    if num_classes:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        y = y[:, np.newaxis]
    if shares is not None:
        last.bias.assign(np.log(shares))
    plan, clip = training.plan, training.l2_norm_clip
    optimizer = DPSGD(training.learning_rate, plan=plan, l2_norm_clip=clip, seed=seed)
    # A new model of the same layers, because the file of a compiled one would hold the optimizer.
    private = keras.Model(head.input, head.output)
    private.compile(optimizer, loss)
    batches = plan.batches(x, y, optimizer=optimizer, **people)
    private.fit(batches, shuffle=False, verbose=0)
    return head, optimizer
