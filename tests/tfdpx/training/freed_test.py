"""A trained model and the examples that it was trained on are freed when no name is left."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdpx

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = X[:, :1] * 2
IDS = np.arange(64) // 2


class Source(list):
    """Examples that a weak reference can follow."""


def plan(**arguments):
    arguments = {"num_examples": 64, "batch_size": 16, "steps": 3, **arguments}
    return tfdpx.PrivacyPlan(noise_multiplier=1.0, delta=1e-3, **arguments)


def arrays(model, made, source):
    model.fit(X, Y, verbose=0)


def batches(model, made, source):
    model.fit(made.batches(X, Y), verbose=0)


def items(model, made, source):
    model.fit(made.batches(tfdpx.RandomAccess(source)), verbose=0)


def in_part(model, made, source):
    iterator = iter(made.batches(tfdpx.RandomAccess(source)))
    gc.collect()  # The data set has no name: the iterator alone keeps it.
    next(iterator)


def people(model, made, source):
    model.fit(X, Y, user_ids=IDS, verbose=0)


def measured(model, made, source):
    model.fit(X, Y, validation_data=(X[:8], Y[:8]), verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)


@pytest.mark.parametrize(
    ("way", "made"),
    [
        (arrays, plan()),
        (batches, plan()),
        (batches, plan(sampling="shuffle")),
        (items, plan()),
        (items, plan(sampling="shuffle")),
        (in_part, plan()),
        (in_part, plan(sampling="shuffle")),
        (people, plan(num_examples=32, unit="user")),
        (measured, plan()),
    ],
)
def test_nothing_is_held_of_a_model_that_was_trained(way, made):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(tfdpx.DPSGD(0.1, plan=made), "mse", jit_compile=False)
    source = Source(zip(X, Y, strict=True))
    way(model, made, source)
    held = [weakref.ref(each) for each in (model, model.optimizer, source)]
    del model, source
    gc.collect()
    assert [each() for each in held] == [None] * 3


def test_a_data_set_that_nothing_refers_to_says_so():
    nested = tf.data.Dataset.from_tensors(plan().batches(X, Y)).flat_map(lambda batches: batches)
    gc.collect()
    with pytest.raises(tf.errors.InvalidArgumentError, match="keep it in a variable"):
        next(iter(nested))
