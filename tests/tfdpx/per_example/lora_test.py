"""LoRA layers against batches of one, also of quantized layers, and the rule of each."""

import keras
from rule_cases import check_layers

layers = keras.layers
EINSUMS = [
    ("abc,cde->abde", (4, 3, 5), "de", (4, 6)),  # Queries of attention.
    ("abcd,cde->abe", (4, 6), "e", (4, 3, 5)),  # The output of attention.
    ("ab,bc->ac", 5, "c", (6,)),
    ("abc,cd->abd", (4, 7), None, (4, 6)),
    ("abc,bcd->abd", (4, 7), "d", (4, 6)),  # A kernel for each position.
]


def check(cases, views, *rules, quantized=None, freeze=lambda: None):
    """Compares parallel layers with LoRA with batches of one, and their rules with `rules`."""

    def prepare():
        for layer, *_ in cases:
            if quantized:
                layer.quantize(quantized)
            layer.enable_lora(2, lora_alpha=3)
        freeze()

    used_rules = check_layers(cases, views, ("auto",), prepare, tolerance=1e-4)
    assert [used_rules[layer.name] for layer, *_ in cases] == list(rules)


def test_dense_and_embedding():
    cases = [(layers.Dense(3, "gelu"), (5,)), (layers.Dense(3, "gelu"), (4, 5))]
    cases.append((layers.Embedding(6, 4), (8,), 6))
    check(cases, 2, "LoraDenseRule", "LoraDenseRule", "LoraEmbeddingRule")


def test_einsum_dense():
    cases = [
        (layers.EinsumDense(equation, output, bias_axes=bias, activation="sigmoid"), shape)
        for equation, output, bias, shape in EINSUMS
    ]
    check(cases, 2, *["LoraEinsumDenseRule"] * len(cases))


def test_quantized():
    cases = [(layers.Dense(4), (4, 6)), (layers.EinsumDense("abc,cd->abd", (4, 4)), (4, 6))]
    check(cases, 1, "LoraDenseRule", "LoraEinsumDenseRule", quantized="int8")


def test_only_trainable_variables_count():
    layer = layers.Dense(3)

    def freeze():
        layer.bias.trainable = layer.lora_kernel_a.trainable = False

    check([(layer, (4, 5))], 1, "LoraDenseRule", freeze=freeze)


class Doubled(layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


def test_others_are_served_by_the_generic_rule():
    # The kernel of the second layer ends with its inputs.
    cases = [(Doubled(3), (4, 5)), (layers.EinsumDense("ab,cb->ac", 7), (5,))]
    check(cases, 1, "GenericRule", "GenericRule")


def test_one_layer_called_twice():
    layer = layers.Dense(5)
    cases = [(lambda x: layer(layer(x)), (4, 5))]
    rules = check_layers(cases, 1, ("auto",), lambda: layer.enable_lora(2), tolerance=1e-4)
    assert rules[layer.name] == "LoraDenseRule"
