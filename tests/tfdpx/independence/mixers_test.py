"""What lets examples interact is never proved, and what only looks like it, is."""

import functools

import keras
import mixers
import numpy as np
import pytest
import small
import tensorflow as tf
import traced

from tfdpx.independence import independence_of

layers = keras.layers
ROWS = 16


def square(x):
    return tf.reshape(x, [-1, 2, 2])


@functools.cache
def memory():
    with tf.init_scope():
        return tf.Variable(tf.zeros([4]))


def assigned(x):
    memory().assign(tf.reduce_mean(x, axis=0))
    return x + memory()


@functools.cache
def seeds():
    with tf.init_scope():
        return tf.Variable([1, 2])


def one_seed_for_two_shapes(x):
    """Number k of each draw is that of row k in one, and of row k // 2 in the other."""
    seed, rows = tf.identity(seeds()), tf.shape(x)[0]
    seeds().assign_add([0, 1])
    one, other = (tf.random.stateless_uniform([rows, n], seed) for n in (1, 2))
    return x + one + other[:, 1:]


def assigned_in_a_branch(x):
    def remember():
        memory().assign(tf.ones([4]))
        return 1.0

    tf.cond(tf.reduce_max(x) > 0, remember, lambda: 0.0)
    return x * 2.0


def sum_in_a_loop(x):
    def body(i, total):
        return i + 1, total + x[i]

    _, total = tf.while_loop(lambda i, _: i < tf.shape(x)[0], body, (0, tf.zeros([4])))
    return x + total


def carried_sum(x):
    """A loop over another axis, which carries a sum over the rows."""
    _, total = tf.while_loop(
        lambda i, _: i < 4,
        lambda i, total: (i + 1, total + tf.reduce_sum(x[:, i])),
        (0, tf.constant(0.0)),
    )
    return x * total


def swapped_in_a_loop(x):
    """Two loop variables change places, of which one is the other upside down."""
    _, a, _ = tf.while_loop(
        lambda i, a, b: i < 3, lambda i, a, b: (i + 1, b, a), (0, x, tf.reverse(x, [0]))
    )
    return a


def data_decides_how_long(x):
    _, y = tf.while_loop(
        lambda i, y: tf.reduce_max(y) < 100.0, lambda i, y: (i + 1, y * 2.0 + 1.0), (0, x)
    )
    return y


def of_the_last_round(x):
    """A list in which each element is that of the round before, of other rows."""
    kept = tf.TensorArray(tf.float32, 4, element_shape=[None])
    kept = kept.unstack(tf.transpose(tf.roll(x, 1, axis=0)))
    return tf.transpose(kept.stack()) + x


def list_of_examples(x):
    return tf.map_fn(lambda row: row + tf.reduce_sum(x), x)


def one_after_the_other(x):
    """A recurrent network along the batch."""
    return tf.scan(lambda a, row: 0.5 * a + row, x)


def partitions(x):
    parts = tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2)
    return tf.concat(parts, axis=0)


def stitched(x):
    parts = tf.dynamic_partition(x, tf.cast(x[:, 0] > 0, tf.int32), 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), tf.cast(x[:, 0] > 0, tf.int32), 2)
    return tf.dynamic_stitch(places[::-1], parts)


def fused_batch_norm(x):
    y, *_ = tf.raw_ops.FusedBatchNormV3(
        x=tf.reshape(x, [-1, 1, 1, 4]), scale=tf.ones([4]), offset=tf.zeros([4]), mean=[],
        variance=[], is_training=True,
    )  # fmt: skip
    return tf.reshape(y, [-1, 4])


def from_a_table(x):
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    table.insert(tf.cast(x[:, 0], tf.int64), x[:, 1])
    return x + table.lookup(tf.cast(x[:, 0], tf.int64))[:, tf.newaxis]


def seeded_alike(x):
    """The same random numbers in every step, by the place of a row."""
    return x * tf.random.stateless_uniform([tf.shape(x)[0], 1], [1, 2])


def sorted_random_numbers(x):
    drawn = tf.sort(tf.random.uniform([tf.shape(x)[0], 1]), axis=0)
    return x * drawn


def picture_contrast(x):
    """An axis of rows taken for the height of one picture."""
    return tf.image.adjust_contrast(tf.reshape(x, [-1, 4, 1]), 2.0)[..., 0]


def embedded_place(x):
    table = tf.random.stateless_normal([64, 4], [1, 2])
    return x + tf.gather(table, tf.range(tf.shape(x)[0]))


