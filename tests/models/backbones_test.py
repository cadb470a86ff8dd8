"""Backbones by name and from models: resizing, preprocessing, weights, batch normalization."""

import types

import keras
import numpy as np
import pytest
from cases import slow
from oracle import assert_matches_batches_of_one

import tfdpx
from tfdpx.models import backbone

L = keras.layers
ANY = (None, None, 3)


def images(height=32, width=32, channels=3, rows=2):
    shape = (rows, height, width, channels)
    return np.random.default_rng(0).integers(0, 256, shape).astype("uint8")


def network(shape=(16, 12, 3), name="theirs", norms=L.BatchNormalization):
    """Returns a model to feature maps, with statistics that differ from new layers'."""
    layers = [L.Conv2D(4, 3, strides=2, name="conv"), norms(name="norm"), L.ReLU()]
    model = keras.Sequential([keras.Input(shape), *layers], name=name)
    randomize(model)
    return model


def randomize(model):
    rng = np.random.default_rng(1)
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(rng.uniform(0.02, 0.08, size=weight.shape))


def norms_of(model, layer_class=L.BatchNormalization):
    return [layer for layer in model._flatten_layers() if isinstance(layer, layer_class)]


@keras.saving.register_keras_serializable(package="backbones_test")
class Unloadable(L.Layer):
    """A layer that only its backbone can build again, for example the patches of keras-hub."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.scale

    def get_config(self):
        return {**super().get_config(), "derived": 1}


@keras.saving.register_keras_serializable(package="backbones_test")
class HubBackbone(keras.src.models.functional.Functional):
    """A stand-in for a backbone of keras-hub: built from arguments, and saved as these."""

    def __init__(self, tokens=False, **kwargs):
        inputs = x = keras.Input((16, 16, 3))
        x = L.Conv2D(8, 4, strides=4, name="conv")(x)
        x = Unloadable()(x) if tokens else L.BatchNormalization(name="norm")(x)
        super().__init__(inputs, L.Reshape((-1, 8))(x) if tokens else x, **kwargs)
        self.tokens = tokens

    def get_config(self):
        return {"tokens": self.tokens, "name": self.name}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(**config)


def hub_classifier(body, scale=2 / 255, offset=-1.0):
    """Returns a stand-in for a classifier of keras-hub: a model with a preprocessor."""
    model = keras.Model(body.inputs, L.Dense(5, name="predictions")(L.Flatten()(body.output)))
    resize = L.Resizing(16, 16, interpolation="nearest", crop_to_aspect_ratio=True)
    converter = types.SimpleNamespace(scale=scale, offset=offset, resizing=resize)
    model.preprocessor = types.SimpleNamespace(image_converter=converter)
    return model


@pytest.mark.parametrize(
    ("name", "preprocess"),
    [
        ("MobileNet", keras.applications.mobilenet.preprocess_input),
        slow("MobileNetV3Small", lambda x: x),
    ],
)
def test_features_of_a_name_are_those_of_the_network_on_preprocessed_images(name, preprocess):
    model = backbone(name, weights=None)
    x = images().astype("float32")
    wanted = np.asarray(model.get_layer(name)(preprocess(x.copy())))
    assert np.ptp(wanted) > 0 and wanted.ndim == 2  # Pooled inside.
    np.testing.assert_allclose(model(x), wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(model(images()), model(x))


@pytest.mark.parametrize(
    ("takes", "image_size", "shape", "resized"),
    [
        ((16, 12, 3), None, ANY, (16, 12)),
        ((16, 12, 3), None, (10, 20, 3), (16, 12)),
        ((16, 12, 3), None, (10, 20, 1), (16, 12)),
        (ANY, None, ANY, (10, 20)),
        (ANY, (24, 18), ANY, (24, 18)),
    ],
)
def test_images_are_resized_and_coloured(takes, image_size, shape, resized):
    theirs = network(takes)
    model = backbone(theirs, image_size, input_shape=shape, pixels="0..255")
    x = images(10, 20, shape[-1])
    wanted = L.Resizing(*resized)(np.broadcast_to(x, (*x.shape[:3], 3)).astype("float32"))
    np.testing.assert_allclose(model(x), np.mean(theirs(wanted), axis=(1, 2)), rtol=1e-5)
    assert model.output_shape == (None, 4)


def test_a_classifier_of_keras_hub_brings_its_preprocessing_along():
    body = HubBackbone()
    randomize(body)
    scale, offset = [0.1, 0.2, 0.3], [1.0, 2.0, 3.0]
    model = backbone(hub_classifier(body, scale, offset))
    x = images(20, 40).astype("float32")
    middle = L.Resizing(16, 16, interpolation="nearest", crop_to_aspect_ratio=True)(x)
    wanted = np.reshape(body(np.asarray(middle) * scale + offset), (2, -1))
    np.testing.assert_allclose(model(x), wanted, rtol=1e-4)


@pytest.mark.parametrize("class_token", [True, False])
def test_tokens_become_features_and_are_saved(class_token, tmp_path):
    body = HubBackbone(tokens=True)
    body.use_class_token = class_token
    tokens = np.asarray(body(images(16, 16).astype("float32")))
    wanted = tokens[:, 0] if class_token else tokens.mean(axis=1)
    model = backbone(body, pixels="0..255")
    np.testing.assert_allclose(model(images(16, 16)), wanted, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(restored(images()), model(images()))


def nested():
    body = HubBackbone()
    return keras.Sequential([keras.Input((16, 16, 3)), body, L.GlobalMaxPooling2D()])


@pytest.mark.parametrize("make", [network, HubBackbone, nested])
def test_saving_keeps_the_preprocessing_and_what_is_frozen(make, tmp_path):
    model = backbone(make(), pixels="caffe")
    assert norms_of(model) and not any(layer.trainable_variables for layer in norms_of(model))
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(restored(images()), model(images()))
    names = [w.path.split("/")[-2] for w in restored.trainable_variables]
    assert names == ["conv", "conv"]


@pytest.mark.parametrize("suffix", [".weights.h5", slow(".keras")])
def test_weights_from_a_file(suffix, tmp_path):
    source = keras.applications.MobileNet(include_top=False, weights=None, input_shape=(32, 32, 3))
    randomize(source)
    path = tmp_path / f"saved{suffix}"
    source.save_weights(path) if suffix == ".weights.h5" else source.save(path)
    model = backbone("MobileNet", 48, weights=path)
    for weight, wanted in zip(model.get_layer("MobileNet").weights, source.weights, strict=True):
        np.testing.assert_array_equal(weight, wanted)
    text = tmp_path / f"text{suffix}"
    text.write_text("not weights")
    for unfit in (path, text):
        message = f"`weights` must be a file .* of 'VGG16' .* 26 weights.*weights='.*{unfit.name}'"
        with pytest.raises(ValueError, match=message):
            backbone("VGG16", 32, weights=unfit)


def test_weights_of_imagenet_are_asked_for_and_public(monkeypatch, tmp_path):
    real, requests = keras.applications.MobileNet, []
    real(include_top=False, weights=None).save_weights(tmp_path / "saved.weights.h5")

    def downloading(weights, **arguments):
        requests.append(weights)
        loaded = real(weights=None, **arguments)
        loaded.load_weights(tmp_path / "saved.weights.h5")
        return loaded

    downloading.__module__ = real.__module__
    monkeypatch.setattr(keras.applications, "MobileNet", downloading)
    model = keras.Sequential([backbone("MobileNet", 32), L.Dense(2)])
    assert requests == ["imagenet"]
    model.compile(tfdpx.DPSGD(0.1, batch_size=2, noise_multiplier=1.0), "mse")
    assert model.optimizer.ledger.is_complete

    def offline(**arguments):
        raise Exception("URL fetch failure on https://storage.googleapis.com")

    monkeypatch.setattr(keras.applications, "MobileNet", offline)
    with pytest.raises(OSError, match=r"'imagenet' of model='MobileNet'.*\.save\(\"m.keras\"\)"):
        backbone("MobileNet", 32)


def test_private_gradients_are_those_of_batches_of_one():
    # With resizing and preprocessing, of images of another size.
    body = backbone(nested(), input_shape=(10, 20, 3), batch_norm="freeze", pixels="caffe")
    model = keras.Sequential([body, L.Dense(3)])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = images(10, 20, rows=3).astype("float32")
    assert_matches_batches_of_one(model, x, np.array([0, 2, 1]), tolerance=1e-4)
    assert [c.rule for c in tfdpx.per_example.explain(model, x)] == ["Conv2DRule", "DenseRule"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "Vgg16"}, "`model` must be a keras.Model or .*ConvNeXtBase.*mean 'VGG16'"),
        ({"weights": "/no/such.weights.h5"}, "weights='/no/such.weights.h5'. Write one"),
        ({"batch_norm": None}, "`batch_norm` must be one of"),
        ({"pixels": "0-1"}, "`pixels` must be one of .*'0..1'"),
        ({"image_size": 0}, "`image_size` must be a positive integer"),
        ({"input_shape": (32, 32, 4), "weights": None}, "`input_shape` must end in 3 channels"),
        ({"model": network(), "image_size": 32}, r"`image_size` must be \[16, 12\] or None"),
        ({"model": network()}, "'theirs' does not scale pixels itself.*pixels=0..255 or"),
    ],
)
def test_errors_name_argument_value_and_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        backbone(**{"model": "VGG16", "input_shape": (32, 32, 3), **arguments})
