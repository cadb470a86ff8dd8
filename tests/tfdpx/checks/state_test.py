"""The graph shows state that a training pass changes and reads again, and operations that raise."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow_but

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


def table():
    store = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    return lambda x: store.insert(tf.zeros([1], tf.int64), x[:1, 0])


def queue():
    store = tf.queue.FIFOQueue(10_000, [tf.float32], [[]])
    return lambda x: store.enqueue(tf.reduce_sum(x))


def in_a_loop():
    total = tf.Variable(0.0)

    def body(i):
        with tf.control_dependencies([total.assign_add(1.0)]):
            return [i + 1]

    return lambda x: tf.while_loop(lambda i: i < tf.shape(x)[0], body, [tf.constant(0)])


def in_a_function():
    return tf.function(tf_variable())


def refused(model, match):
    with pytest.raises(checks.UnfitForPrivacy, match=match):
        model.train_on_batch(*small.data())
    assert int(model.optimizer.iterations) == 0


class Halves(layers.Dense):
    """Assigns to a trained weight in the forward pass."""

    def call(self, x, training=None):
        self.kernel.assign(0.5 * self.kernel)
        return super().call(x)


class Counts(layers.Layer):
    """Counts the calls of training in a weight."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x, training=None):
        if training:
            self.count.assign_add(1.0)
        return x


def by_python(door):
    return layers.Lambda(
        lambda x: tf.reshape(door(lambda a: np.asarray(a), [x], tf.float32), tf.shape(x))
    )


def inverse(x):
    """Multiplies by the inverse of a 2 x 2 matrix, the first four numbers of each row."""
    return x[:, :4] * tf.reshape(tf.linalg.inv(tf.reshape(x[:, :4], [-1, 2, 2])), [-1, 4])


RAISING = {
    "Assert": lambda x: (tf.debugging.Assert(tf.reduce_all(x < 9.0), [x]), x)[1],
    "CheckNumerics": lambda x: tf.debugging.check_numerics(x, "not finite"),
    "StringToNumber": lambda x: tf.strings.to_number(tf.strings.as_string(x)),
    "MatrixInverse": inverse,
}
HIDDEN = (tf_variable, untracked_variable, table, queue, in_a_loop, in_a_function)
# The layer before the last one, and the message.
REFUSED = {
    **{make.__name__: (lambda make=make: Keeps(make()), "changes state") for make in HIDDEN},
    "halves": (lambda: Halves(3, name="halves"), "changes state.*halves"),
    "counts": (lambda: Counts(name="counts"), "changes state.*counts"),
    "py_function": (lambda: by_python(tf.py_function), "Python"),
    "numpy_function": (lambda: by_python(tf.numpy_function), "Python"),
    **{
        name: (lambda raises=raises: layers.Lambda(raises), f"fail for some values.*{name}")
        for name, raises in RAISING.items()
    },
}
FAST = ("untracked_variable", "table", "halves", "py_function", "Assert", "MatrixInverse")


@pytest.mark.parametrize("name", slow_but(REFUSED, *FAST))
def test_state_python_and_operations_that_end_a_run_are_refused(name):
    make, message = REFUSED[name]
    refused(small.model(layers=[make(), layers.Dense(3)]), message)


def test_python_keeps_nothing_between_eager_steps():
    """The microbatch is traced in eager mode too, so Python code in it runs once, on no data."""
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


def crossentropy(y, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)


class Measured(keras.Sequential):
    """A model with a metric `seen` of private examples."""

    def __init__(self, *arguments, name=None):
        super().__init__(*arguments, name="measured")
        self.seen = keras.metrics.Mean(name="seen")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.seen.update_state(y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)

    def factor(self):
        """Returns a number that depends on the metric."""
        return 1.0 + self.seen.result()


class WritesInMetrics(Measured):
    def compute_metrics(self, *arguments, **keywords):
        self.layers[0].bias.assign(self.factor() * tf.ones([3]))
        return super().compute_metrics(*arguments, **keywords)


class LossByItsMean(Measured):
    def compute_loss(self, *arguments, **keywords):
        return super().compute_loss(*arguments, **keywords) / (1 + self._loss_tracker.result())


class Scaled(layers.Layer):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def call(self, x):
        return x * self.factor()


class Schedule(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, step):
        return self.factor()


def measured(reads=None, kind=Measured):
    """Returns a model with one part, `reads`, that uses a number from a metric."""
    models = []

    def factor():
        return models[0].factor()

    penalty = (lambda w: factor() * tf.reduce_sum(w**2)) if reads == "regulariser" else None
    layer = [Scaled(factor)] * (reads == "layer")
    models.append(kind([*layer, layers.Dense(3, kernel_regularizer=penalty)]))
    rate = Schedule(factor) if reads == "schedule" else 0.1
    augment = {"augment": Scaled(factor), "augmult": 1} if reads == "augment" else {}
    optimizer = tfdpx.DPSGD(rate, batch_size=16, noise_multiplier=1.0, **augment)
    loss = (lambda y, p: crossentropy(y, p) * factor()) if reads == "loss" else crossentropy
    models[0].compile(optimizer, loss, metrics=["accuracy"], run_eagerly=reads == "loss")
    return models[0]


@pytest.mark.parametrize("reads", slow_but(("loss", "layer", "regulariser", "augment"), "loss"))
def test_metrics_that_gradients_depend_on_are_refused(reads):
    refused(measured(reads), "reads")


def test_metrics_that_updates_depend_on_or_that_write_weights_are_refused():
    refused(measured("schedule"), "reads")
    refused(measured(kind=LossByItsMean), "reads")
    refused(measured(kind=WritesInMetrics), "changes state|that no noise was added to")
