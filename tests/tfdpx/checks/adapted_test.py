"""Statistics that `adapt` computed from data have no noise: refused, or declared public."""

import keras
import numpy as np
import pytest

import tfdpx
from tfdpx import checks
from tfdpx.checks import declared

layers = keras.layers
NUMBERS = np.random.default_rng(3).normal(1.0, 2.0, [40, 6]).astype("float32")
WHOLE = np.arange(240).reshape([40, 6]) % 7
WORDS = np.array([["red green"], ["blue"], ["green"]])

MEAN, PAIR = {"mean": 0.5, "variance": 2.0}, {"vocabulary": ["red", "blue"]}
LENGTH = {"output_sequence_length": 2}
# Kind -> a layer as users make it, data to adapt it to, and public values to give instead.
KINDS = {
    "Normalization": (layers.Normalization, {}, NUMBERS, MEAN),
    "Discretization": (layers.Discretization, {"num_bins": 4}, NUMBERS, {"bin_boundaries": [0.5]}),
    "IntegerLookup": (layers.IntegerLookup, {}, WHOLE, {"vocabulary": [1, 2, 3]}),
    "StringLookup": (layers.StringLookup, {}, WORDS, PAIR),
    "TextVectorization": (layers.TextVectorization, LENGTH, WORDS, {**PAIR, **LENGTH}),
}


def adapted(kind):
    make, arguments, data, _ = KINDS[kind]
    layer = make(**arguments)
    layer.adapt(data)
    return layer


def with_values(kind):
    make, *_, arguments = KINDS[kind]
    return make(**arguments)


def holding(layer, data, **arguments):
    """Returns a compiled Functional model that reads `data` through a layer."""
    inputs = keras.Input(data.shape[1:], dtype="string" if data.dtype.kind == "U" else data.dtype)
    x = keras.ops.cast(layer(inputs), "float32")
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))
    arguments = {"batch_size": 4, "noise_multiplier": 1.0, **arguments}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, **arguments), loss=loss)
    return model


def refused(model, match="was adapted to data.*no ledger counts it.*checks.mark_public"):
    with pytest.raises(checks.UnfitForPrivacy, match=match) as error:
        declared.check_declared(model)
    assert "There are" not in str(error.value)  # One problem is listed once.


@pytest.mark.parametrize("kind", KINDS)
def test_adapted_layers_are_refused_also_from_files_until_they_are_public(kind, tmp_path):
    layer, data = adapted(kind), KINDS[kind][2]
    model = holding(layer, data)
    refused(model)
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    refused(loaded)
    checks.mark_public(layer)
    declared.check_declared(model)
    checks.mark_public(loaded)
    declared.check_declared(loaded)
    layer.adapt(data[1:])
    refused(model)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_made_with_given_values_are_fine_also_from_files(kind, tmp_path):
    model = holding(with_values(kind), KINDS[kind][2])
    declared.check_declared(model)
    model.save(tmp_path / "m.keras")
    declared.check_declared(keras.saving.load_model(tmp_path / "m.keras"))


def test_weights_that_hold_the_statistics_are_found(tmp_path):
    holding(adapted("Normalization"), NUMBERS).save_weights(tmp_path / "m.weights.h5")
    model = holding(layers.Normalization(), NUMBERS)
    declared.check_declared(model)  # The layer has no statistics yet.
    model.load_weights(tmp_path / "m.weights.h5")
    refused(model)


def test_fit_refuses_before_anything_is_trained_and_names_the_layer():
    model = holding(adapted("Normalization"), NUMBERS)
    with pytest.raises(
        checks.UnfitForPrivacy, match="of type Normalization.*`mean` and `variance`"
    ):
        model.fit(NUMBERS, np.zeros(40, int), batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 0
    checks.mark_public(model)
    model.fit(NUMBERS[:8], np.zeros(8, int), batch_size=4, verbose=0)
    assert int(model.optimizer.iterations) == 2
    declared.check_declared(holding(adapted("Normalization"), NUMBERS, noise_multiplier=0.0))


def test_frozen_and_nested_layers_are_found():
    norm = adapted("Normalization")
    norm.trainable = False
    inner = keras.Sequential([keras.Input((6,)), norm, layers.Dense(4)])

    class Outer(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = {"first": [inner], "last": layers.Dense(3)}

        def call(self, x):
            return self.parts["last"](self.parts["first"][0](x))

    model = Outer()
    model(NUMBERS[:2])
    model.compile(tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0), loss="mse")
    refused(model)
    refused(holding(layers.TimeDistributed(adapted("Normalization")), NUMBERS[:, None]))
    refused(holding(layers.Pipeline([adapted("Normalization")]), NUMBERS))


@pytest.mark.parametrize("mixed", [False, True])
def test_layers_of_the_augmentation_are_found(mixed):
    norm = adapted("Normalization")
    augment = keras.Sequential([keras.Input((6,)), norm])
    if mixed:
        augment = tfdpx.augment.MixViews(augment, mixed_views=1)
    model = holding(layers.Dense(3), NUMBERS, augment=augment, augmult=4)
    refused(model)
    checks.mark_public(norm)
    declared.check_declared(model)


def test_a_layer_of_ones_own_that_adapts_is_refused():
    class Centre(layers.Layer):
        def build(self, shape):
            self.mean = self.add_weight(name="mean", shape=shape[1:], trainable=False)

        def adapt(self, data):
            self.mean.assign(data.mean(0))

        def call(self, x):
            return x - self.mean

    layer = Centre()
    model = holding(layer, NUMBERS)
    refused(model, "of type Centre.*Give it public values instead")
    layer.adapt(NUMBERS)
    checks.mark_public(layer)
    declared.check_declared(model)
    layer.adapt(NUMBERS[1:])
    refused(model)
