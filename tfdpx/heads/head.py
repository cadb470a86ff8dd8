"""What all heads share: the budget, the fit, and what a fitted head can do."""

import abc
import contextlib
import math

import keras
import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx._arguments import is_number, require
from tfdpx.accounting import accountants, calibration
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.heads import arguments, releases
from tfdpx.heads.examples import Examples
from tfdpx.heads.journal import Journal
from tfdpx.spending import origins

_ROWS = 8192


class Head(abc.ABC):
    """A private linear classifier on fixed features; the four kinds are its subclasses.

    All are compositions of Gaussian mechanisms on the full data, `num_releases` of them.

    Args:
        num_classes, epsilon, delta, noise_multiplier, l2_norm_clip, accountant, seed: As of each.
        **own: A head's own arguments; each becomes an attribute.

    Attributes:
        noise_multiplier: Float, solved from epsilon: that of `num_releases` equal releases. It is
            there before `fit`.
        num_releases: Int.
        kernel, bias: float32 arrays `[d, num_classes]` and `[num_classes]`; None before `fit`.
        ledger: `tfdpx.accounting.Ledger` of all fits of this head: two fits spend twice.
    """

    def __init__(
        self,
        num_classes,
        epsilon,
        delta,
        *,
        noise_multiplier,
        l2_norm_clip,
        accountant,
        seed,
        **own,
    ):
        arguments.check_num_classes(num_classes)
        accountants.check_delta(delta)
        accountants.check_accountant(accountant)
        if (epsilon is None) == (noise_multiplier is None):
            raise ValueError(
                "Exactly one of `epsilon` and `noise_multiplier` must be given. Received: "
                f"epsilon={epsilon}, noise_multiplier={noise_multiplier}."
            )
        arguments.check_clip("l2_norm_clip", l2_norm_clip)
        noise.make_seed(seed)  # Raises an error unless it fits.
        self._own = arguments.checked(own)
        vars(self).update(self._own)
        self.num_classes, self.delta = int(num_classes), float(delta)
        self.epsilon = arguments.plain(epsilon)
        self.accountant, self.seed, self.l2_norm_clip = accountant, seed, float(l2_norm_clip)
        self.num_releases = self._count_releases()
        self._given_noise = arguments.plain(noise_multiplier)
        self.noise_multiplier = self._solved(noise_multiplier)
        if self.noise_multiplier and self.l2_norm_clip == math.inf:
            raise ValueError(
                "Argument `l2_norm_clip` must be finite for a private head. Received: "
                "l2_norm_clip=inf. Without privacy use epsilon=math.inf."
            )
        self.kernel = self.bias = None
        self.ledger = Ledger()

    def _solved(self, noise_multiplier):
        if noise_multiplier is not None:
            accountants.check_noise_multiplier(noise_multiplier)
            return float(noise_multiplier)
        hint = " Values from 0.1 to 8 are common; math.inf is without privacy."
        fits = is_number(self.epsilon) and self.epsilon > 0
        require(fits, "epsilon", self.epsilon, "be a positive number", hint)
        if self.epsilon == math.inf:
            return 0.0
        return calibration.least_noise_multiplier(
            self.epsilon, 1.0, self.num_releases, self.delta, self.accountant
        )

    def fit(self, features, labels=None, *, checkpoint=None):
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
                folder; an interrupted fit, called again with the same, goes on behind that at the
                same epsilon. Only noisy values are there, which the guarantee covers. Of the data,
                number and width are compared alone.

        Returns:
            The head.

        Raises:
            ValueError: If shapes or labels do not fit, or the checkpoint is damaged or of another
                head.
        """
        return self._fit_to(Examples(features, labels, self.num_classes), checkpoint)

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

    def _public_facts(self):
        """Dict of JSON values: what else a fit must share to go on from another's releases."""
        return {}

    @abc.abstractmethod
    def _count_releases(self):
        """Int, Gaussian releases of a fit."""

    @abc.abstractmethod
    def _planned(self):
        """Dict from the name of a release to `(noise_multiplier, times)`."""

    @abc.abstractmethod
    def _sizes(self, dimension):
        """Dict from the name of a release to how many numbers get noise in it."""

    @abc.abstractmethod
    def _fit(self, examples, released):
        """Kernel `[d, m]` and bias `[m]`, from `Examples` by way of `Releases` alone."""

    def epsilon_spent(self):
        """The epsilon of the ledger at `delta`, a float: 0.0 before `fit`."""
        return self.ledger.epsilon(self.delta, self.accountant)

    def plan(self, num_examples):
        """The `tfdpx.PrivacyPlan` of one fit, for reports: `num_releases` steps on the full batch.

        Releases at different noise multipliers are told by the equal ones that cost as much.

        Args:
            num_examples: Int.
        """
        return PrivacyPlan(
            num_examples,
            batch_size=num_examples,
            steps=self.num_releases,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            accountant=self.accountant,
        )

    def predict(self, features):
        """Scores, a float32 array `[n, num_classes]`: the largest is that of the class.

        Args:
            features: Array `[n, d]` or a `tf.data.Dataset` of batches, with or without labels.
        """
        return np.concatenate([scores for scores, _ in self._scored(features, None, False)])

    def evaluate(self, features, labels=None):
        """Measures the head on examples; the result is not private.

        Args:
            features: As for `fit`.
            labels: As for `fit`.

        Returns:
            Dict with "accuracy": the share of examples whose best class is one of theirs.
        """
        right, count = 0, 0
        for scores, targets in self._scored(features, labels, True):
            right += np.take_along_axis(targets, scores.argmax(axis=1)[:, None], axis=1).sum()
            count += len(scores)
        return {"accuracy": float(right / count)}

    def _scored(self, features, labels, labelled):
        self._check_fitted()
        examples = Examples(features, labels, self.num_classes, labelled)
        require(
            examples.dimension == len(self.kernel),
            "features",
            examples.dimension,
            f"have a width of {len(self.kernel)}, as those of `fit`",
        )
        for x, targets in examples.chunks(_ROWS):
            yield tf.matmul(x, self.kernel).numpy() + self.bias, targets

    def to_layer(self, name=None):
        """A `keras.layers.Dense` with the fitted weights, to put on the backbone.

        Its weights remember what they cost: a tfdpx optimizer that trains them has it in its
        ledger.

        Args:
            name: Optional string, as of any layer.
        """
        self._check_fitted()
        layer = keras.layers.Dense(self.num_classes, name=name)
        layer.build((None, len(self.kernel)))
        layer.kernel.assign(self.kernel)
        layer.bias.assign(self.bias)
        origins.attach(self.ledger, layer.variables)
        return layer

    def _check_fitted(self):
        if self.kernel is None:
            raise ValueError(f"This {type(self).__name__} has no weights yet: call `fit` first.")

    def get_config(self):
        """Arguments of the constructor, but the seed, which is secret."""
        return {
            "num_classes": self.num_classes,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": self._given_noise,
            "l2_norm_clip": self.l2_norm_clip,
            "accountant": self.accountant,
            **self._own,
        }

    @classmethod
    def from_config(cls, config):
        """The head of `get_config`, not fitted."""
        return cls(**config)
