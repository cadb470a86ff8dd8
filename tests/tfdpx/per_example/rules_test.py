"""Every rule against batches of one, over random shapes, and planted bugs that must be caught."""

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf
from cases import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_matches_batches_of_one, run_engine

from tfdpx.layers import GroupNorm, WSConv2D
from tfdpx.layers.ws_conv2d_rule import WSConv2DRule
from tfdpx.per_example import cost_model, explain, registry, rounding
from tfdpx.per_example.rows import split_views
from tfdpx.per_example.rules import (
    base,
    convolution,
    dense,
    depthwise,
    einsum_dense,
    embedding,
    group_normalization,
    normalization,
    window,
)

layers = keras.layers
few = settings(max_examples=3)
views = st.integers(1, 3)


def batch(rng, shape, outputs, rows):
    return (
        rng.normal(size=(rows, *shape)).astype("float32"),
        rng.normal(size=(rows, outputs)).astype("float32"),
    )


def check_layer(layer, shape, views, seed=0, tokens=None, **kwargs):
    """The layer inside a model, so that its input has a gradient and its output a loss."""
    rng = np.random.default_rng(seed)
    x, y = batch(rng, shape, 2, 3 * views)
    inputs = keras.Input(shape)
    hidden = layers.Rescaling(0.9, 0.1)(inputs)
    if tokens:
        x = rng.integers(0, tokens, size=x.shape)
        hidden = inputs
    outputs = layers.Flatten()(layer(hidden))
    model = keras.Model(inputs, layers.Dense(2)(layers.Activation("tanh")(outputs)))
    # Biases that start at zero would hide some mistakes.
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.1, size=variable.shape))
    assert_matches_batches_of_one(model, x, y, views=views, **kwargs)


@few
@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(1, 5), max_size=2), views)
def test_dense(fan_in, fan_out, positions, views):
    layer = layers.Dense(fan_out, activation="sigmoid")
    check_layer(layer, (*positions, fan_in), views)


@st.composite
def convolutions(draw, grouped=True):
    strides = draw(st.sampled_from([1, 2, (2, 1)]))
    # With one pixel and strides the oracle, TensorFlow's own gradient, destroys memory.
    sizes = [1, 2, 3, (3, 1)] if strides == 1 else [2, 3, (3, 1)]
    return dict(
        kernel_size=draw(st.sampled_from(sizes)),
        strides=strides,
        padding=draw(st.sampled_from(["same", "valid"])),
        dilation_rate=draw(st.sampled_from([1, 2])) if strides == 1 else 1,
        groups=draw(st.sampled_from([1, 2])) if grouped else 1,
        use_bias=draw(st.booleans()),
        activation=draw(st.sampled_from([None, "relu"])),
    )


@few
@given(convolutions(), st.integers(5, 8), st.integers(5, 8), views)
def test_conv2d(arguments, height, width, views):
    check_layer(layers.Conv2D(4, **arguments), (height, width, 2), views)


@few
@given(convolutions(), st.booleans(), views)
def test_ws_conv2d(arguments, use_gain, views):
    # Of two weights standardization leaves nothing to train: a fan-in of at least three.
    check_layer(WSConv2D(4, use_gain=use_gain, **arguments), (6, 7, 6), views)


@pytest.mark.parametrize("conv", [layers.Conv2D, WSConv2D, layers.DepthwiseConv2D])
@pytest.mark.parametrize("padding", ["same", slow("valid")])
def test_a_strided_kernel_of_one_pixel_sees_every_other_pixel(conv, padding):
    x, y = batch(np.random.default_rng(0), (6, 7, 3), 2, 4)
    first = {} if conv is layers.DepthwiseConv2D else {"filters": 5}
    results = []
    for strides, seen in (2, x), (1, x[:, ::2, ::2]):
        seeds.fix(0)
        layer = conv(kernel_size=(1, 1), strides=strides, padding=padding, **first)
        model = keras.Sequential([layer, layers.Flatten(), layers.Dense(2)])
        model.compile(loss="mse")
        norms, weighted = run_engine(model, tf.constant(seen), tf.constant(y), views=2)
        results.append([norms, weighted([1.0, 0.5])])
    for strided, plain in zip(*results, strict=True):
        np.testing.assert_allclose(strided, plain, rtol=1e-5, atol=1e-7)


