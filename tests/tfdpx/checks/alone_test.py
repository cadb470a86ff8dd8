"""Models that mix examples in every way that we know: each example adds what it adds alone."""

import importlib
import itertools
import pathlib
import sys

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow_but
from mixers import Between, mean

import tfdpx
from tfdpx import checks

sys.path.append(str(pathlib.Path(__file__).parents[1] / "independence"))
MIXERS = importlib.import_module("mixers_test").MIXERS

layers = keras.layers
ROWS, CLIP = 5, 0.5
KEPT = []


def custom(forward, backward):
    @tf.custom_gradient
    def apply(x):
        return forward(x), lambda g: backward(x, g)

    return apply


def kept(x):
    """Adds what an earlier call left, and leaves this one's mean."""
    if KEPT:
        x = x + KEPT[-1]
    KEPT.append(mean(x))
    return x


COUNTER = itertools.count()


class Late(layers.Layer):
    """Makes a variable as it is called, and writes the batch into it."""

    def call(self, x):
        if not hasattr(self, "late"):
            with tf.init_scope():
                self.late = tf.Variable(tf.zeros([4]), trainable=False)
        self.late.assign(tf.reduce_mean(x, 0))
        return x + self.late


def counted_in_a_table(x):
    with tf.init_scope():
        table = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, -1, -2)
    table.insert(tf.range(1, 2, dtype=tf.int64), tf.shape(x, tf.int64)[:1])
    return x * tf.cast(table.lookup(tf.constant([1], tf.int64)), x.dtype)


def queued(x):
    with tf.init_scope():
        queue = tf.queue.FIFOQueue(10, [tf.float32], [[4]])
    queue.enqueue(tf.reduce_mean(x, 0))
    return x + queue.dequeue()


def contrastive(x):
    z = tf.math.l2_normalize(x, axis=1)
    return x * tf.linalg.diag_part(tf.nn.softmax(z @ tf.transpose(z)))[:, None]


def straight_through(x):
    hard = tf.cast(x > tf.reduce_mean(x), x.dtype)
    return x + tf.stop_gradient(hard - x)


def ragged(x):
    rows = tf.RaggedTensor.from_tensor(x)
    return rows.to_tensor() + tf.reduce_max(rows.values)


def sparse(x):
    return tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(x @ tf.transpose(x)), x)


def overridden(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x) ** 2
    return x + tape.gradient(y, x)


def through_a_data_set(x):
    return tf.data.Dataset.from_tensor_slices(x).reduce(tf.zeros([4]), lambda a, b: a + b) + x


