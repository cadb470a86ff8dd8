"""Layers in parallel against batches of one, for tests of the rules that serve them."""

import keras
import numpy as np
import tensorflow as tf
from oracle import assert_matches_batches_of_one

from tfdpx.per_example import explain

FORCED = ("instantiate", "ghost")  # A single layer has no other.


def check_layers(cases, views, norms=FORCED, prepare=None, **kwargs):
    """Compares parallel layers in one model with batches of one; their inputs have a gradient too.

    Args:
        cases: List of pairs of a layer, or a function of a tensor, and the shape of an example; a
            third entry, a number of tokens, makes inputs of integers below it.
        views: Int, rows of an example.
        norms: As for `assert_matches_batches_of_one`.
        prepare: Function without arguments that changes the built layers, or None.
        **kwargs: As for `assert_matches_batches_of_one`.

    Returns:
        Dict from the name of a layer to the rule that served it, as `explain` lists them.
    """
    rng = np.random.default_rng(0)
    inputs, x, outputs = [], [], []
    for layer, shape, *tokens in cases:
        inputs.append(keras.Input(shape, dtype="int32" if tokens else None))
        if tokens:
            x.append(rng.integers(0, *tokens, size=(3 * views, *shape)))
            hidden = inputs[-1]
        else:
            x.append(rng.normal(size=(3 * views, *shape)).astype("float32"))
            hidden = 0.9 * inputs[-1] + 0.1
        outputs += [keras.layers.Flatten()(output) for output in tf.nest.flatten(layer(hidden))]
    joined = keras.layers.Concatenate()(outputs) if len(outputs) > 1 else outputs[0]
    hidden = keras.layers.Activation("tanh")(joined)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    if prepare:
        prepare()
    # Biases and factors of LoRA that start at zero would hide some mistakes.
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.1, size=variable.shape))
    y = rng.normal(size=(3 * views, 2)).astype("float32")
    assert_matches_batches_of_one(model, x, y, views=views, norms=norms, **kwargs)
    return {choice.layer: choice.rule for choice in explain(model, x, views)}
