"""The norms of examples' gradients before they are clipped, for choosing `l2_norm_clip`.

Not private: a norm is a function of one example that no noise was added to.
"""

from __future__ import annotations

import typing

import keras
import numpy as np
import tensorflow as tf

from tfdpx._arguments import check_positive_integer
from tfdpx._keras import model_internals
from tfdpx.per_example.rows import Rows

if typing.TYPE_CHECKING:
    from tfdpx.sampling.examples import Examples
    from tfdpx.sampling.random_access import RandomAccess

# First words of the keys of views and of masks; the batch's number is the second.
_VIEWS, _MASKS = 0, 1


def gradient_norms(
    model: keras.Model,
    x: typing.Any,
    y: typing.Any = None,
    sample_weight: typing.Any = None,
    batch_size: int = 32,
) -> np.ndarray:
    """The l2 norm of each example's gradient, before clipping. Not private.

    A clip that was chosen by looking at the norms of private examples is a choice made on private
    data, which no epsilon covers. Look at those of public examples of the same kind, or take a clip
    from a paper; keep what this returns as secret as the data.

    The gradient is of the loss of one example alone, as the private step computes it: in
    training mode, over all trainable variables, without weight regularisers, and with an optimizer
    of tfdpx as the mean over the `augmult` views. A norm is up to 1.0003 times the exact one, since
    it bounds what rounding may add. Random layers and augmentations draw alike in every call.
    Weights, metrics and Keras's random states stay as they are.

    Args:
        model: A compiled `keras.Model`, with an optimizer of tfdpx or any other.
        x: Array, or nest of arrays, `[n, ...]`, or `tfdpx.RandomAccess`, as for `fit`.
        y: As `x`, the targets; None with a `RandomAccess`.
        sample_weight: Optional array `[n]`, or with the axes of the losses that it multiplies.
        batch_size: Int, the examples that are in memory at once.

    Returns:
        float32 array `[n]`. Infinite or NaN where a gradient is not finite: training counts such an
        example as zero.

    Raises:
        UnfitForPrivacy: If `model` cannot be trained privately, such as one with a trainable
            `BatchNormalization`: no example has a gradient of its own there.
        ValueError: If the model is not compiled, or an argument is unfit.

    Example:
    >>> model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.array([[1.0], [2.0], [0.0]]), np.array([[0.0], [0.0], [5.0]])
    >>> model.build([None, 1]); model.set_weights([np.ones([1, 1])])
    >>> gradient_norms(model, x, y).round(2).tolist()  # 2 * prediction * input
    [2.0, 8.0, 0.0]
    """
    from tfdpx.sampling.examples import as_examples

    check_positive_integer("batch_size", batch_size)
    examples = as_examples(x, y, sample_weight)
    return GradientNorms(model, examples, batch_size)(np.arange(examples.count))


class GradientNorms:
    """Measures as `gradient_norms`, traced once for all calls, at the weights as they then are.

    Args:
        model: A compiled `keras.Model`.
        examples: `Examples` or `RandomAccess`.
        batch_size: Int.
        engine: The per-example engine of the training under way; found out if left out.
    """

    def __init__(
        self,
        model: keras.Model,
        examples: Examples | RandomAccess,
        batch_size: int,
        engine: typing.Any = None,
    ):
        from tfdpx.training.step import Views

        if not model.compiled:
            raise ValueError(
                f"Argument `model` must be compiled with the loss to differentiate. Received: "
                f"model '{model.name}', not compiled. Call `model.compile(optimizer, loss)`."
            )
        self._model, self._examples, self._batch_size = model, examples, batch_size
        optimizer = model_internals.innermost(model.optimizer)
        self._augment = getattr(optimizer, "augment", None), getattr(optimizer, "augmult", 0)
        x, y, weights = self._batch(np.zeros([0], np.int64))
        self._views = Views(*self._augment, x)
        self._engine = engine or self._proved((x, y, weights), optimizer)
        self._measure = tf.function(self._norms, autograph=False)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The norms, float32 [n], of the examples `rows`, int [n]."""
        norms, size = [np.zeros([0], np.float32)], self._batch_size
        for number, first in enumerate(range(0, len(rows), size)):
            part = rows[first : first + size]
            measured = self._measure(self._batch(part), tf.constant(number, tf.int64))
            norms.append(measured.numpy()[: len(part)])
        return np.concatenate(norms)

    def _batch(self, rows):
        """`(x, y, sample_weight)`, tensors [batch_size, ...], padded with zeros."""
        x, y, weights = self._examples.batch(tf.constant(rows, tf.int64), self._batch_size)
        return x, y, weights if self._examples.is_weighted else None

    def _norms(self, data, number):
        x, y, weights = data
        choices = self._views.draw(self._batch_size, tf.stack([_VIEWS, number]))
        y, weights = self._views.repeat((y, weights))
        key = tf.stack([_MASKS, number])
        output = self._engine(self._views.rows(x, choices), y, weights, key=key)
        return tf.sqrt(output.squared_norms)

    def _proved(self, data, optimizer):
        """The engine that the private step would take for such batches."""
        from tfdpx.training.optimizers import DPSGD
        from tfdpx.training.preflight import Batch, prepare

        x, *others = Rows(data).map(tf.convert_to_tensor)
        model_internals.build(self._model, (self._views.example_rows(x), *others))
        augment, augmult = self._augment
        # One that trains nothing: what is prepared for the model's own stays as it is.
        stand_in = DPSGD(
            0.0,
            batch_size=self._batch_size,
            microbatch_size=self._batch_size,
            noise_multiplier=1.0,
            augment=augment,
            augmult=augmult,
        )
        batch = Batch(self._views, (x, *others), may_be_absent=False)
        microbatch, _ = prepare(stand_in, self._model, batch)
        return microbatch.engine