def shaped_by_data(x):
    """Rows are joined in twos where an entry is large."""
    wide = tf.where(tf.reduce_max(x) > 0, 8, 4)
    return tf.reshape(tf.reverse(tf.reshape(x, [-1, wide]), [-1]), [-1, 4])


MIXERS = {
    **mixers.MIXES,
    "batch mean": lambda x: x - mixers.mean(x),
    "sum over all": lambda x: x + tf.reduce_sum(x),
    "softmax over the batch": lambda x: tf.nn.softmax(x, axis=0),
    "softmax over a vector": lambda x: x * tf.nn.softmax(x[:, 0])[:, tf.newaxis],
    "reversed": lambda x: tf.reverse(x, axis=[0]),
    "reversed by a slice": lambda x: x[::-1],
    "rolled": lambda x: tf.roll(x, 1, axis=0),
    "the first row for all": lambda x: x + x[:1],
    "the last row for all": lambda x: x + x[-1],
    "rows gathered": lambda x: tf.gather(x, (tf.range(tf.shape(x)[0]) + 1) % tf.shape(x)[0]),
    "rows gathered by data": lambda x: tf.gather(
        x, tf.cast(tf.abs(x[:, 0]), tf.int32) % tf.shape(x)[0]
    ),
    "rows gathered, n-dimensional": lambda x: tf.gather_nd(
        x, tf.zeros([tf.shape(x)[0], 1], tf.int32)
    ),
    "x times x transposed": lambda x: x @ tf.transpose(x) @ x,
    "einsum over the batch": lambda x: tf.einsum("bi,bj->ij", x, x)[0] + x,
    "einsum of pairs": lambda x: tf.einsum("bi,ci->bc", x, x) @ x,
    "reshape that mixes": lambda x: tf.reshape(tf.transpose(x), tf.shape(x)),
    "rows joined in twos": lambda x: tf.reshape(
        tf.reverse(tf.reshape(x, [-1, 8]), axis=[1]), [-1, 4]
    ),
    "flattened sum": lambda x: x + tf.cumsum(tf.reshape(x, [-1]))[0],
    "transposed cumsum": lambda x: tf.transpose(tf.cumsum(tf.transpose(x), axis=1)),
    "sorted": lambda x: tf.sort(x, axis=0),
    "cumsum": lambda x: tf.cumsum(x, axis=0),
    "largest of all": lambda x: x * tf.cast(
        tf.range(tf.shape(x, tf.int64)[0]) == tf.argmax(x[:, 0]), tf.float32
    )[:, tf.newaxis],
    "ranks": lambda x: x * tf.cast(tf.argsort(x[:, 0]), tf.float32)[:, tf.newaxis],
    "top of the batch": lambda x: x * tf.reduce_min(tf.math.top_k(x[:, 0], k=1).values),
    "segment sum": lambda x: tf.gather(
        tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0] > 0, tf.int32), 2),
        tf.cast(x[:, 0] > 0, tf.int32),
    ),
    "dynamic partition": partitions,
    "dynamic stitch": stitched,
    "shuffled": lambda x: tf.random.shuffle(x),
    "py_function": lambda x: tf.ensure_shape(tf.py_function(lambda t: t[::-1], [x], x.dtype),
                                             x.shape),
    "numpy_function": lambda x: tf.ensure_shape(
        tf.numpy_function(lambda t: t[::-1], [x], x.dtype), x.shape
    ),
    "numpy_function, stateless": lambda x: tf.ensure_shape(
        tf.numpy_function(lambda t: t[::-1], [x], x.dtype, stateful=False), x.shape
    ),
    "variable assigned": assigned,
    "variable assigned in a branch": assigned_in_a_branch,
    "sum in a loop": sum_in_a_loop,
    "carried sum": carried_sum,
    "swapped in a loop": swapped_in_a_loop,
    "loop as long as data decide": data_decides_how_long,
    "list of others": of_the_last_round,
    "list of examples": list_of_examples,
    "scan over the batch": one_after_the_other,
    "concatenated": lambda x: tf.concat([x[1:], x[:1]], axis=0),
    "padded": lambda x: tf.pad(x, [[1, 0], [0, 0]])[:-1] + x,
    "tiled": lambda x: tf.tile(x, [2, 1])[: tf.shape(x)[0]] + tf.tile(x, [2, 1])[1],
    "repeated": lambda x: tf.repeat(x, 2, axis=0)[: tf.shape(x)[0]],
    "unstacked": lambda x: tf.stack(tf.unstack(tf.ensure_shape(x, [ROWS, 4]))[::-1]),
    "split": lambda x: tf.concat(tf.split(tf.ensure_shape(x, [ROWS, 4]), 2)[::-1], axis=0),
    "fused batch norm": fused_batch_norm,
    "convolved along the batch": lambda x: tf.nn.conv1d(
        x[tf.newaxis], tf.ones([3, 4, 4]), 1, "SAME"
    )[0],
    "pooled along the batch": lambda x: tf.nn.max_pool1d(x[tf.newaxis], 3, 1, "SAME")[0],
    "written into a table": from_a_table,
    "number of rows": lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    "the same random numbers": seeded_alike,
    "sorted random numbers": sorted_random_numbers,
    "place in a table": embedded_place,
    "a table as long as the batch": lambda x: x + tf.broadcast_to(
        tf.random.stateless_normal([ROWS, 4], [1, 2]), tf.shape(x)
    ),
    "a table as long as the batch, added": lambda x: x + tf.random.stateless_normal(
        [ROWS, 4], [1, 2]
    ),
    "a table that is cut": lambda x: x + tf.random.stateless_normal([64, 4], [1, 2])[
        : tf.shape(x)[0]
    ],
    "a table that is repeated": lambda x: x + tf.tile(
        tf.random.stateless_normal([2, 4], [1, 2]), [(tf.shape(x)[0] + 1) // 2, 1]
    )[: tf.shape(x)[0]],
    "a draw for all": lambda x: x * tf.random.uniform([]),
    "a draw for all, along the features": lambda x: x + tf.random.normal([1, 4]),
    "a draw for all that chooses a branch": lambda x: tf.cond(
        tf.random.uniform([]) > 0.5, lambda: x, lambda: -x
    ),
    "draws between bounds that are drawn for all": lambda x: x
    + tf.random.uniform(tf.shape(x), tf.random.uniform([]), 2.0),
    "one seed for draws of two shapes": one_seed_for_two_shapes,
    "the mean of draws": lambda x: x
    + tf.reduce_mean(tf.random.uniform(tf.shape(x)), axis=0, keepdims=True),
    "tables in a branch": lambda x: x + tf.cond(
        tf.random.uniform([]) > 0.5,
        lambda: tf.zeros_like(x),
        lambda: tf.random.stateless_normal([ROWS, 4], [1, 2]),
    ),
    "triangle over the batch": lambda x: tf.linalg.band_part(
        x @ tf.transpose(x), -1, 0
    ) @ x,
    "shape by the data": shaped_by_data,
    "picture": picture_contrast,
    "covariance": lambda x: x @ tf.linalg.inv(tf.transpose(x) @ x + tf.eye(4)),
    "unique": lambda x: x + tf.cast(tf.size(tf.unique(tf.reshape(x, [-1])).y), x.dtype),
    "boolean mask": lambda x: tf.pad(
        tf.boolean_mask(x, x[:, 0] > 0),
        [[0, tf.shape(x)[0] - tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))], [0, 0]],
    ),
    "transposed for a while": lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x))),
    "broadcast to pairs": lambda x: tf.reduce_max(x[:, tf.newaxis] - x[tf.newaxis], axis=1),
    "moved to an axis as long": lambda x: tf.reduce_max(
        tf.broadcast_to(x[tf.newaxis], [tf.shape(x)[0], tf.shape(x)[0], 4]), axis=1
    ),
    "branch on the mean": mixers.switched_on(lambda x: tf.reduce_mean(x) > 0),
    "inner function": lambda x: tf.function(mixers.scaled_by_the_largest, autograph=False)(x),
}  # fmt: skip
# With a number of rows that is known, some of these do nothing wrong, or do not exist.
NOT_FOR_SOME = {
    "large batches, in the graph",
    "batch size modulo",
    "number of rows",
}


