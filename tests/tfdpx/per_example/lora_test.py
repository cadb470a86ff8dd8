"""LoRA layers against batches of one, also of quantized layers, and the rule of each."""

import keras
import numpy as np
import oracle
import seeds
import tensorflow as tf

from tfdpx import per_example

layers = keras.layers
EINSUMS = [
    ("abc,cde->abde", (4, 3, 5), "de", (4, 6)),  # Queries of attention.
    ("abcd,cde->abe", (4, 6), "e", (4, 3, 5)),  # The output of attention.
    ("ab,bc->ac", 5, "c", (6,)),
    ("abc,cd->abd", (4, 7), None, (4, 6)),
    ("abc,bcd->abd", (4, 7), "d", (4, 6)),  # A kernel for each position.
]


def model_of(cases, quantized=None):
    """Returns a model of parallel layers with LoRA, with random A and B.

    Args:
        cases: List of pairs of a layer and the shape of an example.
        quantized: "int8" or "int4", or None.
    """
    seeds.fix(1)
    inputs, outputs = [], []
    for layer, shape in cases:
        tokens = isinstance(layer, layers.Embedding)
        inputs.append(keras.Input(shape, dtype="int32" if tokens else "float32"))
        hidden = inputs[-1] if tokens else 0.7 * inputs[-1] + 0.1
        outputs.append(layers.Flatten()(layer(hidden)))
    joined = layers.Concatenate()(outputs) if len(outputs) > 1 else outputs[0]
    model = keras.Model(inputs, layers.Dense(2)(layers.Activation("tanh")(joined)))
    for layer, _ in cases:
        if quantized:
            layer.quantize(quantized)
        layer.enable_lora(2, lora_alpha=3)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(variable + rng.normal(scale=0.2, size=variable.shape))
    model.compile(loss="mse")
    return model


def check(model, views, *rules):
    """Compares the model with batches of one, and its rules except for the last layer's."""
    rng = np.random.default_rng(2)
    x = [
        # Tokens that occur again.
        rng.integers(0, 6, (3 * views, *t.shape[1:]))
        if t.dtype == "int32"
        else rng.normal(size=(3 * views, *t.shape[1:])).astype("float32")
        for t in model.inputs
    ]
    x, y = [tf.constant(t) for t in x], tf.constant(rng.normal(size=(3 * views, 2)), "float32")
    used_rules = [choice.rule for choice in per_example.explain(model, x, views)]
    assert sorted(used_rules[:-1]) == sorted(rules)
    oracle.assert_matches_batches_of_one(model, x, y, views=views, tolerance=1e-4, norms=("auto",))


def test_dense_and_embedding():
    cases = [(layers.Dense(3, "gelu"), (5,)), (layers.Dense(3, "gelu"), (4, 5))]
    model = model_of([*cases, (layers.Embedding(6, 4), (8,))])
    check(model, 2, "LoraDenseRule", "LoraDenseRule", "LoraEmbeddingRule")


def test_einsum_dense():
    cases = [
        (layers.EinsumDense(equation, output, bias_axes=bias, activation="sigmoid"), shape)
        for equation, output, bias, shape in EINSUMS
    ]
    check(model_of(cases), 2, *["LoraEinsumDenseRule"] * len(cases))


def test_quantized():
    cases = [(layers.Dense(4), (4, 6)), (layers.EinsumDense("abc,cd->abd", (4, 4)), (4, 6))]
    check(model_of(cases, "int8"), 1, "LoraDenseRule", "LoraEinsumDenseRule")


def test_only_trainable_variables_count():
    layer = layers.Dense(3)
    model = model_of([(layer, (4, 5))])
    layer.bias.trainable = False
    layer.lora_kernel_a.trainable = False
    check(model, 1, "LoraDenseRule")


class Doubled(layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


def test_others_are_served_by_the_generic_rule():
    # The kernel of the second layer ends with its inputs.
    cases = [(Doubled(3), (4, 5)), (layers.EinsumDense("ab,cb->ac", 7), (5,))]
    check(model_of(cases), 1, "GenericRule", "GenericRule")


def test_one_layer_called_twice():
    seeds.fix(1)
    layer, inputs = layers.Dense(5), keras.Input((4, 5))
    model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(layer(layer(inputs)))))
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.random.default_rng(0).normal(size=(2, 5)))
    model.compile(loss="mse")
    check(model, 1, "LoraDenseRule", "LoraDenseRule")
