"""The fit of AdaMix in order: a start from public examples, then noisy steps on both sets."""

import numpy as np

from tfdpx.heads.adamix_checks import ROWS
from tfdpx.heads.adamix_instances import Step
from tfdpx.heads.convergence import cross_entropy, minimum, minimum_in_row_space
from tfdpx.heads.softmax_gradients import SoftmaxGradients

USES = ("mixed", "private", "public", "private_then_public", "everything")
NOISY = ("mixed", "private", "private_then_public")
CLIPS = ("public_quantile", "public_mean", "fixed")


class Joined:
    """Private examples, and behind them the public ones as if they were private.

    Args:
        examples: `tfdpx.heads._feature_source.Examples`, read to its end once.
        public: `PublicSet`.
    """

    def __init__(self, examples, public):
        self._examples, self._public = examples, public
        self.dimension, self.count = examples.dimension, examples.count + len(public)
        self.bytes = examples.bytes + 4 * public.x.size

    def chunks(self, rows):
        """As `Examples.chunks`."""
        yield from self._examples.chunks(rows)
        for start in range(0, len(self._public), rows):
            part = slice(start, start + rows)
            yield (self._public.x[part].astype("float32"), self._public.y[part].astype("float32"))


def pretrained(head, public, first):
    """float64 `[d, m]`: the least regularised loss of the public examples; costs no privacy.

    Args:
        head: `tfdpx.AdaMix`, whose settings are read.
        public: `PublicSet`, or None.
        first: float64 `[d, m]`, toward which the weights decay, and the result where `head.start`
            is "initial".
    """
    if head.start == "initial":
        return first
    return minimum_in_row_space(public.x, public.y, head.l2_regularization, first)


def train(head, examples, public, released, first):
    """The kernel, float64 `[d, m]`, and a list of the `Step`s if the head keeps them.

    Args:
        head: `tfdpx.AdaMix`, whose settings are read.
        examples: Private examples.
        public: `PublicSet`, or None.
        released: `tfdpx.heads.releases.Releases`, the only way from private examples to weights.
        first: float64 `[d, m]`, public weights to begin with.
    """
    if head.use == "everything":
        kernel = _everything(head, examples, public, first)
        return released.gaussian("weights", kernel, 1.0), None  # Without noise, and so it counts.
    kernel = pretrained(head, public, first)
    kernel, kept = _noisy_steps(head, examples, public, released, kernel)
    if head.use == "private_then_public":
        kernel = minimum_in_row_space(public.x, public.y, head.l2_regularization, kernel)
    return kernel, kept


def _noisy_steps(head, examples, public, released, kernel):
    mixed = head.use == "mixed" and public is not None
    everyone = examples.count + (len(public) if mixed else 0)
    reference = kernel if head.decay_to == "start" else np.zeros_like(kernel)
    decay = head.l2_regularization
    gradients = SoftmaxGradients(examples, head.num_classes)
    kept, total = [], np.zeros_like(kernel)
    for t in range(1, head.steps + 1):
        kernel = kernel.astype("float32").astype("float64")  # What the passes see.
        total += t * kernel
        step = public_step(head, public, kernel)
        if head.keep_steps:
            kept.append(step)

        def private_sum(kernel=kernel, step=step):
            private = gradients.sum(kernel, step.l2_norm_clip)
            return private if step.subspace is None else step.subspace.T @ private

        private = released.gaussian("gradient", private_sum, step.l2_norm_clip)
        if step.subspace is not None:
            private = step.subspace @ private
        slope = private + decay * (kernel - reference)
        if mixed:
            slope += public.gradient(kernel)
        # Theorem 3's step sizes are of the sum, and so is its lambda.
        rate = (
            2 / (decay * (t + 1)) if head.learning_rate is None else head.learning_rate / everyone
        )
        kernel = kernel - rate * slope
    if head.average:
        kernel = 2 * total / (head.steps * (head.steps + 1))
    return kernel, kept


def public_step(head, public, kernel):
    """The `Step` at released weights: what public examples alone say of clip and subspace.

    Args:
        head: `tfdpx.AdaMix`, whose settings are read.
        public: `PublicSet`, or None if neither is adaptive.
        kernel: float64 `[d, m]`.
    """
    if head.clip == "public_quantile":
        clip = public.quantile_clip(kernel, head.quantile)
    elif head.clip == "public_mean":
        clip = public.mean_clip(kernel)
    else:
        clip = head.l2_norm_clip
    subspace = None if head.projection is None else public.subspace(kernel, head.projection)
    return Step(kernel.astype("float32"), clip, subspace)


def _everything(head, examples, public, first):
    """The minimum over all examples, without privacy."""
    everyone = examples if public is None else Joined(examples, public)

    def loss_and_gradient(kernel):
        loss, gradient = 0.0, np.zeros_like(kernel)
        for x, y in everyone.chunks(ROWS):
            x = np.where(np.isfinite(x).all(axis=1)[:, np.newaxis], x, 0.0)
            more, slopes = cross_entropy(x @ kernel, y)
            loss, gradient = loss + more, gradient + x.T @ slopes
        return loss, gradient

    start = pretrained(head, public, first)
    return minimum(loss_and_gradient, start, head.l2_regularization, first)
