"""A trained model and its training examples are freed when no name refers to them."""

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


def arrays(model, training_plan, source):
    model.fit(X, Y, steps_per_epoch=2, verbose=0)


def batches(model, training_plan, source):
    model.fit(training_plan.batches(X, Y), steps_per_epoch=2, verbose=0)


def items(model, training_plan, source):
    model.fit(training_plan.batches(tfdpx.RandomAccess(source)), steps_per_epoch=2, verbose=0)


def in_part(model, training_plan, source):
    iterator = iter(training_plan.batches(tfdpx.RandomAccess(source)))
    gc.collect()  # Only the iterator keeps the data set: it has no name.
    next(iterator)


def people(model, training_plan, source):
    model.fit(X, Y, user_ids=IDS, verbose=0)


def measured(model, training_plan, source):
    model.fit(X, Y, validation_data=(X[:8] + 1, Y[:8]), steps_per_epoch=2, verbose=0)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "training_plan"),
    [
        ((arrays, batches, items, in_part, measured), plan(steps=12)),
        ((batches, items, in_part), plan(steps=12, sampling="shuffle")),
        ((people,), plan(num_examples=32, unit="user")),
    ],
)
def test_nothing_is_held_of_a_model_that_was_trained(ways, training_plan):
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(tfdpx.DPSGD(0.1, plan=training_plan), "mse", jit_compile=False)
    sources = [Source(zip(X, Y, strict=True)) for _ in ways]
    for way, source in zip(ways, sources, strict=True):
        way(model, training_plan, source)
    held = [weakref.ref(item) for item in (model, model.optimizer, *sources)]
    del model, source, sources
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def test_a_data_set_that_nothing_refers_to_says_so():
    nested = tf.data.Dataset.from_tensors(plan().batches(X, Y)).flat_map(lambda batches: batches)
    gc.collect()
    # TensorFlow 2.22 has freed the function too, so it fails by itself.
    message = "keep it in a variable|Could not find callback"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        next(iter(nested))
