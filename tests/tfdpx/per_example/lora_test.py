"""LoRA layers against batches of one, also of quantized layers, and which rule serves them."""

import keras
import numpy as np
import oracle
import pytest
import seeds
import tensorflow as tf
from cases import slow

from tfdpx import per_example

layers = keras.layers
EINSUMS = [
    ("abc,cde->abde", (4, 3, 5), "de", (4, 6)),  # Queries of attention.
    ("abcd,cde->abe", (4, 6), "e", (4, 3, 5)),  # Its output.
    slow("ab,bc->ac", 5, "c", (6,)),
    slow("abc,cd->abd", (4, 7), None, (4, 6)),
    slow("abc,bcd->abd", (4, 7), "d", (4, 6)),  # A kernel for each position.
]


def model_of(layer, shape, dtype="float32", quantized=None):
    """The layer with LoRA between others, A and B of random values."""
    seeds.fix(1)
    inputs = keras.Input(shape, dtype=dtype)
    hidden = layers.Rescaling(0.7, 0.1)(inputs) if dtype == "float32" else inputs
    outputs = layers.Dense(2)(layers.Activation("tanh")(layers.Flatten()(layer(hidden))))
    model = keras.Model(inputs, outputs)
    if quantized:
        layer.quantize(quantized)
    layer.enable_lora(2, lora_alpha=3)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.2, size=variable.shape))
    model.compile(loss="mse")
    return model


def check(model, shape, views, rule, x=None, tolerance=1e-4):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(3 * views, *shape)).astype("float32") if x is None else x
    x, y = tf.constant(x), tf.constant(rng.normal(size=(3 * views, 2)).astype("float32"))
    assert per_example.explain(model, x, views)[0].rule == rule
    oracle.assert_matches_batches_of_one(
        model, x, y, views=views, tolerance=tolerance, norms=("auto",)
    )


@pytest.mark.parametrize("views", [1, slow(2)])
@pytest.mark.parametrize("shape", [(5,), (4, 5)])
def test_dense(shape, views):
    check(model_of(layers.Dense(3, "gelu"), shape), shape, views, "LoraDenseRule")


@pytest.mark.parametrize("views", [slow(1), 2])
@pytest.mark.parametrize("equation, output_shape, bias_axes, shape", EINSUMS)
def test_einsum_dense(equation, output_shape, bias_axes, shape, views):
    layer = layers.EinsumDense(equation, output_shape, bias_axes=bias_axes, activation="sigmoid")
    check(model_of(layer, shape), shape, views, "LoraEinsumDenseRule")


@pytest.mark.parametrize("views", [1, slow(2)])
def test_embedding(views):
    x = np.random.default_rng(0).integers(0, 6, (3 * views, 8))  # Tokens that come again.
    model = model_of(layers.Embedding(6, 4), (8,), "int32")
    check(model, (8,), views, "LoraEmbeddingRule", x)


@pytest.mark.parametrize("mode", ["int8", slow("int4")])
@pytest.mark.parametrize(
    "make, shape, rule",
    [
        (lambda: layers.Dense(4), (4, 6), "LoraDenseRule"),
        slow(lambda: layers.EinsumDense("abc,cd->abd", (4, 4)), (4, 6), "LoraEinsumDenseRule"),
    ],
)
def test_quantized(make, shape, rule, mode):
    check(model_of(make(), shape, quantized=mode), shape, 1, rule)


def test_what_trains_alone_counts_alone():
    model = model_of(layers.Dense(3), (4, 5))
    layer = model.layers[2]
    layer.bias.trainable = False
    layer.lora_kernel_a.trainable = False
    check(model, (4, 5), 1, "LoraDenseRule")


class Doubled(layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


@pytest.mark.parametrize(
    "make, shape",
    [
        (lambda: Doubled(3), (4, 5)),
        (lambda: layers.EinsumDense("ab,cb->ac", 7), (5,)),  # A kernel that ends with inputs.
    ],
)
def test_others_are_served_by_the_generic_rule(make, shape):
    check(model_of(make(), shape), shape, 1, "GenericRule")


def test_one_layer_called_twice():
    seeds.fix(1)
    layer, inputs = layers.Dense(5), keras.Input((4, 5))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layer(layer(inputs)))))
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.random.default_rng(0).normal(size=(2, 5)))
    model.compile(loss="mse")
    check(model, (4, 5), 1, "LoraDenseRule")
