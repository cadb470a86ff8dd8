"""Rules for private models of tables: which statistics to compute, and how to train.

A part of the budget pays for statistics of the columns and for a count of the labels. The rest pays
for training a linear model, or a network with one hidden layer. The choice of the model depends on
epsilon times the number of rows, by a rule that was fitted on generated tables (docs/tables.md).
All rules use only public numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from tfdpx import account
from tfdpx.accounting.ledger import EXAMPLE, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.heads.releases import Releases
from tfdpx.tables import private_adapt

HIDDEN_UNITS = 64
LINEAR, NETWORK = "linear", "network"
# The noise multiplier of the label counts, divided by the noise multiplier of other releases.
NOISE_OF_LABELS = 2
_LABELS = "labels"
# The share of the budget for all releases, in terms of mu^2 of Gaussian differential privacy.
# (Values of mu^2 add up.)
_SHARE_OF_RELEASES = 0.1
_LARGEST = 4.0  # Scaled numbers are clipped to this many standard deviations.
_NOISIEST_MEAN = 0.05  # Noise relative to the range. Noisier means are not worth their budget.
# Noise of counts relative to the number of rows. With more noise, counts cannot narrow bounds, or
# cannot find a rare label.
_NOISIEST_CELL, _NOISIEST_LABEL = 0.12, 1 / 3
_RARE_LABEL = 0.5  # A label is rare below this part of an even share: 25% for two labels.
# Ranges are found from noisy counts in bins, which are powers of two. The fullest bin of a column
# has about a third of the rows; its count must exceed the noise.
_FULLEST_BIN, _BINS = 1 / 3, 123
# Limits for epsilon times the number of rows, and the settings below and above the limits.
_NETWORK_FROM = 3_500
_FEW_STEPS_BELOW, FEW_STEPS, _STEPS = 300, 60, 180
_LARGEST_BATCH = 65_536


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a table, and the public limits of numeric columns.

    Attributes:
        arrays: Dict from a name to an array: texts `[rows]`, or float64 `[rows]` or `[rows,
            columns]`, with NaN for missing numbers.
        lower: float64 `[numbers]`, the lower limit of each numeric column; NaN if the limit must be
            found.
        upper: float64 `[numbers]`, the upper limits.
    """

    arrays: dict[str, np.ndarray]
    lower: np.ndarray
    upper: np.ndarray

    @property
    def texts(self) -> list[str]:
        """Returns the names of the columns of texts."""
        return [name for name, values in self.arrays.items() if values.dtype.kind == "U"]

    @property
    def numbers(self) -> list[str]:
        """Returns the names of the arrays of numbers."""
        return [name for name in self.arrays if name not in self.texts]

    @property
    def is_unknown(self) -> np.ndarray:
        """Returns, for each numeric column, whether a limit must be found; bool `[numbers]`."""
        return np.isnan(self.lower + self.upper)

    @property
    def is_rough(self) -> np.ndarray:
        """Returns, for each numeric column, whether its limits may be too wide; bool `[numbers]`.

        Limits of [0, 1] count as exact.
        """
        return ~self.is_unknown & ((self.lower != 0) | (self.upper != 1))

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def rows(self, places: np.ndarray) -> Columns:
        """Returns `Columns` with only the rows at the indices `places`."""
        arrays = {name: values[places] for name, values in self.arrays.items()}
        return dataclasses.replace(self, arrays=arrays)


class TooFewRows(ValueError):
    """Raised if there are too few rows to find the ranges of columns.

    Attributes:
        args: Four values: the number of rows, the number of columns, the number of rows that would
            be enough, and the epsilon that would be enough.
    """

    def __str__(self):
        rows, columns, enough, epsilon = self.args
        # For very few rows no epsilon is enough.
        larger = f", or epsilon={epsilon:g}" if epsilon < math.inf else ""
        return (
            f"{rows} rows are too few to find the ranges of {columns} columns privately, which "
            f"takes some {enough} rows{larger}. Give what is publicly known of "
            "the columns, even roughly, as `lower` and `upper`."
        )


