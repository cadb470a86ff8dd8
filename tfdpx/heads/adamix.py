"""AdaMix: a private linear classifier that a few public examples start, clip and steer.

"Mixed Differential Privacy in Computer Vision" (Golatkar et al. 2022), called the paper here.
"""

import hashlib
import math

import keras
import numpy as np

from tfdpx._arguments import check_choice, check_positive_integer, is_number, require
from tfdpx.accounting import calibration
from tfdpx.heads import adamix_checks, adamix_instances, adamix_statement, adamix_training
from tfdpx.heads.examples import Examples
from tfdpx.heads.head import Head


@keras.saving.register_keras_serializable(package="tfdpx")
class AdaMix(Head):
    """Softmax regression on fixed features, by noisy full-batch gradients and public examples.

    Algorithm 2 of the paper, on features at norm one or so. With N examples in all and `G` sums of
    gradients, `steps` times

        w <- w - learning_rate / N (G_public + U (U^T G_private + noise) + lambda (w - w_ref)),

    where w starts from the public examples alone, private gradients are clipped to tau, the 90th
    percentile of the norms of the public ones at w, the noise has standard deviation
    `noise_multiplier tau`, and U holds the top left singular vectors of `G_public`. Each part can
    be switched off, and the classmethods name what the paper compares: `only_public`,
    `fully_private`, `ngd`, `ppgd` and, without privacy, `paragon`.

    Guarantee: (epsilon, delta)-differential privacy of the *private* examples under adding or
    removing one, for kernel, bias and all weights on the way: `steps` Gaussians of sensitivity tau,
    so one Gaussian with mu = sqrt(steps) / noise_multiplier (Proposition 5, whose rho = T^2 / (2
    sigma^2) is a misprint of T / (2 sigma^2)). The public examples have **no** guarantee: the
    weights may tell all of them. The numbers of examples are public.

    Args:
        num_classes: Int.
        epsilon: Float > 0, from which `steps` follow. None with `steps`.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0, sigma: more noise allows more steps at the same epsilon.
        steps: Int, T, in place of epsilon.
        learning_rate: Float, against the mean over all examples. None for that of Theorem 3, 2 /
            (lambda (t + 1)) against sums.
        l2_regularization: Float > 0, lambda, against sums. The paper's 0.01 lets public gradients,
            and so the clip, fall further at the start; the learning rate must then be larger.
        use: "mixed", as above; "private", the public examples are private too; "public", the
            private ones are not read; "private_then_public", PPGD; "everything", without privacy.
        start: "public", the minimum over the public examples; "initial", `initial_weights`.
        initial_weights: Public array `[d, num_classes]`, from which that minimum is sought and
            toward which it decays, as of `tfdpx.models.zero_shot_head`. None: zeros.
        decay_to: "start", the w that the steps start from, or "zero".
        clip: "public_quantile"; "public_mean", the norm of the mean public gradient; "fixed".
        quantile: Float in (0, 1].
        l2_norm_clip: Float, tau where `clip` is "fixed".
        projection: Int P, number of singular vectors, of which there are `num_classes` at most;
            None projects nothing.
        average: Bool, whether the result is the mean of the weights, weighted by step (Theorem 3).
        keep_steps: Bool, whether `individual_epsilons` is wanted: keeps the weights of every step.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Attributes:
        steps: Int, T, there before `fit`.
    """

    def __init__(
        self,
        num_classes,
        epsilon=None,
        delta=1e-5,
        noise_multiplier=20.0,
        *,
        steps=None,
        learning_rate=32.0,
        l2_regularization=0.1,
        use="mixed",
        start="public",
        initial_weights=None,
        decay_to="start",
        clip="public_quantile",
        quantile=0.9,
        l2_norm_clip=1.0,
        projection=None,
        average=False,
        keep_steps=False,
        accountant="gdp",
        seed=None,
    ):
        check_choice("use", use, adamix_training.USES)
        check_choice("start", start, ("public", "initial"))
        check_choice("decay_to", decay_to, ("start", "zero"))
        check_choice("clip", clip, adamix_training.CLIPS)
        adamix_checks.check_positive("l2_regularization", l2_regularization)
        if learning_rate is not None:
            adamix_checks.check_positive("learning_rate", learning_rate)
        fits = is_number(quantile) and 0 < quantile <= 1
        require(fits, "quantile", quantile, "lie in (0, 1]", " The paper takes 0.9.")
        if projection is not None:
            check_positive_integer("projection", projection)
        adamix_checks.check_switches(use, start, clip, projection)
        noisy = use in adamix_training.NOISY
        self.steps = self._solved_steps(epsilon, steps, noise_multiplier, delta, accountant, noisy)
        super().__init__(
            num_classes,
            None,
            delta,
            noise_multiplier=noise_multiplier if noisy else 0.0,
            l2_norm_clip=l2_norm_clip,
            accountant=accountant,
            seed=seed,
        )
        self.epsilon = epsilon if noisy else (0.0 if use == "public" else math.inf)
        self._given = {"epsilon": epsilon, "noise_multiplier": noise_multiplier}
        self._given["steps"] = steps
        self.learning_rate, self.l2_regularization = learning_rate, float(l2_regularization)
        self.use, self.start, self.decay_to, self.clip = use, start, decay_to, clip
        self.quantile, self.projection, self.average = float(quantile), projection, average
        self.initial_weights = _checked_weights(initial_weights, num_classes)
        self.keep_steps, self._kept, self._public = keep_steps, None, None

    def _count_releases(self):
        return self.steps

    @staticmethod
    def _solved_steps(epsilon, steps, noise_multiplier, delta, accountant, noisy):
        if not noisy:
            return 0
        hint = " The paper takes 20; AdaMix.paragon is without privacy."
        adamix_checks.check_positive("noise_multiplier", noise_multiplier, hint)
        if (epsilon is None) == (steps is None):
            raise ValueError(
                "Exactly one of `epsilon` and `steps` must be given: the other follows from "
                f"`noise_multiplier`. Received: epsilon={epsilon}, steps={steps}."
            )
        if steps is not None:
            check_positive_integer("steps", steps)
            return steps
        hint = " AdaMix.paragon is without privacy, AdaMix.only_public without private data."
        adamix_checks.check_positive("epsilon", epsilon, hint)
        return calibration.most_steps(epsilon, noise_multiplier, 1.0, delta, accountant)

    @classmethod
    def only_public(cls, num_classes, **kwargs):
        """The minimum over the public examples; private ones are not read, and spend nothing."""
        return cls(num_classes, **{"use": "public", **kwargs})

    @classmethod
    def fully_private(cls, num_classes, epsilon=None, delta=1e-5, **kwargs):
        """NoisyGD (Algorithm 1) from zero on all examples, the public ones as private as others."""
        own = {"use": "private", "start": "initial", "clip": "fixed", "learning_rate": 4.0}
        return cls(num_classes, epsilon, delta, **{**own, **kwargs})

    @classmethod
    def ngd(cls, num_classes, epsilon=None, delta=1e-5, **kwargs):
        """AdaMix without what is adaptive: a fixed clip, and no projection."""
        own = {"clip": "fixed", "learning_rate": 4.0}
        return cls(num_classes, epsilon, delta, **{**own, **kwargs})

    @classmethod
    def ppgd(cls, num_classes, epsilon=None, delta=1e-5, **kwargs):
        """PPGD, of "Differentially Private Learning with Small Public Data", on full batches.

        NoisyGD from zero on the private examples, clipped to the norm of the mean public gradient;
        then the minimum over the public examples, with decay toward what that gave.
        """
        own = {"use": "private_then_public", "start": "initial", "clip": "public_mean"}
        return cls(num_classes, epsilon, delta, **{**own, **kwargs})

    @classmethod
    def paragon(cls, num_classes, **kwargs):
        """The minimum over all examples, **without privacy**: epsilon is infinite."""
        return cls(num_classes, **{"use": "everything", **kwargs})

    def fit(self, features=None, labels=None, *, public_data=None, checkpoint=None):
        """Fits the kernel to private and public examples, and counts what that spends.

        Guarantee: that of the class, for `features` and `labels`; none for `public_data`. A row of
        features that is not finite counts as zero.

        Args:
            features: Private array `[n, d]`, or a `tf.data.Dataset` of batches `(features, labels)`
                that ends and gives every example once, in any order. It is read once a step.
            labels: Integers `[n]`, or zeros and a single one a row, `[n, num_classes]`. None with a
                dataset.
            public_data: Pair of arrays `(features, labels)`, or such a dataset; held in memory.
            checkpoint: As of the other heads, such as `tfdpx.heads.FirstOrder.fit`.

        Returns:
            The head.

        Raises:
            ValueError: If shapes or labels do not fit, public features are not finite, examples are
                both private and public, or what needs public examples has none.
        """
        self._public = public = adamix_checks.public_set(self, public_data)
        if self.use == "public":
            kernel = adamix_training.pretrained(self, public, self._first(public.x.shape[1]))
            self.kernel, self.bias = np.float32(kernel), np.zeros(self.num_classes, "float32")
            return self
        examples = Examples(features, labels, self.num_classes)
        adamix_checks.check_private(examples, public)
        if self.use == "private" and public is not None:
            examples = adamix_training.Joined(examples, public)
        return self._fit_to(examples, checkpoint)

    def _first(self, dimension):
        if self.initial_weights is None:
            return np.zeros([dimension, self.num_classes])
        require(
            len(self.initial_weights) == dimension,
            "initial_weights",
            self.initial_weights.shape,
            f"have the shape [{dimension}, {self.num_classes}]",
        )
        return self.initial_weights

    def _public_facts(self):
        # The steps of a fit follow from its public examples.
        digest = hashlib.blake2b(digest_size=16)
        for array in () if self._public is None else (self._public.x, self._public.y):
            digest.update(f"{array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return {"public data (a hash)": digest.hexdigest()}

    def _planned(self):
        if self.use == "everything":
            return {"weights": (0.0, 1)}
        return {"gradient": (self.noise_multiplier, self.steps)}

    def _sizes(self, dimension):
        rows = min(self.projection, self.num_classes, dimension) if self.projection else dimension
        return dict.fromkeys(self._planned(), rows * self.num_classes)

    def _fit(self, examples, released):
        kernel, self._kept = adamix_training.train(
            self, examples, self._public, released, self._first(examples.dimension)
        )
        return kernel, np.zeros(self.num_classes)

    def losses(self, features, labels=None):
        """float32 `[n]`: the cross-entropy of each example; not private for private ones.

        Args:
            features: As for `fit`.
            labels: As for `fit`.
        """
        found = []
        for scores, targets in self._scored(features, labels, labelled=True):
            scores = scores - scores.max(axis=1, keepdims=True)
            found.append(np.log(np.exp(scores).sum(axis=1)) - np.sum(scores * targets, axis=1))
        return np.concatenate(found)

    def individual_epsilons(self, features, labels=None):
        """What the last fit spent on each of its private examples: `tfdpx.heads.adamix_instances`.

        Not private, and no bound for other data: for analysis by whoever holds the data. None
        exceeds epsilon, but for what the accountant rounds.

        Args:
            features: As for `fit`.
            labels: As for `fit`.

        Returns:
            float64 `[n]`, epsilons at `delta`, in the order of the examples.

        Raises:
            ValueError: If the head is not fitted, or was not told to keep its steps.
        """
        self._check_fitted()
        if not self._kept:
            raise ValueError(
                "Argument `keep_steps` must be True before `fit` for individual epsilons, and the "
                f"fit must have noisy steps. Received: keep_steps={self.keep_steps}, "
                f"steps={self.steps}."
            )
        chunks = Examples(features, labels, self.num_classes).chunks(adamix_checks.ROWS)
        return adamix_instances.epsilons(self._kept, chunks, self.noise_multiplier, self.delta)

    def statement(self, num_examples, num_public=0):
        """What is guaranteed to whom, in a paragraph: `tfdpx.heads.adamix_statement`.

        Args:
            num_examples: Int, number of private examples.
            num_public: Int, number of public examples.
        """
        return adamix_statement.of(self, num_examples, num_public)

    def get_config(self):
        """Arguments of the constructor, but the seed."""
        names = "learning_rate l2_regularization use start decay_to clip quantile projection"
        weights = self.initial_weights
        return {
            **super().get_config(),
            **self._given,
            **{name: getattr(self, name) for name in f"{names} average keep_steps".split()},
            "initial_weights": None if weights is None else weights.tolist(),
        }


def _checked_weights(weights, num_classes):
    if weights is None:
        return None
    weights = np.asarray(weights, "float64")
    fits = weights.ndim == 2 and weights.shape[1] == num_classes and np.isfinite(weights).all()
    must = f"be finite numbers of shape [d, {num_classes}]"
    require(fits, "initial_weights", weights.shape, must)
    return weights
