"""Rules for every model: size, files, precision, private training, and its errors."""

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
    "ResNet20": lambda: models.ResNet20(3, SHAPE),
    "ScatterCNN": lambda: models.ScatterCNN(3, SHAPE),
    "ScatterLinear": lambda: models.ScatterLinear(3, SHAPE),
    "SmallCNN": lambda: models.SmallCNN(3, SHAPE),
    "WideResNet": lambda: models.WideResNet(10, 1, 3, input_shape=SHAPE),
    "WideResNet of the authors' code": lambda: models.WideResNet(
        10, 1, 3, SHAPE, use_gain=True, use_bias=True, norm_before_relu=False, projection_norm=True
    ),
}
X = np.random.default_rng(0).uniform(size=(4, *SHAPE)).astype("float32")


@pytest.fixture(autouse=True)
def of_two_stages(monkeypatch):
    monkeypatch.setitem(networks.BLOCKS, 8, (2, 1))


def test_every_model_has_a_case():
    # `backbone` and `zero_shot_head` are functions, not models.
    assert {name for name in models.__all__ if name[0].isupper()} <= MODELS.keys()


@pytest.mark.parametrize("name", slow_but(MODELS, "SmallCNN"))
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
    template = small.model()
    model.compile(template.optimizer, template.loss, jit_compile=False)
    changes = small.step(model, X, np.arange(4) % 3)
    [way] = model.optimizer.independence
    assert way.startswith(("batched", "mapped"))
    assert np.isfinite(changes).all() and np.mean(changes != 0) > 0.9


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.WideResNet(10, 4, 1000, input_shape=(8, 8, 3)),
        lambda: models.NFResNet(26, 1000, width=32),
    ],
)
def test_weights_are_gaussian_of_variance_one_over_fan_in(make):
    for weight in make().trainable_weights:
        value = np.asarray(weight)
        if weight.name == "kernel":
            scaled = value.ravel() * np.sqrt(np.prod(value.shape[:-1]))
            error = 6 / np.sqrt(scaled.size)  # Six standard errors, up to the factor below.
            assert abs(scaled.mean()) < error and abs(scaled.var() - 1) < np.sqrt(2) * error
            # A truncated Gaussian of unit variance has a smaller fourth moment.
            assert abs((scaled**4).mean() - 3) < np.sqrt(96) * error
        else:
            assert np.all(value == (1.0 if weight.name in ("gain", "gamma") else 0.0))


GOOD = {
    "LeNet": {},
    "LinearOnFeatures": dict(num_classes=3, input_shape=(8, 8, 1)),
    "NFResNet": dict(depth=50, num_classes=10),
    "ScatterCNN": dict(num_classes=3, input_shape=(8, 8, 1)),
    "ScatterLinear": dict(num_classes=3, input_shape=(8, 8, 1)),
    "SmallCNN": dict(num_classes=10, input_shape=(8, 8, 1)),
    "WideResNet": dict(depth=16, width=4, num_classes=10),
}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("LeNet", {"input_shape": (28, 28)}, r"height, width, channels.*input_shape=\(28, 28\)"),
        ("LeNet", {"input_shape": (11, 28, 1)}, r"at least 12.*\(11, 28, 1\).*Resizing"),
        ("LinearOnFeatures", {"extractors": []}, r"`extractors` must be a list of one keras\.M"),
        ("NFResNet", {"depth": 34}, r"one of \[8, 26, 50, 101, 152, 200\]. Received: depth=34"),
        ("NFResNet", {"width": 1}, "`width` must be at least 2.*Received: width=1"),
        ("ScatterCNN", {"filters": (10,)}, "`filters` must hold positive multiples"),
        ("ScatterLinear", {"input_shape": (None, 8, 1)}, "`input_shape` must give the height"),
        ("ScatterLinear", {"scales": 9}, "Argument `J` must be at most log2"),
        ("ScatterLinear", {"generator": X}, "must be a generator of tfdpx.synthetic"),
        ("SmallCNN", {"filters": (16, 18)}, "`filters`"),
        ("WideResNet", {"depth": 4}, r"6n \+ 4.*Received: depth=4\..*: 10\.$"),
        ("WideResNet", {"groups": 12}, "`groups` must divide 16.*groups=12. Use 1, 2, 4, 8 or 16"),
        ("WideResNet", {"input_shape": (None, 32, 32, 3)}, "without the batch axis"),
        ("WideResNet", {"input_shape": (32, 32, None)}, "known number of channels"),
        ("WideResNet", {"use_gain": True, "weight_standardization": False}, "`use_gain` must be F"),
        ("WideResNet", {"norm_before_relu": False, "groups": None}, "`norm_before_relu` must keep"),
        ("WideResNet", {"projection_norm": True, "groups": None}, "`projection_norm` must keep"),
    ],
)
def test_errors_name_argument_value_and_mend(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(models, name)(**{**GOOD[name], **arguments})
