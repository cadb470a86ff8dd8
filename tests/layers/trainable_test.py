"""`tfdpx.layers.trainable`: the weights that it leaves trainable, and saved models."""

import keras
import numpy as np
import pytest
import seeds

import tfdpx
from tfdpx.layers import trainable

layers = keras.layers


def transformer():
    """Returns a model of one attention block and a dense layer, with a new head."""
    seeds.fix(3)
    inputs = keras.Input((4, 6))
    x = layers.Add()([inputs, layers.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)])
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(5, "gelu", name="between")(x)
    body = keras.Model(inputs, layers.GlobalAveragePooling1D()(x), name="body")
    return keras.Model(inputs, layers.Dense(3, name="head")(body.output))


def convolutional():
    """Returns frozen batch normalization, group normalization, and a convolution as head."""
    seeds.fix(3)
    inputs = keras.Input((4, 4, 2))
    x = layers.BatchNormalization(name="batch")(layers.Conv2D(3, 3, name="first")(inputs))
    body = keras.Model(inputs, tfdpx.layers.GroupNorm(1, name="group")(x))
    head = keras.Sequential([layers.GlobalAveragePooling2D(), layers.Dense(3, name="head")])
    return keras.Model(inputs, head(body(inputs)))


def names(model):
    return {"/".join(v.path.split("/")[-2:]) for v in model.trainable_variables}


HEAD = {"head/kernel", "head/bias"}
OF_ATTENTION = {f"{x}/bias" for x in ("query", "key", "value", "attention_output")}


@pytest.mark.parametrize(
    "make, what, wanted",
    [
        (transformer, "last", set()),
        (transformer, "bias", OF_ATTENTION | {"norm/beta", "between/bias"}),
        (transformer, "norm", {"norm/gamma", "norm/beta"}),
        (transformer, "lora", {f"{x}/lora_kernel_{ab}" for x in ("query", "value") for ab in "ab"}),
        (convolutional, "last", set()),
        (convolutional, "bias", {"first/bias", "group/beta"}),
        (convolutional, "norm", {"group/gamma", "group/beta"}),
    ],
)
def test_weights_that_train(make, what, wanted):
    model = make()
    count = trainable(model, what)
    assert names(model) == wanted | HEAD
    assert count == sum(v.numpy().size for v in model.trainable_variables)
    trainable(model, "last")
    assert names(model) == HEAD
    trainable(model, what)
    assert names(model) == wanted | HEAD


class MaskedHead(layers.Layer):
    """The head of a masked language model: its last step multiplies by the embedding table."""

    def __init__(self, table):
        super().__init__(name="head")
        self.table, self.inner = table, layers.Dense(4, name="inner")

    def call(self, x):
        return self.table(self.inner(x), reverse=True)


def with_tied_table(masked_head=False):
    seeds.fix(3)
    table, inputs = layers.ReversibleEmbedding(9, 4, name="table"), keras.Input([5], dtype="int32")
    hidden = layers.Dense(4, name="between")(table(inputs))
    outputs = MaskedHead(table)(hidden) if masked_head else table(hidden, reverse=True)
    return keras.Model(inputs, outputs), table


def test_an_embedding_that_is_the_head_stays_frozen():
    model, table = with_tied_table()
    assert trainable(model, "bias") == 4
    table.enable_lora(2)
    assert trainable(model, "lora") == (9 + 4) * 2
    model, _ = with_tied_table(masked_head=True)
    trainable(model, "bias")
    assert names(model) == {"inner/kernel", "inner/bias", "between/bias"}


def test_lora_of_chosen_layers_and_of_a_model_without_attention():
    model = transformer()
    model.get_layer("between").enable_lora(2)
    trainable(model, "lora")
    assert names(model) == HEAD | {"between/lora_kernel_a", "between/lora_kernel_b"}
    model = keras.Sequential([keras.Input([4]), layers.Dense(6), layers.Dense(3)])
    assert trainable(model, "lora", rank=2) == (4 + 6) * 2 + 6 * 3 + 3


@pytest.mark.slow
def test_a_quantized_last_layer_trains_by_lora_alone():
    model = keras.Sequential([keras.Input([4]), layers.Dense(6), layers.Dense(3, name="head")])
    model.layers[1].quantize("int8")
    with pytest.raises(ValueError, match="quantized layer 'head'.*enable_lora"):
        trainable(model, "last")
    model.layers[1].enable_lora(2)
    assert trainable(model, "last") == (6 + 3) * 2 + 3


@pytest.mark.slow
def test_a_loaded_lora_model_trains_its_factors_and_nothing_else(tmp_path):
    model, rng = transformer(), np.random.default_rng(0)
    model.get_layer("between").enable_lora(2)
    trainable(model, "lora")
    for variable in model.trainable_variables:
        variable.assign(variable + 0.1)
    x, y = rng.normal(size=(24, 4, 6)).astype("float32"), rng.integers(0, 3, 24)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    trainable(loaded, "lora")
    layer = loaded.get_layer("between")  # Keras loads the merged kernels, and factors of zero.
    assert not np.any(layer.lora_kernel_a.numpy()) and not np.any(layer.lora_kernel_b.numpy())
    plan = tfdpx.PrivacyPlan(24, 24, steps=2, noise_multiplier=1e-6, delta=1e-3)
    loaded.compile(
        tfdpx.DPSGD(1.0, plan=plan), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    np.testing.assert_allclose(loaded(x), model(x), atol=1e-5)
    before = {v.path: v.numpy() for v in loaded.weights}
    loaded.fit(x, y, verbose=0)
    moved = {v.path for v in loaded.weights if (v.numpy() != before[v.path]).any()}
    assert moved == {v.path for v in loaded.trainable_variables}
    assert np.abs(layer.lora_kernel_a.numpy()).max() > 0.1


@pytest.mark.parametrize(
    "model, arguments, words",
    [
        (transformer, dict(what="all"), "what='all'"),
        (transformer, dict(what="lora", rank=0), "rank=0"),
        (lambda: keras.Sequential([layers.Dense(3)]), dict(what="last"), "built"),
        (lambda: keras.Sequential([keras.Input([4]), layers.Dense(3)]), dict(what="norm"), "norm"),
    ],
)
def test_bad_arguments(model, arguments, words):
    with pytest.raises(ValueError, match=words):
        trainable(model(), **arguments)
