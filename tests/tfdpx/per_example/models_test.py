"""Whole models against batches of one, and models that the engine must refuse."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import slow
from engines import make_engine
from oracle import assert_matches_batches_of_one

from tfdpx.layers import WSConv2D
from tfdpx.models import WideResNet
from tfdpx.per_example import explain
from tfdpx.per_example.cost_model import forced_norms

layers = keras.layers
AUTO = ("auto",)  # `rules_test.py` compares each rule's ways.


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def tokens_and_targets(rng, rows=4, length=5):
    return rng.integers(0, 7, size=(rows, length)), rng.normal(size=(rows, 2)).astype("float32")


def vectors_and_targets(rng, rows=4):
    return (
        rng.normal(size=(rows, 4)).astype("float32"),
        rng.normal(size=(rows, 2)).astype("float32"),
    )


def transformer():
    inputs = keras.Input((5,))
    x = layers.Embedding(7, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(12, "gelu")(x)))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


class Tied(keras.Model):
    """An embedding that is also the output layer: two units that share a variable."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(7, 3)
        self.head = Transposed(self.embedding)

    def call(self, x, training=None):
        return self.head(tf.reduce_mean(self.embedding(x), axis=1))[:, :2]


class Transposed(layers.Layer):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return self.scale * tf.matmul(x, self.embedding.embeddings, transpose_b=True)


@pytest.mark.parametrize("make", [transformer, Tied], ids=lambda f: f.__name__)
def test_models_of_tokens(make, rng):
    assert_matches_batches_of_one(make(), *tokens_and_targets(rng), norms=AUTO)


def nested_and_frozen():
    inner = keras.Sequential([layers.Dense(3, "relu"), layers.Dense(3)])
    frozen = layers.Dense(3)
    model = keras.Sequential([layers.Input((4,)), frozen, inner, layers.Dense(2)])
    frozen.trainable = False
    return model


def regularized():
    return keras.Sequential([layers.Dense(2, kernel_regularizer=keras.regularizers.L2(10.0))])


class OwnsAVariable(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def build(self, shape):
        self.offset = self.add_weight(shape=(4,), initializer="ones")
        self.dense.build(shape)

    def call(self, x, training=None):
        return self.dense(x * self.offset)


class Positions(keras.Model):
    """Adds an embedding of constant positions to every example, without a batch axis."""

    def __init__(self, count=4):
        super().__init__()
        self.positions, self.count = layers.Embedding(4, 1), count
        self.dense = layers.Dense(2)

    def call(self, x, training=None):
        return self.dense(x[:, : self.count] + self.positions(tf.range(self.count))[:, 0])


def two_positions():
    """As many as the rows of a first trial run."""
    return Positions(2)


class FineTunes(keras.Model):
    """Keras's own pattern: statistics are constants, scale and offset train."""

    def __init__(self):
        super().__init__()
        self.base = keras.Sequential([layers.Dense(3), layers.BatchNormalization()])
        self.head = layers.Dense(2)

    def call(self, x, training=None):
        return self.head(self.base(x, training=False))


class Loop(layers.Layer):
    def __init__(self):
        super().__init__()
        self.cell = layers.Dense(4)

    def build(self, shape):
        self.cell.build(shape)

    def call(self, x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, self.cell(h)), (0, x))[1]


def called_in_a_loop():
    return keras.Sequential([Loop(), layers.Dense(2)])


