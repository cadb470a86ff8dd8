"""Rules for every layer: configuration, files, XLA, examples that do not interact, and errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx import layers, synthetic
from tfdpx.layers import ChannelWhitening, GroupNorm, Scattering2D, UnitNormWithConstant, WSConv2D


def whitening():
    layer = ChannelWhitening(0.1, -0.4, name="own")
    layer.adapt(synthetic.DeadLeaves(8, 4), num_images=20)
    return layer


# Each with arguments that are not the defaults.
LAYERS = {
    "ChannelWhitening": whitening,
    "GroupNorm": lambda: GroupNorm(2, epsilon=1e-5, center=False, name="own"),
    "Scattering2D": lambda: Scattering2D(2, 3, 1, "zeros", name="own"),
    "SkipInit": lambda: layers.SkipInit(0.2, "ones", name="own"),
    "UnitNormWithConstant": lambda: UnitNormWithConstant(0.5, name="own"),
    "WSConv2D": lambda: WSConv2D(
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
    assert layer.compute_output_shape(x.shape) == model(x).shape
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    assert restored.get_layer("own").get_config() == config
    np.testing.assert_array_equal(restored(x), model(x))
    compiled = tf.function(model, jit_compile=True)
    np.testing.assert_allclose(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    changed = np.where(np.arange(3)[:, None, None, None] == 1, np.nan, x)
    np.testing.assert_array_equal(np.array(model(changed))[::2], np.array(model(x))[::2])


OPEN = r"needs .*\(None, None, 3\). Give keras.Input"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ChannelWhitening(0), "`regularization` must be a positive.*=0. Use 0.03"),
        (lambda: ChannelWhitening(exponent=0.5), "`exponent` must be a number from -1 to 0.*=0.5."),
        (lambda: ChannelWhitening(name="own")(keras.Input((None, 3))), "'own' " + OPEN),
        (
            lambda: GroupNorm(name="own").build((None, 4, 4, 24)),
            r"the 24 channels.*'own'.*groups=16. Use one of groups=\[1, 2, 3, 4, 6, 8, 12, 24\]",
        ),
        (lambda: Scattering2D(0), "`J` must be a positive integer. Received: J=0. Use 2"),
        (lambda: Scattering2D(2, max_order=3), r"`max_order` must be one of \[1, 2\].*max_order=3"),
        (lambda: Scattering2D(2, data_format="last"), "`data_format` must be .*data_format='last'"),
        (lambda: Scattering2D(3).build((None, 8, 7, 1)), "7 pixels here. Received: J=3. Use J=2."),
        (lambda: Scattering2D(3).build((None, 8, 1, 1)), "1 pixels here.*Use larger images."),
        (lambda: Scattering2D(3).build((None, None, 8, 1)), r"known height.*\(None, None, 8, 1\)"),
        (lambda: UnitNormWithConstant(0), "`constant` must be a positive, finite.* Use 0.1"),
        (lambda: UnitNormWithConstant(name="own")(keras.Input((None, 3))), "'own' " + OPEN),
        (
            lambda: WSConv2D(4, 1, groups=4, name="own").build((None, 8, 8, 4)),
            "'own' has a fan-in of one.*Use keras.layers.Conv",
        ),
        (lambda: WSConv2D(4, 3, epsilon=0.0), "`epsilon` must be positive. Received"),
    ],
)
def test_errors_name_argument_value_and_remedy(make, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        make()