class Preprocessing:
    """Spends a part of the budget on noisy statistics of columns and labels.

    Args:
        columns: `Columns` with one row of each person.
        num_classes: Int; 0 for a regression.
        epsilon: Float > 0, for statistics and training together.
        delta: Float in (0, 1).
        seed: Optional int for repeatable experiments.
        unit: See `PrivacyPlan`.

    Attributes:
        noise_multiplier: Float, the noise multiplier of all statistics except the label counts. The
            noise multiplier of the counts is `NOISE_OF_LABELS` times as large.
        takes_moments: Bool, whether private means and variances of numbers are taken.
        narrows: Bool, whether rough limits are narrowed first.
        counts_labels: Bool, whether labels are counted.

    Raises:
        TooFewRows: If there are too few rows to find ranges.
    """

    def __init__(self, columns, num_classes, epsilon, delta, seed=None, unit=EXAMPLE):
        self._columns, self._num_classes, self._unit = columns, num_classes, unit
        num_rows = len(columns)
        unknown, rough = int(columns.is_unknown.sum()), int(columns.is_rough.sum())
        with_limits = columns.lower.size - unknown
        budget = {"delta": delta, "accountant": "gdp"}
        plan = PrivacyPlan(num_rows, num_rows, 1, epsilon=epsilon, **budget)
        of_one = plan.noise_multiplier / math.sqrt(_SHARE_OF_RELEASES)
        releases = 2 * bool(unknown) + len(columns.texts)
        of_label = NOISE_OF_LABELS * of_one * math.sqrt(releases + 2)
        even_share = num_rows / max(num_classes, 1)
        is_clear = of_label < _NOISIEST_LABEL * _RARE_LABEL * even_share
        self.counts_labels = num_classes > 1 and is_clear
        releases += self.counts_labels / NOISE_OF_LABELS**2
        of_cell = of_one * math.sqrt((releases + 2) * rough)
        self.narrows = bool(rough) and of_cell < _NOISIEST_CELL * num_rows
        of_mean = of_one * math.sqrt((releases + 1) * 1.25 * with_limits) / (2 * num_rows)
        self.takes_moments = self.narrows or (bool(with_limits) and of_mean < _NOISIEST_MEAN)
        of_known = self.narrows + (self.takes_moments and not unknown)
        noise = self.noise_multiplier = of_one * math.sqrt(releases + of_known)
        of_bin = math.sqrt(unknown * 2 * math.log(10 * _BINS * max(unknown, 1)))
        if of_bin * noise > _FULLEST_BIN * num_rows:
            # The largest number of releases that more rows or a larger epsilon would lead to.
            most = releases + (num_classes > 1) / NOISE_OF_LABELS**2 + bool(rough)
            needed = math.ceil(of_bin * of_one * math.sqrt(most) / _FULLEST_BIN)
            enough = plan.noise_multiplier * num_rows / needed
            cost = PrivacyPlan(num_rows, num_rows, 1, noise_multiplier=enough, **budget)
            epsilon = math.ceil(10 * cost.epsilon) / 10 if cost.epsilon < math.inf else math.inf
            raise TooFewRows(num_rows, unknown, needed, epsilon)
        planned = {private_adapt.STATISTICS: (noise, 3 + len(columns.texts))}
        planned[_LABELS] = (NOISE_OF_LABELS * noise, 1)
        self._releases = Releases(planned, seed)
        self._released = private_adapt.releasing(self._releases, noise)

    def rare_shares(self, target: np.ndarray) -> np.ndarray | None:
        """Returns noisy shares of the labels `[classes]`, or None if no label was found to be rare.

        Args:
            target: Int array `[rows]`.
        """
        if not self.counts_labels:
            return None
        counts = np.bincount(target, minlength=self._num_classes).astype("float64")
        counts = self._releases.gaussian(_LABELS, counts, 1.0)
        counts = np.maximum(counts, NOISE_OF_LABELS * self.noise_multiplier)
        is_rare = np.min(counts) < _RARE_LABEL * len(target) / self._num_classes
        return counts / np.sum(counts) if is_rare else None

    def model(self) -> tuple[keras.Model, Ledger]:
        """Returns a model from the columns to features, and the ledger of all statistics.

        Rough limits are narrowed first. Then numbers are clipped to the limits, and scaled by a
        private mean and variance. If there are too few rows for these statistics, numbers are
        scaled by the limits. Frequent texts are one-hot encoded.
        """
        arrays, layers, parts = self._columns.arrays, [], []
        inputs = {}
        for place, (name, values) in enumerate(arrays.items()):
            kind = "string" if name in self._columns.texts else "float32"
            shape = values.shape[1:] or (1,)
            inputs[name] = keras.Input(shape, dtype=kind, name=f"column_{place}")
        if numbers := [inputs[name] for name in self._columns.numbers]:
            layers.append(keras.layers.Normalization())
            private_adapt.set_moments(layers[-1], *self._moments())
            scaled = layers[-1](ops.concatenate(numbers, axis=-1))
            scaled = ops.where(ops.isnan(scaled), 0.0, scaled)
            parts.append(ops.clip(scaled, -_LARGEST, _LARGEST))
        for name in self._columns.texts:
            layers.append(keras.layers.StringLookup(output_mode="one_hot"))
            private_adapt.adapt_lookup(layers[-1], arrays[name], self._released)
            parts.append(layers[-1](inputs[name]))
        entries = self._releases.ledger().entries
        ledger = Ledger(tuple(dataclasses.replace(e, unit=self._unit) for e in entries))
        for layer in layers:
            account.declare_statistics(layer, ledger)
        name = "tfdpx.preprocessing"
        return keras.Model(
            list(inputs.values()), ops.concatenate(parts, axis=-1), name=name
        ), ledger

    def _moments(self):
        """Returns the means and the variances that scale numbers, two float64 `[numbers]`."""
        columns = self._columns
        x = np.column_stack([columns.arrays[name] for name in columns.numbers])
        lower, upper, unknown = columns.lower.copy(), columns.upper.copy(), columns.is_unknown
        if unknown.any():
            part = x[:, unknown], self._released, lower[unknown], upper[unknown]
            lower[unknown], upper[unknown] = private_adapt.bounds(*part)
        if self.narrows:
            rough = columns.is_rough
            part = x[:, rough], lower[rough], upper[rough]
            lower[rough], upper[rough] = private_adapt.narrow(*part, self._released)
        mean, variance = (lower + upper) / 2, ((upper - lower) / 2) ** 2
        if (taken := unknown | self.takes_moments).any():
            part = x[:, taken], lower[taken], upper[taken]
            mean[taken], variance[taken] = private_adapt.moments(*part, self._released)
        return mean, variance


