"""The parts of trained models: features, head, scaling of pixels; and models that are refused."""

import keras
import numpy as np
import pytest

from tfdpx import account
from tfdpx.models import transfer
from tfdpx.synthetic import DeadLeaves

L = keras.layers
SHAPE = (16, 12, 3)


def body():
    """Returns layers to feature maps."""
    return [L.Conv2D(4, 3, strides=2), L.BatchNormalization(), L.ReLU()]


def nested():
    return keras.Sequential([keras.Input(SHAPE), *body()], name="body")


def classifying():
    """Returns a functional model with a head, to be part of another."""
    inputs = x = keras.Input(SHAPE)
    for layer in (*body(), L.GlobalAveragePooling2D(name="end")):
        x = layer(x)
    return keras.Model(inputs, L.Softmax()(L.Dense(5, name="head")(x)))


def residual():
    inputs = keras.Input(SHAPE)
    x = L.Conv2D(4, 3, padding="same")(inputs)
    return keras.Model(inputs, L.ReLU(name="end")(L.Add()([x, L.Conv2D(4, 1)(x)])))


def sequential(*layers):
    return keras.Sequential([keras.Input(SHAPE), *layers])


POOL = L.GlobalAveragePooling2D
# A model that returns its features from a layer "end", and whether it has a layer "head".
CASES = {
    "dense head": (lambda: sequential(*body(), POOL(name="end"), L.Dense(7, name="head")), True),
    "softmax behind the head": (
        lambda: sequential(*body(), L.Flatten(name="end"), L.Dense(7, name="head"), L.Softmax()),
        True,
    ),
    "a convolution as head": (
        lambda: sequential(
            *body(), POOL(keepdims=True, name="end"), L.Conv2D(7, 1, name="head"), L.Flatten()
        ),
        True,
    ),
    "feature maps": (lambda: sequential(*body()[:2], L.ReLU(name="end")), False),
    "two branches": (residual, False),
    "nested body": (lambda: sequential(nested(), POOL(name="end"), L.Dense(7, name="head")), True),
    "nested, without head": (lambda: sequential(nested(), POOL(name="end")), False),
    "head inside the nested part": (lambda: sequential(L.Rescaling(2.0), classifying()), True),
}


@pytest.mark.parametrize("case", CASES)
def test_features_are_what_the_head_receives(case):
    make, head = CASES[case]
    model = make()
    images = np.random.default_rng(0).normal(size=(3, *SHAPE)).astype("float32")
    features, left_out = transfer.without_head(model)
    assert left_out == ("head" if head else None)
    if case == "head inside the nested part":
        part, values = model.layers[-1], 2 * images
    else:
        part, values = keras.Model(model.inputs[0], model.outputs[0]), images
    expected = np.asarray(keras.Model(part.inputs[0], part.get_layer("end").output)(values))
    if expected.ndim == 4:
        expected = expected.mean(axis=(1, 2))
    np.testing.assert_allclose(features(images), expected, rtol=1e-5, atol=1e-6)
    assert {id(v) for v in features.weights} <= {
        id(v) for v in model.weights
    }  # Shared, not copied.


def arithmetic():
    inputs = keras.Input(SHAPE)
    return keras.Model(inputs, L.Conv2D(2, 3)(inputs / 127.5 - 1.0))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: sequential(L.Rescaling(1 / 255), *body()), True),
        (lambda: sequential(L.ZeroPadding2D(), L.Normalization(mean=1.0, variance=2.0)), True),
        (lambda: sequential(L.RandomFlip(), keras.Sequential([L.Rescaling(2.0), *body()])), True),
        (arithmetic, True),
        (lambda: sequential(*body()), False),
        (lambda: sequential(nested(), L.Rescaling(2.0)), False),
        (residual, False),  # An addition behind the first weights.
    ],
)
def test_whether_a_model_scales_pixels_itself(make, expected):
    assert transfer.rescales(make()) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (keras.Model, "Functional or Sequential.*class Model"),
        (lambda: keras.Sequential([keras.Input([5]), L.Dense(2)]), r"shapes \[\(None, 5\)\]"),
        (lambda: keras.Sequential([keras.Input((8, 8, 4)), L.Flatten()]), "1 or 3 channels"),
    ],
)
def test_models_that_take_no_images(make, message):
    with pytest.raises(ValueError, match=message):
        transfer.image_shape(make())


@pytest.mark.parametrize("whiten", ["synthetic", DeadLeaves((16, 12), 3, seed=1)])
def test_whitened_features_have_unit_covariance_on_generated_images(whiten, monkeypatch):
    monkeypatch.setattr(transfer, "_WHITENING_IMAGES", 400)
    plain = transfer.backbone(sequential(L.Conv2D(3, 5), POOL()), input_shape=SHAPE, pixels="0..1")
    model = transfer.backbone(
        sequential(L.Conv2D(3, 5), POOL()), input_shape=SHAPE, pixels="0..1", whiten=whiten
    )
    assert model.output_shape == plain.output_shape
    generator = DeadLeaves((16, 12), 3, seed=0 if whiten == "synthetic" else 1)
    features = model.predict(255 * generator.images(400), verbose=0)
    np.testing.assert_allclose(features.mean(axis=0), 0, atol=1e-2)
    assert np.all(np.abs(np.cov(features.T) - np.eye(3)) < 0.25)
    assert account.ledger_of(model.weights).is_complete
