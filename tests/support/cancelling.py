"""Examples with a gradient that nearly cancels over positions, and their effect on the sum."""

import keras
import numpy as np
import tensorflow as tf
from engines import make_engine

from tfdpx import mechanism
from tfdpx.per_example.cost_model import forced_norms

PATTERNS = ("opposite outputs", "opposite inputs", "nearly equal inputs", "absorbed", "plain")


def inner_product(cotangents, outputs):
    """A loss with the target as its gradient at the outputs of an example."""
    product = tf.cast(cotangents, "float32") * tf.cast(outputs, "float32")
    return tf.reduce_sum(product, axis=list(range(1, product.shape.rank)))


def model_of(inputs, outputs, optimizer=None, **compile_arguments):
    """Returns a compiled model with the loss `inner_product`."""
    model = keras.Model(inputs, outputs)
    model.compile(optimizer=optimizer or "sgd", loss=inner_product, **compile_arguments)
    return model


def worst(rng, pattern, size, positions, fan_in, fan_out):
    """Returns inputs [T, fan_in] and output gradients [T, fan_out] of `size` with a small sum."""
    shared = rng.normal(size=fan_in)
    direction = rng.normal(size=fan_out)
    signs = np.where(np.arange(positions) % 2, -1.0, 1.0)
    if positions % 2:
        signs[-1] = 0.0
    remainder = rng.normal(size=(positions, fan_out)) * 10.0 ** rng.uniform(-3, 1)
    inputs = np.tile(shared, (positions, 1))
    outputs = size * signs[:, None] * direction + remainder
    if pattern == "opposite inputs":
        inputs = size * signs[:, None] * shared + rng.normal(size=inputs.shape)
        outputs = np.tile(direction, (positions, 1))
    elif pattern == "nearly equal inputs":
        inputs = inputs * (1.0 + 1e-6 * rng.normal(size=inputs.shape))
    elif pattern == "absorbed":
        outputs = np.tile(remainder[:1], (positions, 1)) * size * 2.0**-24
        outputs[0] += size * direction
        outputs[-1] -= size * direction
    elif pattern == "plain":
        inputs, outputs = rng.normal(size=inputs.shape), remainder
    return inputs.astype("float32"), outputs.astype("float32")


def clipped_sums(model, x, views=1, norm="auto", jit_compile=False, clip=1.0, mode="chosen"):
    """Returns a compiled function of x, y and `present` to the clipped sums in units of `clip`."""
    engine = make_engine(model, tf.convert_to_tensor(x), views, mode)

    @tf.function(jit_compile=jit_compile, autograph=False)
    def compiled(x, y, present):
        result = engine(x, y, None)
        norms = result.squared_norms
        factors = mechanism.clip_factors(norms, clip, 1)
        return result.clipped_sums(mechanism.zero_invalid(factors, norms, present))

    def sums(x, y, present):
        with forced_norms(norm):
            tensors = compiled(*map(tf.convert_to_tensor, (x, y, present)))
        return np.concatenate([np.asarray(s, "float64").ravel() for s in tensors])

    return sums


def sensitivity(sums, x, y, examples, index):
    """Returns how far the clipped sums move when example `index` is left out."""
    present = np.ones(examples, bool)
    without = present.copy()
    without[index] = False
    return np.linalg.norm(sums(x, y, present) - sums(x, y, without))