class Training(NamedTuple):
    """The choices for training a model on a table.

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
    asked: Any,
    epsilon: float,
    num_rows: int,
    spent: Ledger,
    is_regression: bool,
    rare_columns: int = 0,
    unit: str = EXAMPLE,
) -> Training:
    """Chooses a model, its plan, learning rate and clip, unless the user has set them.

    Args:
        asked: The estimator. Its arguments override the choices of this function.
        epsilon: Float > 0, the budget. If `asked.right_guesses` is set, the largest epsilon that
            it allows.
        num_rows: Int, the number of rows to train on, or of people.
        spent: The `tfdpx.accounting.Ledger` of the preprocessing.
        is_regression: Bool.
        rare_columns: Int, the number of columns if a label is rare, or 0 if no label is rare. If a
            label is rare, the clip is about the largest norm of a gradient, so few gradients are
            clipped. (Automatic clipping would give small and large errors the same weight, and the
            model would hardly ever predict the rare label.)
        unit: See `PrivacyPlan`.

    Raises:
        ValueError: If the values contradict each other.
    """
    budget = epsilon * num_rows
    name = NETWORK if callable(asked.model) or budget >= _NETWORK_FROM else LINEAR
    if asked.model in (LINEAR, NETWORK):
        name = asked.model
    steps = asked.steps or (FEW_STEPS if budget < _FEW_STEPS_BELOW else _STEPS)
    batch_size = asked.batch_size or min(num_rows, _LARGEST_BATCH)
    limits = {name: getattr(asked, name) for name in ("right_guesses", "delta", "accountant")}
    limits["epsilon"] = epsilon if asked.right_guesses is None else None
    plan = PrivacyPlan(num_rows, batch_size, steps, spent=spent, unit=unit, **limits)
    clip: float | str = "automatic"
    if is_regression:
        rate = min(_rate_of_noise(plan), 0.1)
    elif rare_columns:
        # The mean square of a column is 1, and the mean square of a hidden unit's tanh is about
        # 1/2. The error of the probabilities has a norm of at most sqrt(2).
        clip = math.sqrt(2 * (1 + (HIDDEN_UNITS / 2 if name == NETWORK else rare_columns)))
        rate = min(_rate_of_noise(plan) / 2, clip)
    elif name == NETWORK:
        rate = min(_rate_of_noise(plan), 8.0)
    else:
        rate = 2.0  # The scale of a linear model's weights does not change the predicted classes.
    clip = clip if asked.l2_norm_clip is None else asked.l2_norm_clip
    return Training(name, plan, asked.learning_rate or rate, clip)


def _rate_of_noise(plan):
    """Returns the learning rate at which the noise of all updates moves a weight by about 0.18."""
    noise = plan.noise_multiplier / plan.batch_size * math.sqrt(plan.steps)
    return 0.18 / noise if noise else math.inf
