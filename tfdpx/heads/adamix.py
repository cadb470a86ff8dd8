"""AdaMix: a private linear classifier that a few public examples start, clip and steer.

"Mixed Differential Privacy in Computer Vision" (Golatkar et al. 2022), called the paper here. What
the paper compares it with is in `experiments/adamix/`.
"""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx.accounting import calibration
from tfdpx.accounting.statement import rounded_up
from tfdpx.heads._feature_source import FeatureSource
from tfdpx.heads._fields import argument, norm_bound, optional, positive
from tfdpx.heads._gradients import SoftmaxGradients
from tfdpx.heads.head import ROWS, Head
from tfdpx.heads.public_set import PublicSet
from tfdpx.sampling import overlap
from tfdpx.training.checkpoint import Checkpoint


def _check_quantile(name, value):
    fits = is_number(value) and 0 < value <= 1
    require(fits, name, value, "lie in (0, 1]", " The paper takes 0.9.")


def _check_weights(name, value):
    weights = np.asarray(value, "float64")
    fits = weights.ndim == 2 and np.isfinite(weights).all()
    require(fits, name, weights.shape, "be finite numbers of shape [d, num_classes]")


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class AdaMix(Head):
    """Softmax regression on fixed features, by noisy full-batch gradients and public examples.

    Algorithm 2 of the paper, on features at norm one or so. With N examples in all and `G` sums of
    gradients, `steps` times

        w <- w - learning_rate / N (G_public + U (U^T G_private + noise) + lambda (w - w_0)),

    where w_0, the start, is the minimum over the public examples alone, private gradients are
    clipped to tau, the 90th percentile of the norms of the public ones at w, the noise has standard
    deviation `noise_multiplier tau`, and U holds the top left singular vectors of `G_public`.
    Without public examples this is NoisyGD (Algorithm 1).

    Guarantee: (epsilon, delta)-differential privacy of the *private* examples under adding or
    removing one, for kernel, bias and all weights on the way: `steps` Gaussians of sensitivity tau,
    so one Gaussian with mu = sqrt(steps) / noise_multiplier (Proposition 5, whose rho = T^2 / (2
    sigma^2) is a misprint of T / (2 sigma^2)). The public examples have **no** guarantee: the
    weights may tell all of them. The numbers of examples are public.

    Args:
        num_classes: Int.
        epsilon: Float > 0, which gives `steps`. None with `steps`.
        delta: Float in (0, 1).
        noise_multiplier: Float > 0, sigma: more noise allows more steps at the same epsilon.
        l2_norm_clip: Float, a fixed tau; None lets tau follow the public gradients. A fixed tau of
            1 needs a smaller learning rate, such as 4.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.
        steps: Int, T, in place of epsilon.
        learning_rate: Float, for the mean over all examples.
        l2_regularization: Float > 0, lambda, for sums. The paper's 0.01 lets public gradients, and
            so the clip, fall further at the start; the learning rate must then be larger.
        quantile: Float in (0, 1], of the norms of the public gradients, where tau follows them.
        projection: Int, number of columns of U, of which there are `num_classes` at most; None
            projects nothing.
        initial_weights: Public array `[d, num_classes]`, from which the start is sought and toward
            which it decays, such as `tfdpx.models.zero_shot_head`; the start itself where there
            are no public examples. None: zeros.

    Attributes:
        steps: Int, T, there before `fit`.

    Raises:
        ValueError: If an argument does not fit.
    """

    epsilon: float | None = argument(None, optional(positive))
    noise_multiplier: float = argument(20.0, positive)
    _: dataclasses.KW_ONLY
    l2_norm_clip: float | None = argument(None, optional(norm_bound))
    steps: int | None = argument(None, optional(check_positive_integer))
    learning_rate: float = argument(32.0, positive)
    l2_regularization: float = argument(0.1, positive)
    quantile: float = argument(0.9, _check_quantile)
    projection: int | None = argument(None, optional(check_positive_integer))
    initial_weights: ArrayLike | None = argument(None, optional(_check_weights), repr=False)

    _solved = "steps"

    def __post_init__(self):
        super().__post_init__()
        if self.initial_weights is not None:
            self.initial_weights = np.asarray(self.initial_weights, "float64")
            self._config["initial_weights"] = self.initial_weights.tolist()

    def _solution(self):
        names = ("noise_multiplier", "epsilon", "delta")
        known = {name: getattr(self, name) for name in names}
        return calibration.solve("steps", known, self.accountant)

    def _releases(self):
        return {"gradient": self.steps}

    def _sizes(self, dimension):
        rows = min(self.projection, self.num_classes, dimension) if self.projection else dimension
        return {"gradient": rows * self.num_classes}

    def fit(
        self,
        features: ArrayLike | tf.data.Dataset,
        labels: ArrayLike | None = None,
        *,
        public_data: tuple[ArrayLike, ArrayLike] | tf.data.Dataset | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> AdaMix:
        """Fits the kernel to private and public examples, and counts what that spends.

        Guarantee: see the class, for `features` and `labels`; none for `public_data`. A row of
        features that is not finite counts as zero.

        Args:
            features: Private array `[n, d]`, or a `tf.data.Dataset` of batches `(features, labels)`
                that ends and gives every example once, in any order. It is read once a step.
            labels: Integers `[n]`, or zeros and a single one a row, `[n, num_classes]`. None with a
                dataset.
            public_data: Pair of arrays `(features, labels)`, or such a dataset; held in memory.
                None needs an `l2_norm_clip` and no `projection`.
            checkpoint: As of the other heads, such as `tfdpx.heads.FirstOrder.fit`. A fit continues
                with the same public examples only.

        Returns:
            The head.

        Raises:
            TypeError: If `checkpoint` is not a `Checkpoint`.
            ValueError: If shapes or labels do not fit, public features are not finite, examples are
                both private and public, public examples are needed and missing, or the checkpoint
                is damaged or of another head or public set.
        """
        if public_data is None and (self.l2_norm_clip is None or self.projection):
            raise ValueError(
                "Argument `public_data` is missing: clip and projection follow it. Received: None, "
                f"with l2_norm_clip={self.l2_norm_clip}, projection={self.projection}. Give a pair "
                "(features, labels), or an `l2_norm_clip` and no `projection`."
            )
        examples = FeatureSource(features, labels, self.num_classes)
        shape = [examples.dimension, self.num_classes]
        given = self.initial_weights
        self._first = np.zeros(shape) if given is None else np.asarray(given)
        fits = list(self._first.shape) == shape
        require(fits, "initial_weights", self._first.shape, f"have the shape {shape}")
        if public_data is None:
            self._public = PublicSet(np.zeros([0, shape[0]]), np.zeros([0, shape[1]]))
        else:
            self._public = PublicSet.of(public_data, self.num_classes)
            _check_single_labels("public_data", self._public.y)
        _check_private(examples, self._public)
        return self._fit_to(examples, checkpoint)

    def _public_facts(self):
        return {"public data (a hash)": self._public.digest}

    def _fit(self, examples, released):
        gradients = SoftmaxGradients(examples, self.num_classes)
        start = kernel = self._start()
        count = examples.count + len(self._public)
        for step in range(1, self.steps + 1):
            kernel = kernel.astype("float32").astype("float64")  # What the passes see.
            clip, subspace = self._clip_and_subspace(kernel)

            def private_sum(kernel=kernel, clip=clip, subspace=subspace):
                total = gradients.sum(kernel, clip)
                return total if subspace is None else subspace.T @ total

            slope = released.gaussian("gradient", private_sum, clip)
            if subspace is not None:
                slope = subspace @ slope
            slope += self._public.gradient(kernel)
            kernel = self._moved(kernel, slope, start, count, step)
        return kernel, np.zeros(self.num_classes)

    def _start(self):
        return self._public.minimum(self.l2_regularization, self._first)

    def _clip_and_subspace(self, kernel):
        """What public examples alone say at released weights: a float, and an array or None."""
        if self.projection is None:
            return self._clip(kernel), None
        return self._clip(kernel), self._public.subspace(kernel, self.projection)

    def _clip(self, kernel):
        if self.l2_norm_clip is not None:
            return self.l2_norm_clip
        return self._public.quantile_clip(kernel, self.quantile)

    def _moved(self, kernel, slope, start, count, step):
        """The next weights; `slope` is a sum over `count` examples."""
        slope += self.l2_regularization * (kernel - start)
        return kernel - self.learning_rate / count * slope

    def statement(self, num_examples: int, num_public: int = 0) -> str:
        """What is guaranteed to whom, in a paragraph.

        Args:
            num_examples: Int, number of private examples.
            num_public: Int, number of public examples.

        Returns:
            String of whole sentences.

        Raises:
            ValueError: If `num_examples` is not a positive integer.
        """
        said = (
            f"The weights are ({rounded_up(self.plan(num_examples).epsilon)}, {self.delta:g})-"
            f"differentially private for the {num_examples} private examples, under adding or "
            f"removing one: {self.steps} Gaussian releases of all of them at noise multiplier "
            f"{self.noise_multiplier:g}, accountant {self.accountant}."
        )
        if num_public:
            said += (
                f" The {num_public} public examples get no guarantee: the weights may tell all of "
                "them."
            )
        if self.seed is not None:
            said += " This holds for whoever does not know the seed; do not release the weights."
        return said


def _check_private(examples, public):
    """One pass over private examples: widths, labels, and that none of them is public."""
    if public.x.shape[1] != examples.dimension:
        raise ValueError(
            "Arguments `features` and `public_data` must have one width. Received: "
            f"{examples.dimension} and {public.x.shape[1]}."
        )
    known, found = overlap.Fingerprints(public.x) if len(public) else None, 0
    for x, y in examples.chunks(ROWS):
        _check_single_labels("labels", y)
        found += 0 if known is None else known.count_in(x)
    overlap.refuse(found, examples.count)


def _check_single_labels(name, targets):
    wrong = int(np.sum(targets.sum(axis=1) != 1))
    if wrong:
        raise ValueError(
            f"Argument `{name}` must give each example one class: the loss is a softmax cross-"
            f"entropy. Received: {wrong} examples with none or several. For those use another "
            "head, such as tfdpx.heads.FeatureCovariance."
        )