class CallsAgain(keras.Sequential):
    """A loss that compares the output with that for another input."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_sum((y - y_pred) ** 2) + tf.reduce_sum(self(-x) ** 2)


def with_a_loss_that_calls_it():
    model = CallsAgain([layers.Dense(3, "tanh"), layers.Dense(2)])
    model.compile(loss="mse")
    return model


@pytest.mark.parametrize(
    "make",
    [
        nested_and_frozen, regularized, OwnsAVariable, Positions, two_positions, FineTunes,
        called_in_a_loop, with_a_loss_that_calls_it,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_models_of_vectors(make, rng):
    # As many rows as features and positions, so that no axis can be recognized by its length.
    assert_matches_batches_of_one(make(), *vectors_and_targets(rng), norms=AUTO)


@pytest.mark.parametrize("mode, views", [("chosen", 2), ("mapped", 1), ("mapped", 2), ("whole", 2)])
def test_modes_agree(mode, views, rng):
    model = keras.Sequential(
        [layers.Dense(3, "tanh"), layers.LayerNormalization(), layers.Dense(2)]
    )
    assert_matches_batches_of_one(model, *vectors_and_targets(rng), views=views, mode=mode)


def test_shared_layers(rng):
    inputs = keras.Input((4,))
    dense, conv = layers.Dense(4, "tanh"), WSConv2D(1, (1, 2), padding="same")
    image = conv(layers.Activation("tanh")(conv(layers.Reshape((2, 2, 1))(inputs))))
    joined = layers.Concatenate()([dense(dense(inputs)), layers.Flatten()(image)])
    model = keras.Model(inputs, layers.Dense(2)(joined))
    x, y = vectors_and_targets(rng)
    assert_matches_batches_of_one(model, x, y)
    assert {choice.rule for choice in explain(model, x)} == {"DenseRule", "WSConv2DRule"}


def test_an_embedding_never_makes_a_table_for_each_example(rng):
    inputs = keras.Input((5,), dtype="int32")
    once, twice = layers.Embedding(991, 8), layers.Embedding(977, 8)
    x = once(inputs) + twice(inputs) + twice(977 - 1 - inputs)
    model = keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    x, y = tokens_and_targets(rng)
    assert_matches_batches_of_one(model, x, y)
    assert [choice.rule for choice in explain(model, x)] == [*2 * ["EmbeddingRule"], "DenseRule"]
    engine = make_engine(model, tf.constant(x))

    def step():
        result = engine(tf.constant(x), tf.constant(y), None)
        return result.clipped_sums(result.squared_norms)

    for norms in ("instantiate", "ghost"):
        with forced_norms(norms):
            graph = tf.function(step, autograph=False).get_concrete_function().graph
        shapes = [t.shape for op in graph.get_operations() for t in op.outputs if t.shape.rank]
        assert any(977 in shape for shape in shapes)
        assert not any({977, 991} & set(shape) and len(shape) == 3 for shape in shapes)


@pytest.mark.parametrize(
    "views, mode, norm_before_relu, norms",
    [(1, "chosen", False, AUTO), slow(2, "mapped", True, ("instantiate", "ghost"))],
)
def test_a_wide_resnet(views, mode, norm_before_relu, norms, rng):
    x = rng.normal(size=(2 * views, 8, 8, 3)).astype("float32")
    y = rng.integers(0, 4, size=2 * views)
    model = WideResNet(10, 1, 4, input_shape=(8, 8, 3), norm_before_relu=norm_before_relu)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert_matches_batches_of_one(model, x, y, views=views, mode=mode, norms=norms)
    assert "GenericRule" not in {choice.rule for choice in explain(model, x, views)}


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"])
def test_reductions_and_weights_mean_what_they_mean_in_keras(reduction, rng):
    x, y = vectors_and_targets(rng)
    model = keras.Sequential([layers.Dense(2)])
    model.compile(loss=keras.losses.MeanSquaredError(reduction=reduction))
    weight = rng.uniform(0.5, 2.0, size=4).astype("float32")
    assert_matches_batches_of_one(model, x, y, sample_weight=weight, norms=AUTO)


def test_several_inputs_and_outputs(rng):
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    hidden = layers.Dense(4)(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"c": layers.Dense(1)(hidden), "d": layers.Dense(2)(a)})
    model.compile(loss={"c": "mse", "d": "mae"}, loss_weights={"c": 2.0, "d": 1.0})
    x = {k: rng.normal(size=(4, n)).astype("float32") for k, n in (("a", 3), ("b", 2))}
    y = {k: rng.normal(size=(4, n)).astype("float32") for k, n in (("c", 1), ("d", 2))}
    assert_matches_batches_of_one(model, x, y, norms=AUTO)


@pytest.mark.planted("a layer's gradients are left out")
def test_a_dropped_layer_is_caught(monkeypatch, rng):
    from tfdpx.per_example import engine

    model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    original = engine._join_shared
    monkeypatch.setattr(engine, "_join_shared", lambda rules: original(rules)[1:])
    with pytest.raises(AssertionError, match="Not equal"):
        assert_matches_batches_of_one(model, *vectors_and_targets(rng))