def proved(functions, rows=None):
    """Names of the functions that are proved."""
    return {name for name, function in functions.items() if not traced.reasons(function, rows=rows)}


def test_a_mixer_is_never_proved():
    assert not proved(MIXERS)
    assert proved(MIXERS, ROWS) <= NOT_FOR_SOME


INDEPENDENT = {
    "softmax": tf.nn.softmax,
    "transposed and back": lambda x: tf.transpose(tf.transpose(x) * 2.0),
    "sorted entries": lambda x: tf.sort(x, axis=1),
    "cumsum of entries": lambda x: tf.cumsum(x, axis=1),
    "reshaped and back": lambda x: tf.reshape(tf.reshape(x, [-1]) * 2.0, tf.shape(x)),
    "reshaped by its own shape": lambda x: tf.reshape(
        tf.reshape(x, [tf.shape(x)[0] * 2, 2]), [tf.shape(x)[0], -1]
    ),
    "squares": lambda x: tf.reshape(tf.reshape(x, [-1, 2, 2]) @ tf.reshape(x, [-1, 2, 2]), [-1, 4]),
    "loop over entries": lambda x: tf.while_loop(
        lambda i, y: i < 4, lambda i, y: (i + 1, y * 2.0 + x), (0, tf.zeros_like(x))
    )[1],
    "branch": lambda x: tf.cond(tf.identity(0.7) > 0.5, lambda: x, lambda: -x),
    "inner function": lambda x: tf.function(lambda t: t * 2.0, autograph=False)(x),
    "random": lambda x: x * tf.random.uniform(tf.shape(x)),
    "picked by each row": lambda x: tf.gather(
        x, tf.cast(tf.abs(x), tf.int32) % 4, batch_dims=1, axis=1
    ),
    "looked up": lambda x: tf.gather(tf.ones([9, 4]), tf.cast(tf.abs(x[:, 0]), tf.int32) % 9),
    "list of entries": lambda x: tf.transpose(
        tf.map_fn(lambda column: column * 2.0, tf.transpose(x))
    ),
    "chosen row by row": lambda x: tf.where(x[:, :1] > 0, x, tf.nn.relu(x) + 1.0),
    "padded and cut": lambda x: tf.pad(x, [[0, 0], [1, 1]])[:, 1:-1],
    "stacked": lambda x: tf.unstack(tf.stack([x, x * 2.0], axis=1), axis=1)[0],
    "a constant for each": lambda x: tf.concat([x, tf.ones([tf.shape(x)[0], 1])], axis=1)[:, 1:],
}


