"""The base class of all heads: arguments, budget, fit and evaluation."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tfdpx import account, noise
from tfdpx._arguments import (
    check_positive_integer,
    exactly_one_missing,
    is_integer,
    is_number,
    require,
)
from tfdpx.accounting import accountants, calibration
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.heads import releases
from tfdpx.heads.features import FeatureSet
from tfdpx.per_example import rounding

_Head = TypeVar("_Head", bound="Head")


def optional(check: Callable[[str, Any], None]) -> Callable[[str, Any], None]:
    """Returns a check that accepts None and values that pass `check`."""
    return lambda name, value: None if value is None else check(name, value)


def positive(name: str, value: Any) -> None:
    """Checks that a value is a number above 0."""
    is_valid = is_number(value) and 0 < value < math.inf
    require(is_valid, name, value, "be a positive, finite number")


def norm_bound(name: str, value: Any) -> None:
    """Checks a bound on l2 norms."""
    is_valid = is_number(value) and value >= rounding.SMALLEST_CLIP
    require(is_valid, name, value, f"be a number >= {rounding.SMALLEST_CLIP}", " Use 1.0.")


def _budget(name, value):
    hint = " Values from 0.1 to 8 are common; math.inf trains without privacy."
    require(is_number(value) and value > 0, name, value, "be a positive number", hint)


def _classes(name, value):
    hint = " For a binary problem, use two classes." if value == 1 else ""
    require(is_integer(value, 2), name, value, "be an integer >= 2", hint)


def _finite(name, value):
    require(is_number(value) and math.isfinite(value), name, value, "be a finite number")


def _not_negative(name, value):
    is_valid = is_number(value) and 0 <= value < math.inf
    require(is_valid, name, value, "be a finite number >= 0")


@dataclasses.dataclass(eq=False)
class Head(abc.ABC):
    """A private linear classifier on fixed features; each algorithm is a subclass.

    Every head is a composition of Gaussian mechanisms on the full data. A subclass is a dataclass:
    its fields are its arguments, which the functions in `_checks` check by name. It declares its
    releases (`_releases`, `_sizes`) and computes the weights from them (`_fit`).

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        noise_multiplier: Float, instead of epsilon: the noise of each of several equal releases.
        l2_norm_clip: Float, the bound on norms.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Attributes:
        noise_multiplier: Float, computed from epsilon before `fit`.
        num_releases: Int, Gaussian releases of one fit.
        kernel, bias: float32 arrays `[d, num_classes]` and `[num_classes]`; None before `fit`.
        ledger: `tfdpx.accounting.Ledger` of all fits of this head: two fits cost twice as much.

    Raises:
        ValueError: If an argument is invalid.
    """

    num_classes: int
    epsilon: float | None = None
    delta: float = 1e-5
    _: dataclasses.KW_ONLY
    noise_multiplier: float | None = None
    l2_norm_clip: float | None = 1.0
    accountant: str = "gdp"
    seed: int | None = dataclasses.field(default=None, repr=False)

    # Functions of the name and value of an argument, for the arguments that several heads share.
    _checks: ClassVar[dict[str, Callable[[str, Any], None]]] = {
        "num_classes": _classes,
        "epsilon": optional(_budget),
        "delta": lambda name, value: accountants.check_delta(value),
        "noise_multiplier": optional(lambda name, value: accountants.check_noise_multiplier(value)),
        "l2_norm_clip": norm_bound,
        "accountant": lambda name, value: accountants.check_accountant(value),
        "seed": lambda name, value: noise.make_seed(value),
        "steps": check_positive_integer,
        "learning_rate": positive,
        "l2_regularization": optional(_not_negative),
        "alpha": positive,
        "initial_bias": _finite,
    }
    # The argument that is computed from epsilon; one of the two is left out.
    _solved: ClassVar[str] = "noise_multiplier"

    def __post_init__(self) -> None:
        self._config = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name, value in self._config.items():
            if name in self._checks:
                self._checks[name](name, value)
        vars(self).update(self._config)
        del self._config["seed"]  # It is secret.
        solved = getattr(self, self._solved)
        exactly_one_missing({"epsilon": self.epsilon, self._solved: solved})
        if solved is None:
            setattr(self, self._solved, self._solution())
        if self.epsilon == math.inf:
            self.l2_norm_clip = math.inf
        elif self.noise_multiplier and self.l2_norm_clip == math.inf:
            raise ValueError(
                "Argument `l2_norm_clip` must be finite for a private head. Received: "
                "l2_norm_clip=inf. Without privacy use epsilon=math.inf."
            )
        self.kernel: np.ndarray | None = None
        self.bias: np.ndarray | None = None
        self.ledger = Ledger()

    def _solution(self):
        if self.epsilon == math.inf:
            return 0.0
        settings = dict(steps=self.num_releases, epsilon=self.epsilon, delta=self.delta)
        return calibration.solve("noise_multiplier", settings, self.accountant)

    @property
    def num_releases(self) -> int:
        """Returns the number of Gaussian releases of one fit."""
        return sum(self._releases().values())

    @abc.abstractmethod
    def _releases(self) -> dict[str, int]:
        """Returns a dict from the name of a release to the number of times that a fit makes it."""

    @abc.abstractmethod
    def _sizes(self, dimension: int) -> dict[str, int]:
        """Returns a dict from the name of a release to the number of its noisy entries."""

    @abc.abstractmethod
    def _fit(self, examples, released):
        """Returns kernel `[d, m]` and bias `[m]`; the `FeatureSet` is read only by `Releases`."""

    def _planned(self):
        """Returns a dict from the name of a release to `(noise_multiplier, times)`."""
        return {name: (self.noise_multiplier, times) for name, times in self._releases().items()}

    def fit(
        self: _Head,
        features: ArrayLike | tf.data.Dataset,
        labels: ArrayLike | None = None,
    ) -> _Head:
        """Fits kernel and bias to private examples, and adds the cost to the ledger.

        Guarantee: (epsilon, delta)-differential privacy under adding or removing one example, for
        kernel and bias and everything that is computed from them without the data. The number of
        examples is public, as in `tfdpx.PrivacyPlan`. A row of features that is not finite counts
        as zero.

        Args:
            features: Array `[n, d]`, or a `tf.data.Dataset` of batches `(features, labels)` that
                ends and yields every example once, in any order. A dataset is read once and held
                in memory. For features that are larger than memory, pass a `np.memmap`.
            labels: Integers `[n]`, or numbers in [0, 1] `[n, num_classes]`, for example zeros and
                ones for several classes per example, or soft labels. None with a dataset.

        Returns:
            The head.

        Raises:
            ValueError: If shapes or labels do not match, or within the scope of a `tf.distribute`
                strategy with several replicas.
        """
        return self._fit_to(FeatureSet(features, labels, self.num_classes))

    def _fit_to(self, examples):
        _check_one_device()
        planned = self._planned()
        releases.check_tail(planned, self._sizes(examples.dimension), self.delta)
        released, before = releases.Releases(planned, self.seed), self.ledger
        # Every planned release counts first: an interrupt may come at any time.
        self.ledger = before + released.planned_ledger()
        try:
            kernel, bias = self._fit(examples, released)
        finally:
            about = {"delta": self.delta, "num_examples": examples.count}
            self.ledger = dataclasses.replace(before + released.ledger(), **about)
        self.kernel, self.bias = np.asarray(kernel, "float32"), np.asarray(bias, "float32")
        return self

    def epsilon_spent(self) -> float:
        """Returns the epsilon of the ledger at `delta`, a float; 0.0 before `fit`."""
        return self.ledger.epsilon(self.delta, self.accountant)

    def plan(self, num_examples: int) -> PrivacyPlan:
        """Returns the plan of one fit, for reports: `num_releases` steps on the full batch.

        Releases at different noise multipliers are shown as equal releases of the same total cost.

        Args:
            num_examples: Int.

        Raises:
            ValueError: If `num_examples` is not a positive integer.
        """
        return PrivacyPlan(
            num_examples,
            batch_size=num_examples,
            steps=self.num_releases,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            accountant=self.accountant,
        )

    def predict(self, features: ArrayLike | tf.data.Dataset) -> np.ndarray:
        """Returns scores, a float32 array `[n, num_classes]`; the predicted class has the largest.

        Args:
            features: Array `[n, d]` or a `tf.data.Dataset` of batches, with or without labels.

        Raises:
            ValueError: If the head is not fitted, or the features do not match it.
        """
        return np.concatenate([scores for scores, _ in self._scored(features, None, False)])

    def evaluate(
        self, features: ArrayLike | tf.data.Dataset, labels: ArrayLike | None = None
    ) -> dict[str, float]:
        """Measures the accuracy on examples; the result is not private.

        Args:
            features: As for `fit`.
            labels: As for `fit`.

        Returns:
            Dict with "accuracy": the share of examples for which the predicted class is one of
            their classes; for soft labels, the mean label of the predicted class.

        Raises:
            ValueError: If the head is not fitted, or features or labels do not match it.
        """
        right, count = 0, 0
        for scores, targets in self._scored(features, labels, True):
            right += np.take_along_axis(targets, scores.argmax(axis=1)[:, None], axis=1).sum()
            count += len(scores)
        return {"accuracy": float(right / count)}

    def _scored(self, features, labels, labelled):
        kernel, bias = self._fitted()
        examples = FeatureSet(features, labels, self.num_classes, labelled)
        width, must = examples.dimension, f"have a width of {len(kernel)}, like those of `fit`"
        require(width == len(kernel), "features", width, must)
        for x, targets in examples.chunks():
            yield (x @ kernel + bias).astype("float32"), targets

    def to_layer(self, name: str | None = None) -> keras.layers.Dense:
        """Returns a `keras.layers.Dense` with the fitted weights, to put on the backbone.

        The ledger follows its weights: if a tfdpx optimizer trains them later, the cost of this fit
        is in its ledger too.

        Args:
            name: Optional string, as for any layer.

        Raises:
            ValueError: If the head is not fitted.
        """
        kernel, bias = self._fitted()
        layer = keras.layers.Dense(self.num_classes, name=name)
        layer.build((None, len(kernel)))
        layer.kernel.assign(kernel)
        layer.bias.assign(bias)
        account.attach(self.ledger, layer.variables)
        return layer

    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        if self.kernel is None or self.bias is None:
            raise ValueError(f"This {type(self).__name__} has no weights yet: call `fit` first.")
        return self.kernel, self.bias

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the constructor without the seed, which is secret."""
        return dict(self._config)

    @classmethod
    def from_config(cls: type[_Head], config: Mapping[str, Any]) -> _Head:
        """Returns a head made from `get_config`, which is not fitted.

        Args:
            config: Dict from names of arguments to values.

        Raises:
            ValueError: If an argument is invalid.
        """
        return cls(**config)


def _plain(value):
    """Returns an argument with NumPy numbers converted to Python numbers."""
    return value.item() if isinstance(value, np.generic) else value


def _check_one_device():
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "A head is fitted on one device. Received: a scope of "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas. Call `fit` "
            "outside of the scope; a head takes only seconds."
        )
