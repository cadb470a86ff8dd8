"""No example influences the contribution of another, in any model, mapped or batched."""

import keras
import numpy as np
import oracle
import pytest
import small
import tensorflow as tf
from cases import slow_but
from engines import make_engine

import tfdpx.layers
from tfdpx import checks
from tfdpx._keras import model_internals
from tfdpx.per_example import rowwise

layers, ours = keras.layers, tfdpx.layers
CLIP, SIZES = 0.5, (5, 9)


class Between(layers.Layer):
    """Applies a function of the whole batch."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)

    def compute_output_shape(self, shape):
        return shape


def mean(x):
    return tf.reduce_mean(x, axis=0, keepdims=True)


def gradient(function):
    """The identity with another gradient."""
    return tf.custom_gradient(lambda x: (tf.identity(x), function))


FUNCTIONS = {
    "batch mean": lambda x: x - mean(x),
    "sorted": lambda x: tf.sort(x, axis=0),
    "large batches": lambda x: x - mean(x) if x.shape[0] is None or x.shape[0] > 8 else x,
    "branch": lambda x: tf.cond(tf.reduce_max(x) > 1.0, lambda: x - mean(x), lambda: x),
    "gradient reversed": gradient(lambda g: g[::-1]),
    "gradient clipped over the batch": gradient(lambda g: g / tf.maximum(1e-3, tf.norm(g))),
}


def variable():
    total = tf.Variable(tf.zeros([4]))
    return Between(lambda x: x + total.assign(mean(x)[0]))


def queue():
    means = tf.queue.FIFOQueue(10, [tf.float32], [[1, 4]])
    return Between(lambda x: (means.enqueue(mean(x)), x + means.dequeue())[1])


LOSSES = {
    "contrastive": lambda y, p: -tf.linalg.diag_part(tf.nn.log_softmax(p @ tf.transpose(p))),
    "ranks": lambda y, p: tf.reduce_sum(tf.nn.relu(p[:, None] - p[None])) + tf.reduce_sum(p**2),
}
MIXING = {
    **{name: (lambda f=f: Between(f), None) for name, f in FUNCTIONS.items()},
    **{f"loss: {name}": (layers.Identity, f) for name, f in LOSSES.items()},
    "variable": (variable, None),
    "queue": (queue, None),
}
FAST = ("batch mean", "large batches", "sorted", "queue", "variable", "loss: ranks")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(MIXING, *FAST))
def test_an_example_adds_what_it_adds_alone_or_the_model_is_refused(name):
    make, loss = MIXING[name]
    stack = [keras.Input((6,)), layers.Dense(4), make(), layers.Dense(3)]
    arguments = {"noise_multiplier": 0.0, "l2_norm_clip": CLIP, "batch_size": max(SIZES)}
    model = small.model(layers=stack, loss=loss, **arguments)
    for rows in SIZES:
        before, (x, y) = model.get_weights(), small.data(rows)
        try:
            moved = -small.step(model, x, y) * max(SIZES)
        except checks.UnfitForPrivacy:
            assert int(model.optimizer.iterations) == 0
            return
        model.set_weights(before)
        alone = oracle.batch_of_one_gradients(model, *map(tf.constant, (x, y)), None, 1)
        wanted = sum(gradient / max(np.linalg.norm(gradient), CLIP) for gradient in alone)
        np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=1e-4)


def image(*arguments, **keywords):
    return lambda kind, x: kind(*arguments, **keywords)(x)


def sequence(*arguments, **keywords):
    return lambda kind, x: kind(*arguments, **keywords)(layers.Reshape((36, 4))(x))


def masked(*arguments):
    return lambda kind, x: kind(*arguments)(layers.Masking()(layers.Reshape((36, 4))(x)))


def pair(kind, x):
    return kind()([x, layers.Conv2D(4, 1)(x)])


def attend(kind, x):
    x = layers.Masking()(layers.ReLU(threshold=3.0)(layers.Reshape((36, 4))(x)))
    mask = model_internals.NOT_EQUAL()(layers.Dense(36, activation="relu")(x), 0.0)
    masked = kind(2, 2, 1)(x, key=x, value=x, attention_mask=mask, use_causal_mask=True)
    plain = kind(2, 2, 1, dropout=0.5)(x, masked)
    return layers.Add()([plain, kind(1, 2, 2)(x, x, use_causal_mask=True)])


# For each entry of the list, a function of its class and of an image [6, 6, 4].
KNOWN = {
    **dict.fromkeys((layers.Add, layers.Average, layers.Multiply, layers.Subtract), pair),
    **dict.fromkeys((layers.Flatten, layers.LeakyReLU, layers.ReLU), image()),
    **dict.fromkeys((layers.Cropping2D, layers.ZeroPadding2D), image()),
    **dict.fromkeys((layers.GlobalAveragePooling2D, layers.GlobalMaxPooling2D), image()),
    **dict.fromkeys((layers.GlobalAveragePooling1D, layers.GlobalMaxPooling1D), sequence()),
    **dict.fromkeys((layers.AveragePooling1D, layers.MaxPooling1D), sequence(2)),
    **dict.fromkeys((layers.AveragePooling2D, layers.MaxPooling2D), image(2)),
    **dict.fromkeys((layers.GroupNormalization, ours.GroupNorm), image(2)),
    **dict.fromkeys((layers.Conv2D, ours.WSConv2D), image(2, 3, padding="same")),
    **dict.fromkeys((ours.SkipInit, ours.UnitNormWithConstant, layers.LayerNormalization), image()),
    **dict.fromkeys(model_internals.ARITHMETIC, lambda kind, x: kind()(2.0, kind()(x, x * x))),
    **dict.fromkeys((layers.GRU, layers.LSTM, layers.SimpleRNN), masked(3)),
    layers.Bidirectional: lambda kind, x: masked(layers.GRU(2, recurrent_dropout=0.5))(kind, x),
    layers.RNN: lambda kind, x: masked([layers.LSTMCell(2), layers.GRUCell(2)])(kind, x),
    **dict.fromkeys((layers.MultiHeadAttention, layers.GroupQueryAttention), attend),
    layers.Masking: sequence(), model_internals.NOT_EQUAL: lambda kind, x: kind()(x, 2.0),
    model_internals.ANY: lambda kind, x: kind(axis=-1)(x != 2.0),
    layers.Activation: image("softmax"), layers.BatchNormalization: image(trainable=False),
    layers.Concatenate: pair,
    layers.Dense: image(4, "relu"), layers.DepthwiseConv2D: image(3), layers.Dropout: image(0.5),
    layers.Embedding: image(7, 2), layers.InputLayer: lambda kind, x: x,
    layers.Permute: image((3, 1, 2)), layers.Rescaling: image([0.5, 1.0, 2.0, 3.0], 1.0),
    layers.Reshape: image((36, 4)), layers.Resizing: image(3, 3),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Layer 'flatten")
def test_layers_that_are_known_keep_rows_apart_to_the_bit():
    assert set(KNOWN) == {*rowwise._layers, *rowwise._operations}
    inputs = keras.Input((6, 6, 4))
    features = [layers.Flatten()(apply(kind, inputs)) for kind, apply in KNOWN.items()]
    model = keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(features)))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.random.default_rng(0).uniform(1, 6, (5, 6, 6, 4)).astype("float32"), tf.range(5) % 3
    engine = make_engine(model, tf.constant(x))
    assert engine.obstacle is None

    @tf.function(autograph=False)
    def others(x):
        output = engine(x, y, None)
        return [t[1:] for t in (output.y_pred, output.losses, output.squared_norms)]

    wanted = others(x)
    for factor in (1e4, np.nan):
        x[0] *= factor
        for changed, unchanged in zip(others(x), wanted, strict=True):
            np.testing.assert_array_equal(changed, unchanged)
            assert np.isfinite(unchanged).all()


Registered = type("TransformerEncoder", (Between,), {})
keras.saving.register_keras_serializable("keras_hub")(Registered)
Mine = type("Mine", (keras.Model,), {"call": lambda self, x, **_: x - mean(x)})


def with_call(part):
    part.call = centre
    return part


def with_activation(equation):
    return layers.EinsumDense(equation, (1, 2, 2), activation=centre)


def one_way(layer):
    """Returns a `Bidirectional` layer with another call in one of its directions."""
    both = layers.Bidirectional(layer)
    with_call(both.backward_layer)
    return both


def attention(kind=layers.MultiHeadAttention, masks=(), changes=(), **arguments):
    """Returns a function of x to what an attention layer makes of it, after changes behind Keras.

    Args:
        kind: Class.
        masks: Pairs of an argument of a call and a function of x to its value.
        changes: Pairs of an attribute and its value.
        **arguments: Of the constructor.
    """

    def attend(x):
        layer = kind(2, 2, 2, **arguments)
        call = {"query": x, "value": x, **{name: mask(x) for name, mask in masks}}
        layer(**call)
        vars(layer).update(changes)
        return layer(**call)

    return attend


def of_two_ranks(x):
    """Calls a layer that was built for a higher rank, so it adds an axis in front of the batch."""
    layer = layers.Normalization(mean=[0.0] * 4, variance=[1.0] * 4)
    layer(layers.Reshape((1, 1, 4))(x))
    return layer(x)


def centred(x, longer):
    """Subtracts the mean over the second axis of `longer`, which is the batch."""
    return vector(x) - layers.GlobalAveragePooling1D("channels_last")(
        layers.Reshape((-1, 4))(longer)
    )


def centre(x, **_):
    return x - mean(x)


def borrowed(x):
    return centre(x)


borrowed.__module__ = keras.activations.relu.__module__


def channels_first(x):
    keras.config.set_image_data_format("channels_first")
    return centred(x, layers.Rescaling([1.0])(vector(x)))


vector = layers.Flatten(data_format="channels_last")
# Functions of an input [1, 4] to features or a model.
PLANTED = {
    "operands of other ranks": lambda x: x + vector(x),
    "layer of other ranks": lambda x: layers.Add()([x, vector(x)]),
    "call of an instance": lambda x: with_call(layers.Dense(4))(x),
    "call of a model": lambda x: with_call(keras.Sequential([x, layers.Dense(4)])),
    "registered name": lambda x: Registered(centre)(x),
    "subclass of a model": lambda x: Mine(x, layers.Dense(4)(x)),
    "subclass of Dense": lambda x: type("Mine", (layers.Dense,), {})(4)(x),
    "activation of a cell": lambda x: layers.LSTM(4, activation=centre)(x),
    "subclass of a cell": lambda x: layers.RNN(type("Mine", (layers.GRUCell,), {})(4))(x),
    "call of a direction": lambda x: one_way(layers.LSTM(4, return_sequences=True))(x),
    "any of a batch": lambda x: vector(x) * model_internals.ANY()(x != 2.0),
    "mask of features": lambda x: layers.Masking(np.zeros([3, 1, 4]))(x),
    "activation": lambda x: layers.Dense(4, activation=centre)(x),
    "function of Keras's module": lambda x: layers.Dense(4, activation=borrowed)(x),
    "epsilon with axes": lambda x: layers.LayerNormalization(epsilon=[[[1e-3]]])(x),
    "lambda": lambda x: layers.Lambda(centre)(x),
    "mask of a batch": lambda x: layers.Dropout(0.5, noise_shape=(1, 1, 4))(x),
    "scale by row": lambda x: layers.Rescaling([[1.0], [2.0], [3.0]])(vector(x)),
    "offset by row": lambda x: layers.Rescaling(1.0, [[1.0], [2.0], [3.0]])(vector(x)),
    "constant by row": lambda x: vector(x) + np.ones((3, 1, 4), "float32"),
    "normalization": lambda x: layers.LayerNormalization([0, 2], center=False, scale=False)(x),
    "concatenation": lambda x: layers.Concatenate(axis=0)([x, x]),
    "batch normalization": lambda x: layers.BatchNormalization(scale=False, center=False)(x),
    "quantized": lambda x: (m := keras.Model(x, layers.Dense(3)(x)), m.quantize("int8"))[0],
    "one image": lambda x: layers.Resizing(1, 1)(x),
    "layer of two ranks": lambda x: centred(x, of_two_ranks(x)),
    "mask of a model": lambda x: keras.Model(x, layers.GlobalAveragePooling1D()(x))(x, mask=x),
    "channels first": channels_first,
    "gate": attention(use_gate=True),
    "window": attention(sliding_window=1),
    "attention over features": attention(attention_axes=2),
    "attention of images": lambda x: attention()(layers.Reshape((1, 1, 4))(x)),
    "mask of two axes": attention(masks=[("key", lambda x: x), ("attention_mask", vector)]),
    "mask of keys": attention(masks=[("value_mask", vector)]),
    "mask of ones": attention(masks=[("attention_mask", lambda x: np.ones((3, 1, 1)))]),
    **{
        f"another {name} of {kind.__name__}": attention(kind, changes=[(name, value)])
        for kind in (layers.MultiHeadAttention, layers.GroupQueryAttention)
        for name, value in (
            ("_compute_attention", lambda *_, **__: None),
            ("_combine_equation", "acbe,aecd->dbca"),
            ("_dropout_layer", layers.Dropout(0.5, noise_shape=(1, 1, 1, 1))),
            ("_softmax", layers.Softmax(axis=0)),
            ("_value_dense", layers.EinsumDense("abc,cde->bade", (1, 2, 2), bias_axes="e")),
            ("_value_dense", type("Mine", (layers.EinsumDense,), {})("abc,cde->abde", (1, 2, 2))),
        )
    },
    "scales by row": attention(changes=[("_inverse_sqrt_key_dim", [[[[0.1]]], [[[0.2]]]])]),
    "activation of queries": lambda x: attention(
        changes=[("_query_dense", with_activation("abc,cde->abde"))]
    )(x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLANTED)
def test_models_that_may_mix_are_not_batched(name, request):
    request.addfinalizer(lambda: keras.config.set_image_data_format("channels_last"))
    x = keras.Input((1, 4))
    model = PLANTED[name](x)
    if not isinstance(model, keras.Model):
        model = keras.Model(x, layers.Dense(3)(model))
    assert rowwise.find_obstacle(model) or make_engine(model, tf.ones((3, 1, 4))).obstacle


@pytest.mark.parametrize("rank", [2, 3])
def test_rows_as_many_as_positions_are_not_taken_for_them(rank):
    """Keras expands a mask of two axes to [1, 1, rows, positions], with scores by position."""
    rng = np.random.default_rng(0)
    x, mask = keras.Input((4, 3)), keras.Input((4,) * (rank - 1), dtype="bool")
    attended = layers.MultiHeadAttention(2, 2)(x, x, attention_mask=mask)
    model = keras.Model([x, mask], layers.Dense(2)(layers.Flatten()(attended)))
    rows = [rng.normal(size=(4, 4, 3)).astype("float32"), rng.random((4,) * rank) < 0.6]
    model.compile(loss="mse")
    assert (make_engine(model, list(map(tf.constant, rows))).obstacle is None) == (rank == 3)
    y = rng.normal(size=(4, 2)).astype("float32")
    oracle.assert_matches_batches_of_one(model, rows, y, norms=["auto"])
