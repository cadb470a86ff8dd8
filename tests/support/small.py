"""A small compiled model and data, for tests of the private step."""

import keras
import numpy as np
import seeds

import tfdpx


def data(rows=16, features=6, classes=3):
    """Draws vectors [rows, features] and labels [rows]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, features)).astype("float32")
    return x, rng.integers(0, classes, size=rows)


def model(optimizer=None, layers=None, loss=None, compile_arguments=None, **arguments):
    """Returns a compiled model, with the same weights each time unless `layers` is a list."""
    seeds.fix(7)
    built = keras.Sequential(
        layers()
        if callable(layers)
        else layers or [keras.layers.Dense(5, "relu"), keras.layers.Dense(3)]
    )
    if optimizer is None:
        arguments = {"batch_size": 16, "noise_multiplier": 1.0, "seed": 1, **arguments}
        optimizer = tfdpx.DPSGD(arguments.pop("learning_rate", 1.0), **arguments)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    built.compile(optimizer=optimizer, loss=loss, **(compile_arguments or {}))
    return built


def weights(model):
    """Returns all trainable weights as one vector."""
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def step(model, x, y, sample_weight=None):
    """Makes one update through Keras; returns the change of the weights."""
    model.build((None, *x.shape[1:])) if not model.built else None
    before = weights(model)
    model.train_on_batch(x, y, sample_weight=sample_weight)
    return weights(model) - before


def step_views(model, views, y):
    """Calls `step` for data [rows, views, ...] of a model that is built already."""
    before = weights(model)
    model.train_on_batch(views, y)
    return weights(model) - before
