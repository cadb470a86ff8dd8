"""The norms of examples' gradients before they are clipped, for choosing `l2_norm_clip`.

The norms reveal private data, because each is computed from one example without noise.
"""

import typing

import keras
import numpy as np
import tensorflow as tf

from tfdpx._arguments import check_positive_integer
from tfdpx._keras import model_internals
from tfdpx.per_example.rows import Rows
from tfdpx.sampling.examples import as_examples
from tfdpx.training.microbatches import Batch
from tfdpx.training.norms import GradientNorms
from tfdpx.training.optimizers import DPSGD
from tfdpx.training.preflight import prepare


def gradient_norms(
    model: keras.Model,
    x: typing.Any,
    y: typing.Any = None,
    sample_weight: typing.Any = None,
    batch_size: int = 32,
) -> np.ndarray:
    """Returns the l2 norm of each example's gradient, before clipping.

    The norms are computed without noise, so keep them as secret as the data. If you choose the clip
    by looking at norms of private examples, the choice depends on private data, and no epsilon
    covers this. So use norms of similar public examples, or a clip from a paper.

    The gradient of an example's loss is computed as in the private step: in training mode, over all
    trainable variables and without weight regularisers. With a tfdpx optimizer, the gradient is the
    mean over the `augmult` views. A norm may be up to 1.0003 times the exact one, because it
    includes a bound on rounding errors. Random layers and augmentations draw the same numbers in
    every call. Weights, metrics and Keras's random states do not change.

    Args:
        model: A compiled `keras.Model`, with an optimizer of tfdpx or any other.
        x: Array, or nest of arrays, `[n, ...]`, or `tfdpx.RandomAccess`, as for `fit`.
        y: As `x`, the targets; None with a `RandomAccess`.
        sample_weight: Optional array `[n]`. It may have further axes of the loss, for example `[n,
            time_steps]`.
        batch_size: Int, the number of examples that are in memory at once.

    Returns:
        float32 array `[n]`. A norm is infinite or NaN if the gradient is not finite. In training,
        the gradient of such an example is replaced by zero.

    Raises:
        UnfitForPrivacy: If `model` cannot be trained privately, for example if a trainable
            `BatchNormalization` mixes the examples.
        ValueError: If the model is not compiled, or an argument is invalid.

    Example:
    >>> model = keras.Sequential([keras.layers.Dense(1, use_bias=False)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.array([[1.0], [2.0], [0.0]]), np.array([[0.0], [0.0], [5.0]])
    >>> model.build([None, 1]); model.set_weights([np.ones([1, 1])])
    >>> gradient_norms(model, x, y).round(2).tolist()  # 2 * prediction * input
    [2.0, 8.0, 0.0]
    """
    check_positive_integer("batch_size", batch_size)
    examples = as_examples(x, y, sample_weight)
    if not model.compiled:
        raise ValueError(
            f"Argument `model` must be compiled with the loss to differentiate. Received: "
            f"model '{model.name}', not compiled. Call `model.compile(optimizer, loss)`."
        )

    def make_engine(views, data):
        x, *targets = Rows(data).map(tf.convert_to_tensor)
        model_internals.build(model, (views.example_rows(x), *views.target_specs(x, *targets)))
        optimizer = model_internals.innermost(model.optimizer)
        # Another optimizer is used, so nothing changes that the model's optimizer has prepared.
        stand_in = DPSGD(
            0.0,
            batch_size=batch_size,
            microbatch_size=batch_size,
            noise_multiplier=1.0,
            augment=getattr(optimizer, "augment", None),
            augmult=getattr(optimizer, "augmult", 0),
            augment_targets=getattr(optimizer, "augment_targets", None),
        )
        return prepare(stand_in, model, views, Batch((x, *targets))).engine

    return GradientNorms(model, examples, batch_size, make_engine)(np.arange(examples.count))