def test_ws_conv2d_whose_filters_are_nearly_constant():
    # epsilon then holds the scale constant, and one term of the gradient goes away.
    layer = WSConv2D(2, 2, epsilon=1e6)
    check_layer(layer, (4, 4, 2), 1)


@few
@given(st.sampled_from(["same", "valid"]), st.integers(1, 2), st.integers(1, 3), views)
def test_depthwise(padding, strides, multiplier, views):
    layer = layers.DepthwiseConv2D(
        3, strides, padding=padding, depth_multiplier=multiplier, activation="relu"
    )
    check_layer(layer, (5, 6, 3), views)


@few
@given(
    st.sampled_from([1, 2, 4, -1]), st.sampled_from([-1, 1]), st.booleans(), st.booleans(), views
)
def test_group_norm(groups, axis, scale, center, views):
    check_layer(GroupNorm(groups, axis=axis, scale=scale, center=center), (4, 3, 4), views)


@few
@given(st.sampled_from([-1, [-1], [-2, -1], [1, 2]]), st.booleans(), views)
def test_layer_normalization(axis, scale, views):
    check_layer(layers.LayerNormalization(axis=axis, scale=scale), (4, 3), views)


@few
@given(st.sampled_from([-1, [-1], [-2, -1], [1, 2]]), views)
def test_rms_normalization(axis, views):
    check_layer(layers.RMSNormalization(axis=axis), (4, 3), views)


@few
@given(st.integers(1, 9), st.integers(1, 5), views)
def test_embedding(length, width, views):
    # Norms allow for the rounding of each gradient, and those of one token may cancel.
    check_layer(layers.Embedding(4, width), (length,), views, tokens=4, tolerance=1e-3)


EINSUMS = [
    ("abc,cde->abde", (3, 2, 3), "de"),
    ("abde,dec->abc", (3, 5), "c"),
    ("ab,bc->ac", (4,), None),
    ("abc,bcd->abd", (3, 4), "bd"),
    ("abc,cd->abd", (3, 4), "bd"),
    ("...x,xy->...y", (4,), "y"),
]


@pytest.mark.parametrize("equation, output_shape, bias_axes", EINSUMS)
@pytest.mark.parametrize("views", [slow(1), 2])
def test_einsum_dense(equation, output_shape, bias_axes, views):
    shape = {"abde": (3, 2, 4), "ab": (5,), "...x": (5,)}.get(equation.split(",")[0], (3, 4))
    layer = layers.EinsumDense(equation, output_shape, bias_axes=bias_axes, activation="tanh")
    check_layer(layer, shape, views)


GENERIC = [
    (lambda: layers.Conv1D(3, 2, padding="causal"), (6, 2)),
    (lambda: layers.Conv2DTranspose(3, 2, strides=2), (3, 3, 2)),
    (lambda: layers.SeparableConv2D(3, 2), (4, 4, 2)),
    (lambda: layers.Conv3D(2, 2), (3, 3, 3, 2)),
    (lambda: layers.PReLU(), (4, 3)),
    (lambda: layers.TimeDistributed(layers.Dense(3)), (4, 3)),
    (lambda: layers.SimpleRNN(3), (4, 2)),
    (lambda: layers.UnitNormalization(), (4, 3)),
]


@pytest.mark.parametrize(
    "make, shape",
    [GENERIC[0], GENERIC[1], GENERIC[5], *(slow(*g) for g in GENERIC[2:5] + GENERIC[6:])],
)
@pytest.mark.parametrize("views", [slow(1), 2])
def test_layers_without_a_rule_of_their_own(make, shape, views):
    check_layer(make(), shape, views)


