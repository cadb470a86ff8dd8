"""The base class of all heads: it checks arguments, plans the budget, fits and evaluates."""

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
    """Returns a check of an argument that accepts None and all values that `check` accepts.

    Args:
        check: Function that takes the name and the value of an argument, and raises ValueError if
            the value is invalid.
    """
    return lambda name, value: None if value is None else check(name, value)


def positive(name: str, value: Any) -> None:
    """Raises ValueError unless `value`, an argument called `name`, is a finite number > 0."""
    is_valid = is_number(value) and 0 < value < math.inf
    require(is_valid, name, value, "be a positive, finite number")


def norm_bound(name: str, value: Any) -> None:
    """Raises ValueError unless `value`, an argument called `name`, is a valid bound on norms."""
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
    """The base class of private linear classifiers on fixed features.

    A head is a composition of Gaussian mechanisms on the full data. Each subclass is a dataclass
    that implements one algorithm. Its fields are the arguments of the algorithm. `_checks` has, for
    each argument, a function that checks the value. The subclass declares its releases
    (`_releases`, `_sizes`) and computes the weights from them (`_fit`).

    Args:
        num_classes: Int, the number of classes.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        noise_multiplier: Float, instead of epsilon: the noise multiplier of each release.
        l2_norm_clip: Float, the norm to which features or gradients are clipped.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments. The noise of a known seed gives no privacy.

    Attributes:
        noise_multiplier: Float, which is computed from epsilon before `fit`.
        num_releases: Int, the number of Gaussian releases in one fit.
        kernel, bias: float32 arrays `[d, num_classes]` and `[num_classes]`; None before `fit`.
        ledger: `tfdpx.accounting.Ledger` of all fits of this head. Each fit adds its cost.

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

    # From an argument to a function that takes its name and value, and raises ValueError if the
    # value is invalid.
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
    # The argument that is computed from epsilon. Users pass either this argument or epsilon.
    _solved: ClassVar[str] = "noise_multiplier"

    def __post_init__(self) -> None:
        self._config = {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        for name, value in self._config.items():
            if name in self._checks:
                self._checks[name](name, value)
        vars(self).update(self._config)
        del self._config["seed"]  # The seed is secret.
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
        """Int, the number of Gaussian releases in one fit."""
        return sum(self._releases().values())

    @abc.abstractmethod
    def _releases(self) -> dict[str, int]:
        """Returns a dict from the name of a statistic to the number of its releases in one fit."""

    @abc.abstractmethod
    def _sizes(self, dimension: int) -> dict[str, int]:
        """Returns a dict from the name of a statistic to its number of noisy entries.

        Args:
            dimension: Int, d, the number of features of an example.
        """

    @abc.abstractmethod
    def _fit(self, examples, released):
        """Fits the head. Returns the kernel `[d, num_classes]` and the bias `[num_classes]`.

        Guarantee: a subclass uses statistics of `examples` only after `released` has added noise.

        Args:
            examples: `FeatureSet`, the private examples.
            released: `Releases` of the statistics that `_releases` declares.
        """

    def _planned(self):
        """Returns a dict from a statistic's name to its noise multiplier and number of releases."""
        return {name: (self.noise_multiplier, times) for name, times in self._releases().items()}

    def fit(
        self: _Head,
        features: ArrayLike | tf.data.Dataset,
        labels: ArrayLike | None = None,
    ) -> _Head:
        """Fits the kernel and the bias to private examples, and adds the cost to the ledger.

        Guarantee: kernel and bias, and everything that is computed from them without the data, are
        (epsilon, delta)-differentially private for adding or removing one example. The number of
        examples is public, as in `tfdpx.PrivacyPlan`. An example with features that are not finite
        counts as zero.

        Args:
            features: Array `[n, d]`, or a finite `tf.data.Dataset` of batches `(features, labels)`
                that yields every example exactly once, in any order. The dataset is read only once
                and held in memory. For features that are larger than memory, pass a `np.memmap`.
            labels: Integers `[n]`, or numbers in [0, 1] `[n, num_classes]`, for example soft
                labels, or zeros and ones if an example has several classes. None with a dataset.

        Returns:
            The head itself.

        Raises:
            ValueError: If shapes or labels do not match, or if the call is within the scope of a
                `tf.distribute` strategy with several replicas.
        """
        return self._fit_to(FeatureSet(features, labels, self.num_classes))

    def _fit_to(self, examples):
        _check_one_device()
        planned = self._planned()
        releases.check_tail(planned, self._sizes(examples.dimension), self.delta)
        released, before = releases.Releases(planned, self.seed), self.ledger
        # All planned releases are counted first, because the fit may be interrupted at any time.
        self.ledger = before + released.planned_ledger()
        try:
            kernel, bias = self._fit(examples, released)
        finally:
            about = {"delta": self.delta, "num_examples": examples.count}
            self.ledger = dataclasses.replace(before + released.ledger(), **about)
        self.kernel, self.bias = np.asarray(kernel, "float32"), np.asarray(bias, "float32")
        return self

    def epsilon_spent(self) -> float:
        """Returns the epsilon of all fits so far at `delta`, a float; 0.0 before `fit`."""
        return self.ledger.epsilon(self.delta, self.accountant)

    def plan(self, num_examples: int) -> PrivacyPlan:
        """Returns the plan of one fit, for reports: `num_releases` steps with full batches.

        If releases have different noise multipliers, the plan has equal releases with the same
        total cost.

        Args:
            num_examples: Int, the number of private examples.

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
        """Returns the scores of all classes. The class with the largest score is the prediction.

        Args:
            features: Array `[n, d]` or a `tf.data.Dataset` of batches, with or without labels.

        Returns:
            float32 array `[n, num_classes]`.

        Raises:
            ValueError: If the head is not fitted, or the features do not match it.
        """
        return np.concatenate([scores for scores, _ in self._scored(features, None, False)])

    def evaluate(
        self, features: ArrayLike | tf.data.Dataset, labels: ArrayLike | None = None
    ) -> dict[str, float]:
        """Returns the accuracy on examples, computed without noise.

        Args:
            features: As for `fit`.
            labels: As for `fit`.

        Returns:
            Dict with "accuracy": the share of examples whose predicted class is one of their true
            classes. For soft labels, this is the mean label of the predicted class.

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

        The ledger belongs to these weights: if a tfdpx optimizer trains them later, the optimizer's
        ledger includes the cost of this fit.

        Args:
            name: Optional string, the name of the layer.

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
        """Returns a dict of the constructor's arguments, without the seed, which is secret."""
        return dict(self._config)

    @classmethod
    def from_config(cls: type[_Head], config: Mapping[str, Any]) -> _Head:
        """Returns a new head, which is not fitted, from the dict that `get_config` returned.

        Args:
            config: Dict from names of arguments to values.

        Raises:
            ValueError: If an argument is invalid.
        """
        return cls(**config)


def _plain(value):
    """Returns `value`. A NumPy number is converted to a Python number."""
    return value.item() if isinstance(value, np.generic) else value


def _check_one_device():
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "A head is fitted on one device. Received: a scope of "
            f"{type(strategy).__name__} with {strategy.num_replicas_in_sync} replicas. Call `fit` "
            "outside of the scope; a head takes only seconds."
        )
