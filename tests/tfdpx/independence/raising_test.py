"""Whatever an example holds, it cannot end a run: it adds zero and is counted, or is refused."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow, slow_but

from tfdpx import checks

layers = keras.layers
ROWS = 6


def lookup(kind, vocabulary):
    return kind(vocabulary=vocabulary, num_oov_indices=0)


def checked(x):
    with tf.control_dependencies([tf.debugging.assert_less(x, 100.0)]):
        return tf.nn.relu(x)


def checked_in_a_branch(x):
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(x < 100.0), [x])]):
        return tf.nn.relu(x)


def words():
    return layers.TextVectorization(vocabulary=list("abcde"), output_sequence_length=3)


def embedded(tokens=9):
    return [layers.Embedding(tokens, 4), layers.Flatten(), layers.Dense(3)]


def by(function, **arguments):
    return layers.Lambda(function, **arguments)


TOKENS = np.random.default_rng(0).integers(0, 9, (ROWS, 3)).astype("int32")
NUMBERS = np.random.default_rng(1).normal(size=(ROWS, 4)).astype("float32")
TEXTS = np.array([["a", "b"], ["b", "c"], ["c", "a"]] * 2, object)


def with_first(data, *rows):
    return np.concatenate([np.array(rows, data.dtype), data[len(rows) :]])


# Layers, good data, and first rows, one or more, that TensorFlow raises for somewhere.
MADE_ZERO = {
    "tokens beyond the table": (embedded, TOKENS, [9, 1, 2], [1, -10, 2]),
    "token among many": (
        lambda: [layers.Embedding(9, 4), layers.GlobalMaxPooling1D(), layers.Dense(3)],
        np.repeat(TOKENS, 100, axis=1),
        [2**31 - 1] * 300,
    ),
    "unknown word": (
        lambda: [lookup(layers.StringLookup, ["a", "b", "c"]), *embedded()], TEXTS, ["a", "x"]
    ),
    "unknown number": (
        lambda: [lookup(layers.IntegerLookup, list(range(9))), *embedded()], TOKENS, [1, 2, 77]
    ),
    "category": (lambda: [layers.CategoryEncoding(9), layers.Dense(3)], TOKENS, [1, -3, 2]),
    "assertion": (lambda: [by(checked), layers.Dense(3)], NUMBERS, [1, 2, 3, 1e3]),
    "assertion of all": (lambda: [by(checked_in_a_branch), layers.Dense(3)], NUMBERS, [1e3] * 4),
    "numbers are checked": (
        lambda: [by(lambda x: tf.debugging.check_numerics(x, "no number")), layers.Dense(3)],
        NUMBERS, [1, 2, 3, np.inf],
    ),
    "gathered by data": (
        lambda: [
            by(lambda x: tf.gather(x, tf.cast(tf.abs(x), "int32") % 8, batch_dims=1)),
            layers.Dense(3),
        ],
        NUMBERS / 10, [5, 6, 7, 0],
    ),
    "gathered one by one": (
        lambda: [
            by(lambda x: tf.gather_nd(x, tf.cast(x[:, :1, None], "int32"), batch_dims=1)),
            layers.Dense(3),
        ],
        NUMBERS / 10, [4, 0, 0, 0],
    ),
    "summed by data": (
        lambda: [
            by(lambda x: tf.vectorized_map(
                lambda row: tf.math.unsorted_segment_sum(row, tf.cast(tf.abs(row), "int32"), 5), x
            ), output_shape=(5,)),
            layers.Dense(3),
        ],
        NUMBERS, [5, 0, 0, 1e6],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Each example of model")
@pytest.mark.parametrize(
    "name",
    slow_but(MADE_ZERO, "tokens beyond the table"),
)
def test_an_invalid_example_adds_zero_and_is_counted(name):
    stack, data, *invalid = MADE_ZERO[name]
    x, (_, y) = with_first(data, *invalid), small.data(ROWS)
    x, data = (tf.constant(t.tolist()) if t.dtype == object else t for t in (x, data))
    present = (np.arange(ROWS) >= len(invalid)).astype("float32")
    made = small.model(layers=stack, noise_multiplier=0.0)
    made(data)
    start = made.get_weights()
    found = small.step(made, x, y, np.ones(ROWS, "float32"))
    assert int(made.optimizer.nonfinite_examples) == len(invalid)
    made.set_weights(start)
    wanted = small.step(made, data, y, present)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    assert np.abs(wanted).max() > 0.01


VALID = {
    "sort": lambda x: tf.sort(x, axis=1),
    "largest": lambda x: tf.math.top_k(x, 2).values,
    "along an axis": lambda x: keras.ops.take_along_axis(x, keras.ops.argsort(x, axis=1), axis=1),
    "one-hot": lambda x: x * tf.one_hot(tf.cast(x[:, 0], "int32"), 4),
    "product": lambda x: tf.math.cumprod(x, axis=1),
}


def together(x):
    return tf.concat([function(x) for function in VALID.values()], axis=1)


def largest_by_row(x):
    return tf.map_fn(lambda row: tf.math.top_k(row, 2).values, x)


@pytest.mark.filterwarnings("ignore:Each example of model")
@pytest.mark.parametrize("function", [together, slow(largest_by_row)])
def test_what_raises_for_no_value_trains(function):
    stack = [layers.Dense(4), by(function), layers.Dense(3)]
    made = small.model(layers=stack, noise_multiplier=0.0)
    made.build((None, 4))
    assert np.abs(small.step(made, NUMBERS, small.data(ROWS)[1])).max() > 1e-3


REFUSED = {
    "MatrixInverse": lambda x: tf.linalg.inv(tf.reshape(x, [-1, 2, 2])),
    "MatrixSolve": lambda x: tf.linalg.solve(*[tf.reshape(x, [-1, 2, 2])] * 2),
    "FloorMod": lambda x: tf.cast(7 % tf.cast(x, "int32"), "float32"),
    "Slice": lambda x: tf.map_fn(lambda row: tf.slice(row, tf.cast(row[:1], "int32"), [1]), x),
    "FloorDiv": lambda x: tf.switch_case(
        tf.cast(x[0, 0] > 0, "int32"),
        [lambda: x + tf.cast(7 // tf.cast(x, "int32"), "float32"), lambda: x, lambda: -x],
    ),
    "StringToNumber": lambda x: tf.strings.to_number(tf.strings.as_string(x)),
    "DynamicPartition": lambda x: tf.concat(
        tf.dynamic_partition(x, tf.cast(x[:, 0], "int32"), 2), axis=0
    ),
}


@pytest.mark.filterwarnings("ignore:Each example of model")
@pytest.mark.parametrize("name", slow_but(REFUSED, "MatrixInverse"))
def test_an_operation_that_an_example_could_end_the_run_with_is_refused_by_name(name):
    stack = [by(REFUSED[name]), layers.Flatten(), layers.Dense(3)]
    with pytest.raises(checks.UnfitForPrivacy, match=f"could end the run.*of type {name}"):
        small.step(small.model(layers=stack), NUMBERS, small.data(ROWS)[1])


@pytest.mark.parametrize("eagerly", slow_but([False, True], True))
def test_labels_beyond_the_classes_of_a_metric_are_left_out(eagerly):
    x, y = small.data(ROWS)
    metrics = [keras.metrics.MeanIoU(3, sparse_y_pred=False), "accuracy"]
    arguments = {"metrics": metrics, "run_eagerly": eagerly}
    made = small.model(compile_arguments=arguments)
    small.step(made, x, np.where(np.arange(ROWS) == 2, 7, y))
    assert int(made.optimizer.nonfinite_examples) == 1
    assert float(tf.reduce_sum(made.metrics[1].metrics[0].total_cm)) == ROWS - 1


@pytest.mark.slow
def test_texts_are_split_into_words_for_each_by_itself():
    texts, (_, y) = ["a b c d", "", "zz e", "b", "c c c", "d a"], small.data(ROWS)

    made = small.model(
        layers=[keras.Input((), dtype="string"), words(), *embedded()], noise_multiplier=0.0
    )
    start = made.get_weights()

    def step(x, y):
        made.set_weights(start)
        return small.step(made, tf.constant(x), y)

    each = sum(step([text] * ROWS, np.repeat(y[i], ROWS)) for i, text in enumerate(texts))
    np.testing.assert_allclose(step(texts, y), each / ROWS, rtol=1e-3, atol=1e-6)
    assert made.optimizer.independence[0].verdict == "proved"
