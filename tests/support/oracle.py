"""The oracle of the per-example engine: ordinary gradients of batches of one example."""

import keras
import numpy as np
import tensorflow as tf
from engines import make_engine

from tfdpx._keras import layer_internals, model_internals
from tfdpx.per_example.cost_model import forced_norms
from tfdpx.per_example.rows import Rows

# The allowed excess of norms over the exact ones, about 2^-24 for each term of the longest sum.
ALLOWANCE = 3e-4


def batch_of_one_gradients(model, x, y, sample_weight, views):
    """Returns flat gradients, float64 [B, P]: for each example the mean over its K rows."""
    rows = len(tf.nest.flatten(x)[0])
    gradients = []
    for i in range(rows):
        one = Rows((x, y, sample_weight)).map(lambda t, i=i: t[i : i + 1])
        with tf.GradientTape() as tape:
            y_pred = model_internals.call_model(model, one[0])
            with layer_internals.without_weight_regularizers(model.trainable_variables):
                loss = model.compute_loss(one[0], one[1], y_pred, one[2], training=True)
        gradients.append(flatten(model, tape.gradient(loss, values(model))))
    return np.mean(np.reshape(gradients, [rows // views, views, -1]), axis=1)


def values(model):
    """Returns the trained `tf.Variable`s."""
    return [v.value for v in model.trainable_variables]


def flatten(model, gradients):
    """Returns one float64 vector of a list of gradients, with zeros for None."""
    parts = []
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        gradient = tf.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
        parts.append(np.asarray(tf.cast(gradient, "float64")).ravel())
    return np.concatenate(parts)


def run_engine(model, x, y, sample_weight=None, views=1, mode="chosen", jit_compile=False):
    """Returns norms [B], and a function from factors to the weighted sum, as numpy."""
    model(x)
    engine = make_engine(model, x, views, mode)
    return _trace(engine, model, x, y, sample_weight, views, jit_compile)


def _trace(engine, model, x, y, sample_weight, views, jit_compile):
    @tf.function(jit_compile=jit_compile, autograph=False)
    def norms_and_sums(factors):
        result = engine(x, y, sample_weight)
        return tf.sqrt(result.squared_norms), result.clipped_sums(factors)

    def weighted(factors):
        return flatten(model, norms_and_sums(tf.constant(factors, "float32"))[1])

    rows = len(tf.nest.flatten(y)[0]) // views
    return np.asarray(norms_and_sums(tf.ones([rows]))[0], "float64"), weighted


def assert_matches_batches_of_one(
    model,
    x,
    y,
    sample_weight=None,
    views=1,
    mode="chosen",
    jit_compile=False,
    tolerance=1e-5,
    norms=("auto", "instantiate", "ghost"),
):
    """Fails unless norms and weighted sums equal the oracle's of batches of one, to `tolerance`.

    Each kind of `norms` is forced in turn, and skipped if every layer has been compared that way.
    """
    x, y, sample_weight = tf.nest.map_structure(
        lambda t: t if t is None else tf.convert_to_tensor(t), (x, y, sample_weight)
    )
    if not model.compiled:
        model.compile(loss=keras.losses.MeanSquaredError())
    wanted = batch_of_one_gradients(model, x, y, sample_weight, views)
    factors = np.random.default_rng(0).uniform(0.0, 1.0, len(wanted))
    factors[0] = 0.0
    engine, compared = make_engine(model, x, views, mode), set()
    for kind in norms if mode != "whole" else ("auto",):
        if compared and compared >= _ways(engine.choices, kind):
            continue
        with forced_norms(kind):
            bounds, weighted = _trace(engine, model, x, y, sample_weight, views, jit_compile)
            weighted_sum = weighted(factors)
        if mode != "whole":
            compared |= _ways(engine.choices, kind)
        exact = np.linalg.norm(wanted, axis=1)
        # Norms include an allowance for rounding: they may exceed the exact ones, and are never
        # below.
        nearest = np.clip(exact, bounds / (1 + ALLOWANCE), bounds)
        np.testing.assert_allclose(nearest, exact, rtol=tolerance, atol=tolerance * 1e-2)
        scale, sums, end = np.abs(wanted).max() * len(wanted), factors @ wanted, 0
        for variable in model.trainable_variables:
            start, end = end, end + int(np.prod(variable.shape))
            np.testing.assert_allclose(
                weighted_sum[start:end],
                sums[start:end],
                rtol=tolerance,
                atol=tolerance * scale,
                err_msg=f"{variable.path}, norms by {kind!r}",
            )


def _ways(choices, kind):
    """Returns a set of each layer's number and way if `kind` is forced: `(0, "ghost/ordinary")`."""
    ways = set()
    for number, choice in enumerate(choices):
        seconds = choice.alternatives
        allowed = [way for way in seconds if way.startswith(kind)] or list(seconds)
        ways.add((number, min(allowed, key=seconds.get)))
    return ways