MORE = {
    "gradient summed over the batch": custom(tf.identity, lambda x, g: g + tf.reduce_sum(g, 0)),
    "gradient reversed": custom(tf.identity, lambda x, g: g[::-1]),
    "gradient times the mean": custom(tf.identity, lambda x, g: g * mean(x)),
    "gradient ranked": custom(tf.identity, lambda x, g: tf.sort(g, 0)),
    "gradient centred": custom(tf.tanh, lambda x, g: g - mean(g)),
    "gradient normalized": custom(tf.identity, lambda x, g: g / tf.norm(g)),
    "gradient of a norm": lambda x: x / tf.norm(x),
    "gradient taken within": overridden,
    "kept from call to call": kept,
    "kept by a counter": lambda x: x * float(1 + next(COUNTER) % 2) + mean(x),
    "straight through": straight_through,
    "stopped mean": lambda x: x + tf.stop_gradient(mean(x)),
    "stopped sum as a scale": lambda x: x * tf.stop_gradient(tf.reduce_sum(x)),
    "contrastive": contrastive,
    "pairs": lambda x: x + tf.reduce_sum(tf.einsum("bi,ci->bc", x, x), 1, keepdims=True),
    "distances": lambda x: x * tf.reduce_min(
        tf.reduce_sum((x[:, None] - x[None]) ** 2, 2) + 9 * tf.eye(tf.shape(x)[0]), 1
    )[:, None],
    "nearest neighbour": lambda x: tf.gather(x, tf.argmax(x @ tf.transpose(x), 1)),
    "mapped": lambda x: tf.map_fn(lambda row: row * tf.reduce_mean(x), x),
    "folded": lambda x: x + tf.foldl(lambda a, row: 0.5 * a + row, x),
    "folded from the right": lambda x: x + tf.foldr(lambda a, row: 0.5 * a + row, x),
    "scanned backwards": lambda x: tf.scan(lambda a, row: a + row, x, reverse=True),
    "vectorized": lambda x: tf.vectorized_map(lambda row: row + tf.reduce_sum(x, 0), x),
    "inner function of the batch": lambda x: x - tf.function(mean, autograph=False)(x),
    "two inner functions": lambda x: tf.function(
        lambda a: tf.function(mean, autograph=False)(a) + a, autograph=False)(x),
    "recomputed": lambda x: tf.recompute_grad(lambda a: a - mean(a))(x),
    "median": lambda x: x - tf.sort(x, 0)[tf.shape(x)[0] // 2],
    "quantile": lambda x: x * tf.cast(x > tf.sort(x, 0)[-1:], x.dtype) + x,
    "histogram": lambda x: x * tf.cast(
        tf.histogram_fixed_width(x, [-1.0, 1.0], 4), x.dtype)[None],
    "bincount": lambda x: x * tf.cast(
        tf.math.bincount(tf.cast(x[:, 0] > 0, tf.int32), minlength=4, maxlength=4), x.dtype),
    "unique of rows": lambda x: x * tf.cast(
        tf.unique_with_counts(tf.cast(x[:, 0] > 0, tf.int32)).count[0], x.dtype),
    "places where": lambda x: x * tf.cast(tf.shape(tf.where(x > 0))[0], x.dtype),
    "ragged": ragged,
    "sparse": sparse,
    "qr": lambda x: x @ tf.linalg.qr(tf.transpose(x) @ x + tf.eye(4))[0],
    "whitened": lambda x: x @ tf.linalg.inv(tf.linalg.cholesky(tf.transpose(x) @ x + tf.eye(4))),
    "singular values": lambda x: x / (1.0 + tf.linalg.svd(x, compute_uv=False)[0]),
    "fourier": lambda x: x + tf.math.real(
        tf.transpose(tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64)))),
    "nested branch": lambda x: tf.cond(
        tf.reduce_max(x) > 0, lambda: tf.cond(x[0, 0] > 0, lambda: x - mean(x), lambda: -x),
        lambda: x),
    "case": lambda x: tf.switch_case(
        tf.cast(tf.reduce_max(x) > 1, tf.int32), [lambda: x, lambda: x - mean(x)]),
    "a loop over the rows": lambda x: tf.while_loop(
        lambda i, y: i < tf.shape(x)[0], lambda i, y: (i + 1, y + x[i]), (0, x))[1],
    "scattered": lambda x: x + tf.scatter_nd(
        tf.argsort(x[:, 0])[:, None], x, tf.shape(x)),
    "scatter added": lambda x: tf.tensor_scatter_nd_add(x, [[0]], x[-1:]),
    "one-hot of the places": lambda x: tf.one_hot(tf.range(tf.shape(x)[0]) % 4, 4) + x,
    "dropped with the batch": lambda x: x * tf.cast(tf.random.uniform([1, 4]) > 0.5, x.dtype),
    "a draw by data": lambda x: x + tf.random.stateless_normal(
        tf.shape(x), tf.cast(tf.stack([tf.reduce_sum(x), 1.0]), tf.int32)),
    "table": counted_in_a_table,
    "queue": queued,
    "data set": through_a_data_set,
    "written in time": lambda x: x * tf.cast(tf.timestamp() > 0, x.dtype) + mean(x),
    "asserted": lambda x: (tf.debugging.assert_less(tf.reduce_max(x), 1e9), x - mean(x))[1],
    "printed": lambda x: (tf.print(tf.shape(x), output_stream="file:///dev/null"), x + mean(x))[1],
}  # fmt: skip


class InOrder(layers.Layer):
    """Runs a layer on the rows in sorted order: outputs are in order, but not what is captured."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4, "tanh")

    def call(self, x):
        order = tf.argsort(tf.reduce_sum(x, axis=1))
        return tf.gather(self.inner(tf.gather(x, order)), tf.argsort(order))


class Positions(layers.Layer):
    """As in Keras's own tutorial: a variable whose rows are no examples."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(4, 4)

    def call(self, x):
        return tf.reduce_sum(x[..., None] * self.table(keras.ops.arange(4)), axis=1)