@pytest.mark.parametrize(
    "groups, strides, dilation, views", [(1, 2, 1, 1), (2, 1, 1, 3), (2, 1, (2, 3), 1)]
)
def test_convolutions_by_one_call_an_example(monkeypatch, groups, strides, dilation, views):
    # Free launches and slow memory make it the cheapest way, which it is not for small images.
    monkeypatch.setitem(cost_model._RATES, "cpu", (2e11, 1.0, 0.0))
    chosen = []
    rule = convolution.Conv2DRule
    by_calls = rule._by_calls.fget
    monkeypatch.setattr(
        rule, "_by_calls", property(lambda self: chosen.append(by_calls(self)) or chosen[-1])
    )
    layer = WSConv2D(4, 3, strides, groups=groups, dilation_rate=dilation, padding="same")
    check_layer(layer, (6, 5, 4), views, norms=["instantiate"])
    assert chosen and all(chosen)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dilation", [(2, 2), (1, 3), (4, 2)])
def test_phases_of_a_dilation_give_its_kernel_gradient(padding, known, dilation):
    rng = np.random.default_rng(0)
    layer = layers.Conv2D(4, (2, 3), padding=padding, dilation_rate=dilation)
    images = tf.constant(rng.normal(size=(2, 9, 8, 3)), "float32")
    layer.build(images.shape)
    with tf.GradientTape() as tape:
        outputs = layer(images)
        gradients = tf.constant(rng.normal(size=outputs.shape), "float32")
        total = tf.reduce_sum(outputs * gradients)
    specs = [
        tf.TensorSpec(t.shape if known else [2, None, None, t.shape[-1]])
        for t in (images, gradients)
    ]

    @tf.function(input_signature=specs)
    def by_phase(images, gradients):
        images, gradients = window.Window.of(layer).by_phase(images, gradients)
        return tf.raw_ops.Conv2DBackpropFilter(
            input=images,
            filter_sizes=layer.kernel.shape,
            out_backprop=gradients,
            strides=[1, 1, 1, 1],
            padding="VALID",
        )

    expected = tape.gradient(total, layer.kernel.value)
    np.testing.assert_allclose(by_phase(images, gradients), expected, rtol=1e-4, atol=1e-5)


@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["same", "valid"]),
    st.booleans(),
    st.integers(1, 3),
)
@settings(max_examples=20)
def test_the_gram_of_patches(size, strides, dilation, padding, contiguous, views):
    if dilation > 1 and strides > 1:
        strides = 1
    layer = layers.Conv2D(1, size, strides, padding, dilation_rate=dilation)
    images = np.random.default_rng(0).normal(size=(2 * views, 6, 7, 3)).astype("float32")
    seen = window.Window.of(layer)
    patches = tf.reshape(seen.patches(tf.constant(images), contiguous), [2, -1, size * size * 3])
    wanted = tf.matmul(patches, patches, transpose_b=True)
    found = seen.gram(tf.constant(images), views)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_the_cheaper_norm_is_chosen():
    def chosen(layer, shape, views=1):
        model = keras.Sequential([keras.Input(shape), layer])
        model.compile(loss="mse")
        (found,) = explain(model, np.zeros([4 * views, *shape], "float32"), views)
        alternatives = found.alternatives
        assert alternatives[f"{found.norm}/{found.sum}"] == min(alternatives.values())
        return found.norm

    assert chosen(layers.Dense(512), (512,)) == "ghost"
    assert chosen(layers.Dense(8), (512, 8)) == "instantiate"
    assert chosen(layers.Conv2D(256, 3), (8, 8, 256)) == "ghost"
    # As many views are as many positions, of one kernel.
    assert chosen(layers.Conv2D(256, 3), (8, 8, 256), views=16) == "instantiate"
    assert chosen(layers.Conv2D(16, 3), (32, 32, 3)) == "instantiate"
    assert chosen(layers.EinsumDense("abc,cde->abde", (None, 8, 64)), (16, 512)) == "ghost"


@pytest.mark.parametrize(
    "make, shape, tokens",
    [
        (lambda: WSConv2D(4, 3, activation="relu"), (6, 6, 2), None),
        slow(lambda: layers.Conv2D(4, 3, dilation_rate=2, groups=2), (8, 7, 2), None),
        slow(lambda: layers.Embedding(4, 3), (5,), 4),
    ],
)
def test_xla(make, shape, tokens):
    check_layer(make(), shape, 2, tokens=tokens, jit_compile=True)


