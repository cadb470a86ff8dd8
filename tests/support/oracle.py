"""The oracle of the per-example engine: ordinary gradients of batches of one example."""

import keras
import numpy as np
import tensorflow as tf
from engines import make_engine

from tfdpx._keras import layer_internals, model_internals
from tfdpx.per_example.cost_model import forced_norms
from tfdpx.per_example.rows import Rows

# How far norms may be above the exact ones: the terms of the longest sum times 2^-24, about.
ALLOWANCE = 3e-4


def batch_of_one_gradients(model, x, y, sample_weight, views):
    """[B, P] float64: each example's flat gradient, the mean of ordinary ones over its K rows."""
    rows = len(tf.nest.flatten(y)[0])
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
    """The `tf.Variable`s that are trained."""
    return [v.value for v in model.trainable_variables]


def flatten(model, gradients):
    """One float64 vector of a list of gradients, zeros where there is none."""
    parts = []
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        gradient = tf.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
        parts.append(np.asarray(tf.cast(gradient, "float64")).ravel())
    return np.concatenate(parts)


def run_engine(model, x, y, sample_weight=None, views=1, mode="chosen", jit_compile=False):
    """Norms [B] and the function of factors that gives the weighted sum, as numpy."""
    model(x)
    made = make_engine(model, x, views, mode)
    return _trace(made, model, x, y, sample_weight, views, jit_compile)


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
    """Fails unless norms and weighted sums equal those of batches of one, to `tolerance`.

    They are computed for each kind of `norms`, forced, as long as a layer does it another way than
    before.
    """
    x, y, sample_weight = tf.nest.map_structure(
        lambda t: t if t is None else tf.convert_to_tensor(t), (x, y, sample_weight)
    )
    if not model.compiled:
        model.compile(loss=keras.losses.MeanSquaredError())
    wanted = batch_of_one_gradients(model, x, y, sample_weight, views)
    factors = np.random.default_rng(0).uniform(0.0, 1.0, len(wanted))
    factors[0] = 0.0
    made, compared = make_engine(model, x, views, mode), set()
    for kind in norms if mode != "whole" else ("auto",):
        if compared and compared >= _ways(made.choices, kind):
            continue
        with forced_norms(kind):
            got, weighted = _trace(made, model, x, y, sample_weight, views, jit_compile)
            got_sum = weighted(factors)
        if mode != "whole":
            compared |= _ways(made.choices, kind)
        exact = np.linalg.norm(wanted, axis=1)
        # Norms allow for rounding: they may be above what is exact, and never below.
        nearest = np.clip(exact, got / (1 + ALLOWANCE), got)
        np.testing.assert_allclose(nearest, exact, rtol=tolerance, atol=tolerance * 1e-2)
        scale, sums, end = np.abs(wanted).max() * len(wanted), factors @ wanted, 0
        for variable in model.trainable_variables:
            start, end = end, end + int(np.prod(variable.shape))
            np.testing.assert_allclose(
                got_sum[start:end],
                sums[start:end],
                rtol=tolerance,
                atol=tolerance * scale,
                err_msg=f"{variable.path}, norms by {kind!r}",
            )


def _ways(choices, kind):
    """The set of what each layer does if `kind` is forced, such as (0, "ghost/ordinary")."""
    ways = set()
    for number, choice in enumerate(choices):
        seconds = choice.alternatives
        allowed = [way for way in seconds if way.startswith(kind)] or list(seconds)
        ways.add((number, min(allowed, key=seconds.get)))
    return ways