def test_what_is_independent_by_row_is_proved():
    assert proved(INDEPENDENT) == set(INDEPENDENT)
    # As many rows as a row has entries: no axis may be taken for the other.
    assert proved(INDEPENDENT, rows=4) == set(INDEPENDENT)


def test_the_mixers_do_mix():
    """What the tests above plant is what they say, wherever data can show it."""
    for name in ("batch mean", "sorted", "reshape that mixes", "swapped in a loop", "picture"):
        concrete = traced.trace(MIXERS[name], (4,))
        assert traced.mixes(concrete, (4,)), name
    for name in INDEPENDENT:
        if name not in ("branch", "random"):
            assert not traced.mixes(traced.trace(INDEPENDENT[name], (4,)), (4,)), name


def custom(gradient):
    @tf.custom_gradient
    def apply(x):
        return x * 2.0, lambda g: gradient(x, g)

    return apply


GRADIENTS = {
    "times inputs": (lambda x, g: g * x, True),
    "clipped": (lambda x, g: tf.clip_by_value(g, -1.0, 1.0), True),
    "clipped by row": (lambda x, g: g / tf.maximum(1.0, tf.norm(g, axis=1, keepdims=True)), True),
    "normalized": (lambda x, g: g / tf.norm(g), False),
    "times the mean": (lambda x, g: g * tf.reduce_mean(x), False),
    "reversed": (lambda x, g: tf.reverse(g, [0]), False),
    "of other rows": (lambda x, g: tf.zeros([5, 4]), False),
}


@pytest.mark.parametrize("where", ["plain", "function", "loop"])
def test_gradients_written_by_hand_are_walked(where):
    placed = {
        "plain": lambda f: f,
        "function": lambda f: lambda x: tf.function(f, autograph=False)(x),
        "loop": lambda f: (
            lambda x: tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, f(y)), (0, x))[1]
        ),
    }[where]
    functions = {name: placed(custom(gradient)) for name, (gradient, _) in GRADIENTS.items()}
    assert proved(functions) == {
        name for name, (_, independent) in GRADIENTS.items() if independent
    }


def test_the_reason_names_the_layer():
    stack = [layers.Dense(4), mixers.Between(mixers.sorted_and_back, name="the_culprit")]
    model = small.model(layers=[*stack, layers.Dense(3)])
    model.build((None, 6))
    found = independence_of(model, tf.zeros([2, 6]))
    assert found.verdict == "alone" and "the_culprit" in found.reasons[0]
    assert str(found).startswith("alone: each example is computed")


def test_arguments_are_checked():
    model = small.model()
    with pytest.raises(ValueError, match="Argument `x` must be given.*x=None"):
        independence_of(model)
    with pytest.raises(ValueError, match="Argument `rows`.*rows=1"):
        independence_of(model, np.zeros((2, 6)), rows=1)