def _half_bias(self):
    return 0.5 * tf.reduce_sum(self.output_gradients_by_position, axis=[1, 2])


def _forgets_repeats(self):
    return rounding.squared_norms([self._gradients])


def _last_view_only(self):
    views = split_views(self.output_gradients[0], self.num_views)
    views = tf.concat([0.0 * views[:, :-1], views[:, -1:]], axis=1)
    return tf.reshape(views, [views.shape[0], 1, -1, views.shape[-1]])


def _without_diagonal(inputs, gradients, *fans):
    kept = 1.0 - tf.eye(inputs.shape[-1])
    return tf.reduce_sum(inputs * gradients * kept, axis=[2, 3]), tf.zeros(gradients.shape[:2])


side_by_side = depthwise._side_by_side


PLANTED = [
    (dense.DenseRule, "bias_gradients", _half_bias, lambda: layers.Dense(3), (3, 2), None),
    (convolution.Conv2DRule, "clipped_sum", lambda s, f, _: base.Rule.clipped_sum(s, f * 0 + 1),
     lambda: layers.Conv2D(2, 2), (4, 4, 2), None),
    (rounding, "squared_norms_of_products", _without_diagonal,
     lambda: layers.Conv2D(2, 2), (4, 4, 2), None),
    (WSConv2DRule, "measured", lambda s, found: found._replace(squares=found.squares[:, :1]),
     lambda: WSConv2D(2, 2), (4, 4, 2), None),
    (WSConv2DRule, "post_sum_transforms", base.Rule.post_sum_transforms,
     lambda: WSConv2D(2, 2), (4, 4, 2), None),
    (depthwise, "_side_by_side", lambda *a: tf.reverse(side_by_side(*a), [-1]),
     lambda: layers.DepthwiseConv2D(2), (4, 4, 2), None),
    (group_normalization.GroupNormalizationRule, "scale_gradients", lambda s: s.offset_gradients(),
     lambda: GroupNorm(2), (4, 4, 2), None),
    (normalization.LayerNormalizationRule, "scale_gradients", lambda s: s.offset_gradients(),
     lambda: layers.LayerNormalization(), (4, 2), None),
    (normalization.RMSNormalizationRule, "scale_gradients", lambda s: s.offset_gradients(),
     lambda: layers.RMSNormalization(), (4, 2), None),
    (embedding.EmbeddingRule, "ghost_squared_norms", _forgets_repeats,
     lambda: layers.Embedding(2, 3), (6,), 2),
    (embedding.EmbeddingRule, "instantiated_squared_norms", _forgets_repeats,
     lambda: layers.Embedding(2, 3), (6,), 2),
    (einsum_dense.EinsumDenseRule, "output_gradients_by_position", property(_last_view_only),
     lambda: layers.EinsumDense("abc,cd->abd", (4, 3)), (4, 2), None),
]  # fmt: skip


@pytest.mark.parametrize("rule, name, bug, make, shape, tokens", PLANTED)
def test_the_oracle_rejects_planted_bugs(monkeypatch, rule, name, bug, make, shape, tokens):
    monkeypatch.setattr(rule, name, bug)
    with pytest.raises(AssertionError, match="Not equal"):
        check_layer(make(), shape, 2, tokens=tokens)


def test_a_subclass_that_changes_the_call_gets_the_generic_rule():
    class Scaled(layers.Dense):
        def call(self, inputs, training=None):
            return 2.0 * super().call(inputs)

    class ScaledConv(layers.Conv2D):
        def convolution_op(self, inputs, kernel):
            return super().convolution_op(inputs, kernel * kernel)

    check_layer(Scaled(3), (4,), 2)
    check_layer(ScaledConv(3, 2), (4, 4, 2), 2)


def test_lora_gets_the_generic_rule():
    layer = layers.Dense(3)
    layer.build((None, 4))
    layer.enable_lora(2)
    check_layer(layer, (4,), 2)


def test_register_refuses_what_is_no_layer():
    with pytest.raises(TypeError, match="subclasses of keras.Layer"):
        registry.register(int)
