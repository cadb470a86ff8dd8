"""What all heads share: arguments, the budget, the fit, and what a fitted head can do."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tfdpx import account, noise
from tfdpx._arguments import exactly_one_missing, require
from tfdpx.accounting import accountants, calibration
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.heads import _fields, releases
from tfdpx.heads._feature_source import FeatureSource
from tfdpx.heads._fields import argument, optional
from tfdpx.heads._journal import Journal
from tfdpx.training.checkpoint import Checkpoint

ROWS = 8192
_Head = TypeVar("_Head", bound="Head")


@dataclasses.dataclass(eq=False)
class Head(abc.ABC):
    """A private linear classifier on fixed features; each kind is a subclass.

    All are compositions of Gaussian mechanisms on the full data. A subclass is a dataclass whose
    fields are its arguments, and says what it releases (`_releases`, `_sizes`) and how (`_fit`).

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        noise_multiplier: Float, in place of epsilon: of each of equal releases.
        l2_norm_clip: Float, the bound on norms.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Attributes:
        noise_multiplier: Float, solved from epsilon before `fit`.
        num_releases: Int, Gaussian releases of one fit.
        kernel, bias: float32 arrays `[d, num_classes]` and `[num_classes]`; None before `fit`.
        ledger: `tfdpx.accounting.Ledger` of all fits of this head: two fits spend twice.

    Raises:
        ValueError: If an argument does not fit.
    """

    num_classes: int = dataclasses.field(metadata={"check": _fields.classes})
    epsilon: float | None = argument(None, optional(_fields.budget))
    delta: float = argument(1e-5, lambda name, value: accountants.check_delta(value))
    _: dataclasses.KW_ONLY
    noise_multiplier: float | None = argument(
        None, optional(lambda name, value: accountants.check_noise_multiplier(value))
    )
    l2_norm_clip: float | None = argument(1.0, _fields.norm_bound)
    accountant: str = argument("gdp", lambda name, value: accountants.check_accountant(value))
    seed: int | None = argument(None, lambda name, value: noise.make_seed(value), repr=False)

    # The argument that epsilon gives; one of the two is left out.
    _solved = "noise_multiplier"

    def __post_init__(self) -> None:
        self._config = _fields.checked(self)
        vars(self).update(self._config)
        del self._config["seed"]  # Secret.
        given = getattr(self, self._solved)
        exactly_one_missing({"epsilon": self.epsilon, self._solved: given})
        if given is None:
            setattr(self, self._solved, self._solution())
        if self.noise_multiplier and self.l2_norm_clip == math.inf:
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
        known = dict(steps=self.num_releases, epsilon=self.epsilon, delta=self.delta)
        return calibration.solve("noise_multiplier", known, self.accountant)

    @property
    def num_releases(self) -> int:
        """Int, Gaussian releases of one fit."""
        return sum(self._releases().values())

    @abc.abstractmethod
    def _releases(self) -> dict[str, int]:
        """Dict from the name of a release to how often a fit makes it."""

    @abc.abstractmethod
    def _sizes(self, dimension: int) -> dict[str, int]:
        """Dict from the name of a release to how many numbers get noise in it."""

    @abc.abstractmethod
    def _fit(self, examples, released):
        """Kernel `[d, m]` and bias `[m]`, from a `FeatureSource` through `Releases` alone."""

    def _planned(self):
        """Dict from the name of a release to `(noise_multiplier, times)`."""
        return {name: (self.noise_multiplier, times) for name, times in self._releases().items()}

    def _public_facts(self) -> Mapping[str, Any]:
        """Dict of JSON values: what else a fit must share to continue from another's releases."""
        return {}

    def fit(
        self: _Head,
        features: ArrayLike | tf.data.Dataset,
        labels: ArrayLike | None = None,
        *,
        checkpoint: Checkpoint | None = None,
    ) -> _Head:
        """Fits kernel and bias to private examples, once, and counts what that spends.

        Guarantee: (epsilon, delta)-differential privacy under adding or removing one example, for
        kernel and bias and all that is computed from them without the data. The number of
        examples is public, as in `tfdpx.PrivacyPlan`. A row of features that is not finite counts
        as zero.

        Args:
            features: Array `[n, d]`, or a `tf.data.Dataset` of batches `(features, labels)` that
                ends and gives every example once, in any order. It is read once a pass, and never
                held in memory.
            labels: Integers `[n]`, or zeros and ones `[n, num_classes]`. None with a dataset.
            checkpoint: Optional `tfdpx.callbacks.Checkpoint`. What is released is written to its
                folder; an interrupted fit, called again with the same, continues from there at the
                same epsilon. The folder holds only noisy values, which the guarantee covers. Of
                the data, number and width alone are compared.

        Returns:
            The head.

        Raises:
            TypeError: If `checkpoint` is not a `Checkpoint`.
            ValueError: If shapes or labels do not fit, or the checkpoint is damaged or of another
                head.
        """
        return self._fit_to(FeatureSource(features, labels, self.num_classes), checkpoint)

    def _fit_to(self, examples, checkpoint):
        planned, journal = self._planned(), None
        releases.check_tail(planned, self._sizes(examples.dimension), self.delta)
        with contextlib.ExitStack() as stack:
            if checkpoint is not None:
                head = {"class": type(self).__name__, "width": examples.dimension}
                head |= {**self.get_config(), **self._public_facts()}
                journal = stack.enter_context(Journal(checkpoint, head, examples))
            released = releases.Releases(planned, self.seed, journal)
            try:
                kernel, bias = self._fit(examples, released)
            finally:
                self.ledger += released.ledger()
        self.kernel, self.bias = np.asarray(kernel, "float32"), np.asarray(bias, "float32")
        return self

    def epsilon_spent(self) -> float:
        """The epsilon of the ledger at `delta`, a float: 0.0 before `fit`."""
        return self.ledger.epsilon(self.delta, self.accountant)

    def plan(self, num_examples: int) -> PrivacyPlan:
        """The `tfdpx.PrivacyPlan` of one fit, for reports: `num_releases` steps on the full batch.

        Releases at different noise multipliers stand there as equal ones of the same cost.

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
        """Scores, a float32 array `[n, num_classes]`: the predicted class has the largest.

        Args:
            features: Array `[n, d]` or a `tf.data.Dataset` of batches, with or without labels.

        Raises:
            ValueError: If the head is not fitted, or the features do not fit.
        """
        return np.concatenate([scores for scores, _ in self._scored(features, None, False)])

    def evaluate(
        self, features: ArrayLike | tf.data.Dataset, labels: ArrayLike | None = None
    ) -> dict[str, float]:
        """Measures the head on examples; the result is not private.

        Args:
            features: As for `fit`.
            labels: As for `fit`.

        Returns:
            Dict with "accuracy": the share of examples whose predicted class is one of theirs.

        Raises:
            ValueError: If the head is not fitted, or features or labels do not fit.
        """
        right, count = 0, 0
        for scores, targets in self._scored(features, labels, True):
            right += np.take_along_axis(targets, scores.argmax(axis=1)[:, None], axis=1).sum()
            count += len(scores)
        return {"accuracy": float(right / count)}

    def _scored(self, features, labels, labelled):
        kernel, bias = self._fitted()
        examples = FeatureSource(features, labels, self.num_classes, labelled)
        width, must = examples.dimension, f"have a width of {len(kernel)}, as those of `fit`"
        require(width == len(kernel), "features", width, must)
        for x, targets in examples.chunks(ROWS):
            yield tf.matmul(x, kernel).numpy() + bias, targets

    def to_layer(self, name: str | None = None) -> keras.layers.Dense:
        """A `keras.layers.Dense` with the fitted weights, to put on the backbone.

        Its weights remember what they cost: a tfdpx optimizer that trains them has it in its
        ledger.

        Args:
            name: Optional string, as of any layer.

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
        """Arguments of the constructor, but the seed, which is secret."""
        return dict(self._config)

    @classmethod
    def from_config(cls: type[_Head], config: Mapping[str, Any]) -> _Head:
        """The head of `get_config`, not fitted.

        Args:
            config: Dict from names of arguments to values.

        Raises:
            ValueError: If an argument does not fit.
        """
        return cls(**config)
