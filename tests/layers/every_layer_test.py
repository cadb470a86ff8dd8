"""What every layer keeps to: configuration, files, XLA, and no example touches another."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx import layers, synthetic


def whitening():
    layer = layers.ChannelWhitening(0.1, -0.4, name="own")
    layer.adapt(synthetic.DeadLeaves(8, 4), num_images=20)
    return layer


# Each with arguments that are not the defaults.
LAYERS = {
    "ChannelWhitening": whitening,
    "GroupNorm": lambda: layers.GroupNorm(2, epsilon=1e-5, center=False, name="own"),
    "Scattering2D": lambda: layers.Scattering2D(2, 3, 1, "zeros", name="own"),
    "SkipInit": lambda: layers.SkipInit(0.2, "ones", name="own"),
    "UnitNormWithConstant": lambda: layers.UnitNormWithConstant(0.5, name="own"),
    "WSConv2D": lambda: layers.WSConv2D(
        6, 3, 2, "same", groups=2, activation="relu", use_gain=True, epsilon=1e-3, name="own"
    ),
}


@pytest.mark.parametrize(
    "name", [n for n in layers.__all__ if isinstance(getattr(layers, n), type)]
)
def test_it_is_saved_whole_compiles_and_treats_examples_one_by_one(name, tmp_path):
    layer, rng = LAYERS[name](), np.random.default_rng(0)
    config = layer.get_config()
    assert type(layer).from_config(config).get_config() == config
    model = keras.Sequential([keras.Input((8, 8, 4)), layer])
    for weight in layer.trainable_weights:
        weight.assign(rng.normal(size=weight.shape))
    x = rng.normal(size=(3, 8, 8, 4)).astype("float32")
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert restored.get_layer("own").get_config() == config
    np.testing.assert_array_equal(restored(x), model(x))
    compiled = tf.function(model, jit_compile=True)
    np.testing.assert_allclose(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    changed = np.where(np.arange(3)[:, None, None, None] == 1, np.nan, x)
    np.testing.assert_array_equal(np.array(model(changed))[::2], np.array(model(x))[::2])
