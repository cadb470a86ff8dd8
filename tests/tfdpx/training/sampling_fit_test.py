"""The batches under `keras.Model.fit`: epochs, resumption, replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import Examples


def make(kind, capacity=20, **arguments):
    examples = Examples(np.arange(20), np.arange(20) % 3)
    arguments = {"capacity": capacity, "steps": 12, "seed": 0} | arguments
    if kind == "shuffle":
        return sampled_batches.shuffled_batches(examples, batch_size=6, **arguments)
    return sampled_batches.poisson_batches(examples, sampling_probability=0.3, **arguments)


class OrderedModel(keras.Sequential):
    """Reads a batch before it counts the step, as tfdpx's optimizers do.

    Keras alone leaves the order open: at the end of the data it counts a step too many.
    """

    def train_step(self, data):
        with tf.control_dependencies(tf.nest.flatten(data)):
            return super().train_step(data)


def make_model(*layers):
    model = OrderedModel(
        [keras.Input([]), *layers, keras.layers.Reshape([1]), keras.layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3), loss)
    return model


def test_overflow_is_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="more examples than the batch has"):
        make_model().fit(make("poisson", capacity=6), verbose=0)


@pytest.mark.parametrize("kind", ["poisson", "shuffle"])
def test_fit(kind):
    model = make_model()
    model.fit(make(kind), verbose=0)
    assert model.optimizer.iterations == 12


@pytest.mark.parametrize("kind", ["poisson", "shuffle"])
def test_fit_goes_on_over_epochs_of_steps(kind):
    model = make_model()
    model.fit(make(kind), epochs=3, steps_per_epoch=4, verbose=0)
    assert model.optimizer.iterations == 12


@pytest.mark.parametrize("kind", ["poisson", "shuffle"])
def test_fit_again_goes_on_from_a_variable(kind):
    seen = []

    class Record(keras.layers.Layer):
        def call(self, inputs):
            tf.py_function(lambda x: seen.append(x.numpy()), [inputs], [])
            return inputs

    model = make_model(Record())
    dataset = make(kind, start=model.optimizer.iterations)
    model.fit(dataset, epochs=2, steps_per_epoch=3, verbose=0)
    model.fit(dataset, epochs=3, steps_per_epoch=2, verbose=0)
    assert model.optimizer.iterations == 12
    for found, (drawn, _, _) in zip(seen, make(kind), strict=True):
        np.testing.assert_array_equal(found, drawn)


def test_fit_without_targets():
    class Autoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, inputs):
            return self.dense(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y is None and sample_weight.shape == [10]
            return tf.reduce_sum(tf.reduce_sum((y_pred - x) ** 2, axis=1) * sample_weight)

    examples = Examples(np.ones([10, 2], "float32"))
    dataset = sampled_batches.poisson_batches(
        examples, sampling_probability=0.5, capacity=10, steps=3, seed=0
    )
    model = Autoencoder()
    model.compile("sgd")
    model.fit(dataset, verbose=0)
    assert model.optimizer.iterations == 3
