"""What every model keeps to: files, precision, and no example touches another in its training."""

import keras
import numpy as np
import pytest
import small
from cases import slow_but

from tfdpx import models
from tfdpx.layers import UnitNormWithConstant
from tfdpx.models import networks

SHAPE = (16, 16, 3)


def on_features():
    network = keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten(), UnitNormWithConstant()])
    return models.LinearOnFeatures(3, SHAPE, [network])


MODELS = {
    "LeNet": lambda: models.LeNet(3, SHAPE),
    "LinearOnFeatures": on_features,
    "NFResNet": lambda: models.NFResNet(8, 3, input_shape=SHAPE, width=2),
    "ScatterCNN": lambda: models.ScatterCNN(3, SHAPE),
    "ScatterLinear": lambda: models.ScatterLinear(3, SHAPE),
    "SmallCNN": lambda: models.SmallCNN(3, SHAPE),
    "WideResNet": lambda: models.WideResNet(10, 1, 3, input_shape=SHAPE),
}
# The others are functions: `backbone` and `zero_shot_head`.
NAMES = [name for name in models.__all__ if name[0].isupper()]
X = np.random.default_rng(0).uniform(size=(4, *SHAPE)).astype("float32")


@pytest.fixture(autouse=True)
def of_two_stages(monkeypatch):
    monkeypatch.setitem(networks.BLOCKS, 8, (2, 1))


@pytest.mark.parametrize("name", slow_but(NAMES, "SmallCNN"))
def test_it_is_saved_whole_and_trains_privately(name, tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert MODELS[name]()(X).dtype == "float32"
    finally:
        keras.config.set_dtype_policy("float32")
    model, rng = MODELS[name](), np.random.default_rng(1)
    for weight in model.trainable_weights:
        weight.assign(weight + rng.normal(scale=0.1, size=weight.shape))
    model.save(tmp_path / "model.keras")
    restored = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(restored(X), model(X))
    assert len(restored.trainable_weights) == len(model.trainable_weights)
    made = small.model()
    model.compile(made.optimizer, made.loss, jit_compile=False)
    changes = small.step(model, X, np.arange(4) % 3)
    [way] = model.optimizer.independence
    assert way.startswith(("batched", "mapped"))
    assert np.isfinite(changes).all() and np.mean(changes != 0) > 0.9