LAYERS = {
    "late variable": Late,
    "rows in order": InOrder,
    "positions": Positions,
    "attention": lambda: layers.Lambda(
        lambda x: layers.Attention()([x[None], x[None]])[0], output_shape=(4,)
    ),
    "recurrent along the batch": lambda: layers.Lambda(
        lambda x: x + tf.math.cumsum(tf.tanh(x)), output_shape=(4,)
    ),
    "normalized by the batch": lambda: layers.Lambda(
        lambda x: (x - mean(x)) / (tf.math.reduce_std(x, 0) + 1e-1), output_shape=(4,)
    ),
}


LOSSES = {
    "centred": lambda y, p: tf.reduce_mean((p - mean(p)) ** 2, 1) + tf.reduce_sum(p**2, 1),
    "largest": lambda y, p: tf.reduce_max(tf.reduce_sum(p**2, 1)),
    "contrastive": lambda y, p: tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(p)[0]), p @ tf.transpose(p)
    ),
    "ranking": lambda y, p: tf.reduce_sum(tf.nn.relu(p[:, None] - p[None])) + tf.reduce_sum(p**2),
    "norm of all": lambda y, p: tf.norm(p),
    "cumulative": lambda y, p: tf.reduce_sum(tf.cumsum(p, 0) ** 2, 1),
}
SEEDED = ("random", "draw", "dropped", "shuffled", "kept", "time")
# Of those that `mixers_test` shows not to be proved, every sixth trains.
MIXERS = dict(list(MIXERS.items())[::6])
EVERY = {
    **{name: lambda f=f: (Between(f), None) for name, f in {**MIXERS, **MORE}.items()},
    **{f"layer: {name}": lambda make=make: (make(), None) for name, make in LAYERS.items()},
    **{f"loss: {name}": lambda f=f: (layers.Identity(), f) for name, f in LOSSES.items()},
}
# TensorFlow or Keras raises an error as they are traced.
UNRUNNABLE = {"kept from call to call", "table", "unstacked", "vectorized"}
# All of them take minutes.
QUICK = [name for name in list(EVERY)[7::12] if name != "the same random numbers"]
QUICK += ["layer: rows in order", "layer: positions"]


def clipped(made, x, y):
    """The clipped gradient of a batch of one, as Keras takes it, in units of the clip."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(made.compute_loss(y=y, y_pred=made(x, training=True)))
    gradients = tape.gradient(
        loss, [v.value for v in made.trainable_variables], unconnected_gradients="zero"
    )
    flat = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients])
    return flat / max(np.linalg.norm(flat), CLIP) if np.isfinite(flat).all() else 0 * flat


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(EVERY, *QUICK))
def test_each_example_adds_what_it_adds_alone_or_the_model_is_refused(name):
    KEPT.clear()
    layer, loss = EVERY[name]()
    optimizer = tfdpx.DPSGD(1.0, batch_size=ROWS, noise_multiplier=0.0, l2_norm_clip=CLIP)
    made = small.model(optimizer, [layers.Dense(4), layer, layers.Dense(3)], loss)
    x, y = small.data(ROWS)
    try:
        made.build((None, 6))
        moved = -small.step(made, x, y)
    except Exception as error:
        # Some cannot be traced for one example, and say so themselves.
        assert isinstance(error, checks.UnfitForPrivacy) or name in UNRUNNABLE, error
        assert int(optimizer.iterations) == 0
        return
    assert np.linalg.norm(moved) <= 1 + 1e-5
    before = small.weights(made) + moved
    for variable, part in zip(made.trainable_variables, split(made, before), strict=True):
        variable.assign(part)
    if not any(word in name for word in SEEDED):
        wanted = sum(clipped(made, x[i : i + 1], y[i : i + 1]) for i in range(ROWS))
        np.testing.assert_allclose(moved, wanted / ROWS, rtol=1e-3, atol=1e-5)


def split(made, flat):
    """A vector of all trained weights, in their shapes."""
    shapes = [tuple(v.shape) for v in made.trainable_variables]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True)]
