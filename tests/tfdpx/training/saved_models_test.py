"""A model that is saved and loaded predicts as it did after its training, and keeps its ledger."""

import keras
import numpy as np
import pytest
import seeds
import small
from cases import slow

import tfdpx

PLAN = tfdpx.PrivacyPlan(32, batch_size=16, steps=4, noise_multiplier=1.0, delta=1e-3)
X, Y = small.data(rows=32)


def network():
    seeds.fix(3)
    return keras.Sequential(
        [keras.Input([6]), keras.layers.Dense(8, "relu", name="hidden"), keras.layers.Dense(3)]
    )


def trained(model, **arguments):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPAdam(0.1, plan=PLAN, **arguments), loss)
    before = np.array(model(X))
    model.fit(X, Y, epochs=2, verbose=0)
    assert np.abs(model(X) - before).max() > 0.1
    return model


def with_lora(quantized=None):
    model = network()
    if quantized:
        model.get_layer("hidden").quantize(quantized)
    model.get_layer("hidden").enable_lora(2)
    return trained(model)


def loaded_alike(model, tmp_path, atol=1e-5):
    """Saves and loads a model; returns the loaded one, which predicts the same."""
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(X), model(X), atol=atol)
    assert loaded.optimizer.ledger.steps == model.optimizer.ledger.steps == 4
    assert loaded.optimizer.ledger.is_complete
    return loaded


@pytest.fixture(scope="module")
def lora():
    return with_lora()


def test_lora(lora, tmp_path):
    loaded_alike(lora, tmp_path)


def test_lora_merged_into_a_model_without_it(lora, tmp_path):
    lora.save_weights(tmp_path / "merged.weights.h5")
    merged = network()
    merged.load_weights(tmp_path / "merged.weights.h5")
    np.testing.assert_allclose(merged(X), lora(X), atol=1e-5)


@pytest.mark.parametrize("mode, rounding", [("int8", 0.03), slow("int4", 0.2)])
def test_lora_of_a_quantized_layer(tmp_path, mode, rounding):
    """Keras saves the merged kernel, rounded again: the factors are saved by `Checkpoint` only."""
    loaded_alike(with_lora(mode), tmp_path, rounding)


def test_averages_of_weights(tmp_path):
    model = loaded_alike(trained(network(), use_ema=True, ema_momentum=0.5), tmp_path)
    averages = model.optimizer._model_variables_moving_average
    for average, weight in zip(averages, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(average, weight)


def test_quantized(tmp_path):
    model = trained(network())
    model.quantize("int8")
    loaded_alike(model, tmp_path)
