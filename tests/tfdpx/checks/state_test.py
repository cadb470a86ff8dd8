"""State that a training pass changes is found in its graph, wherever it is kept."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow, slow_but

import tfdpx
from tfdpx import checks

layers = keras.layers


class Keeps(layers.Layer):
    """Calls `update(x)` in the forward pass and returns `x`."""

    def __init__(self, update):
        super().__init__(name="keeper")
        self.update = update

    def call(self, x):
        self.update(x)
        return x


def tf_variable():
    total = tf.Variable(0.0)
    return lambda x: total.assign_add(tf.reduce_sum(x))


def untracked_variable():
    hidden = [keras.Variable(0.0, trainable=False)]
    return lambda x: hidden[0].assign(keras.ops.sum(x))


def metric():
    mean = keras.metrics.Mean()
    return lambda x: mean.update_state(x)


def table():
    kept = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    return lambda x: kept.insert(tf.zeros([1], tf.int64), x[:1, 0])


def queue():
    kept = tf.queue.FIFOQueue(10_000, [tf.float32], [[]])
    return lambda x: kept.enqueue(tf.reduce_sum(x))


def variable_in_a_loop():
    total = tf.Variable(0.0)

    def body(i):
        with tf.control_dependencies([total.assign_add(1.0)]):
            return [i + 1]

    return lambda x: tf.while_loop(lambda i: i < tf.shape(x)[0], body, [tf.constant(0)])


def variable_in_a_branch():
    total = tf.Variable(0.0)

    def branch(x):
        return tf.cond(
            tf.reduce_max(x) > 1e20, lambda: total.assign(tf.reduce_max(x)), lambda: total.value()
        )

    return branch


def variable_in_a_function():
    total = tf.Variable(0.0)
    return tf.function(lambda x: total.assign_add(tf.reduce_sum(x)))


def variable_scattered():
    total = tf.Variable(tf.zeros([3]))
    return lambda x: total.scatter_nd_add([[1]], [tf.reduce_sum(x)])


UPDATES = [
    tf_variable,
    untracked_variable,
    metric,
    table,
    queue,
    variable_in_a_loop,
    variable_in_a_branch,
    variable_in_a_function,
    variable_scattered,
]


def refused(model, match):
    with pytest.raises(checks.UnfitForPrivacy, match=match):
        model.train_on_batch(*small.data())
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("make", slow_but(UPDATES, untracked_variable, table))
def test_hidden_state_is_refused(make):
    refused(small.model(layers=[Keeps(make()), layers.Dense(3)]), "changes state")


class HasAMetric(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        self.seen.update_state(x)
        return x


@pytest.mark.slow
def test_a_metric_in_a_layer_is_refused():
    refused(small.model(layers=[HasAMetric(), layers.Dense(3)]), "changes state")


@tf.custom_gradient
def identity(x):
    return tf.identity(x), lambda g: g


@pytest.mark.slow
def test_state_that_a_gradient_changes_is_refused():
    total = tf.Variable(0.0)

    @tf.custom_gradient
    def keeps_the_gradient(x):
        def backward(g):
            total.assign_add(tf.reduce_sum(g))
            return g

        return tf.identity(x), backward

    stack = [layers.Dense(4), layers.Lambda(keeps_the_gradient), layers.Dense(3)]
    refused(small.model(layers=stack), "changes state")


def test_a_weight_that_is_assigned_in_the_forward_pass_is_refused():
    class Halves(layers.Dense):
        def call(self, x, training=None):
            self.kernel.assign(0.5 * self.kernel)
            return super().call(x)

    refused(small.model(layers=[Halves(3, name="halves")]), "changes state.*halves")


@pytest.mark.parametrize("door", [tf.py_function, slow(tf.numpy_function)])
def test_python_inside_the_graph_is_refused(door):
    def python(x):
        return tf.reshape(door(lambda a: np.asarray(a), [x], tf.float32), tf.shape(x))

    refused(small.model(layers=[layers.Lambda(python), layers.Dense(3)]), "Python")


def test_python_keeps_nothing_between_eager_steps():
    """The microbatch is traced in eager mode too: Python in it runs once, on no data."""
    memory = []

    def remembers(x):
        memory.append(tf.executing_eagerly() and x.shape[0] == 16)
        return x

    stack = [layers.Lambda(remembers), layers.Dense(3)]
    model = small.model(layers=stack, compile_arguments={"run_eagerly": True})
    model.build((None, 6))
    memory.clear()
    model.fit(*small.data(), verbose=0, epochs=3)
    assert not any(memory)


def test_a_loss_that_keeps_state_is_refused():
    largest = tf.Variable(1e-3)

    def loss(y, y_pred):
        value = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
        largest.assign(tf.maximum(largest, tf.reduce_max(value)))
        return value / largest

    refused(small.model(loss=loss), "loss.*state|state.*loss")


def test_metrics_that_write_weights_are_refused():
    class Steals(keras.Sequential):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.layers[0].bias.assign(tf.reduce_mean(y_pred, axis=0))
            return super().compute_metrics(x, y, y_pred, sample_weight)

    model = Steals([layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0), loss, metrics=["accuracy"])
    refused(model, "compute_metrics.*changes state|metrics.*bias")


@pytest.mark.slow
def test_a_table_that_is_only_read_is_no_state():
    x = np.array([["a"], ["b"]] * 8, dtype=object)
    stack = [
        layers.StringLookup(vocabulary=["a", "b"]),
        layers.Embedding(4, 3),
        layers.Flatten(),
        layers.Dense(3),
    ]
    model = small.model(layers=stack)
    model.fit(tf.constant(x.tolist()), np.arange(16) % 3, verbose=0)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.slow
def test_a_model_with_metrics_of_its_own_trains():
    class Counts(keras.Sequential):
        def __init__(self, *args):
            super().__init__(*args)
            self.seen = keras.metrics.Mean(name="seen")

        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            self.seen.update_state(y_pred)
            return super().compute_metrics(x, y, y_pred, sample_weight)

    model = Counts([layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0), loss, metrics=["accuracy"])
    model.fit(*small.data(), verbose=0)
    assert int(model.optimizer.iterations) == 1
