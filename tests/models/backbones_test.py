"""Backbones by name: preprocessing, weights from a file, batch normalization, private gradients."""

import keras
import numpy as np
import pytest
from cases import slow, slow_but
from oracle import assert_matches_batches_of_one

import tfdpx
from tfdpx.layers import GroupNorm
from tfdpx.models import backbone, backbone_bodies

# Published with keras_cv for its presets; the MiT ones count a classifier of ten classes too.
KERAS_CV_PARAMETERS = {
    "resnet18": 11_186_112,
    "resnet50": 23_561_152,
    "resnet34_v2": 21_299_072,
    "mit_b1": 13_156_554 - 5_130,
}
LARGE = {
    "resnet152_v2": 58_331_648,
    "mit_b2": 24_201_418 - 5_130,
    "mit_b3": 44_077_258 - 5_130,
    "mit_b4": 60_847_818 - 5_130,
    "mit_b5": 81_448_138 - 5_130,
}


def images(size=32, rows=2):
    return np.random.default_rng(0).uniform(0, 255, (rows, size, size, 3)).astype("float32")


def norms_of(model, layer_class=keras.layers.BatchNormalization):
    return [layer for layer in model._flatten_layers() if isinstance(layer, layer_class)]


def randomize(model):
    rng = np.random.default_rng(1)
    for weight in model.weights:
        if weight.dtype == "float32":
            weight.assign(rng.uniform(0.02, 0.08, size=weight.shape))


@pytest.mark.parametrize(
    "name", slow_but(KERAS_CV_PARAMETERS | LARGE, *list(KERAS_CV_PARAMETERS)[:2])
)
def test_keras_cv_architectures_have_the_published_size(name):
    _, network = backbone_bodies.body(name, (64, 64, 3))
    assert network.count_params() == (KERAS_CV_PARAMETERS | LARGE)[name]


def test_every_name_of_keras_applications_is_known():
    names = backbone_bodies.names()
    assert {"ResNet50", "VGG16", "ConvNeXtTiny", "EfficientNetV2B0", "mit_b5"} <= set(names)
    assert len(names) == len(set(names))
    assert not {"imagenet_utils", "resnet", "preprocess_input"} & set(names)


@pytest.mark.parametrize(
    ("name", "preprocess"),
    [
        slow("VGG16", keras.applications.vgg16.preprocess_input),
        ("MobileNet", keras.applications.mobilenet.preprocess_input),
        slow("DenseNet121", keras.applications.densenet.preprocess_input),
        ("resnet18", lambda x: x),
    ],
)
def test_features_are_those_of_the_network_on_preprocessed_images(name, preprocess):
    model = backbone(name, input_shape=(32, 32, 3), trainable="last")
    network = model.get_layer(name)
    wanted = np.mean(network(preprocess(images())), axis=(1, 2))
    np.testing.assert_allclose(model(images()), wanted, rtol=1e-4, atol=1e-6)
    assert np.ptp(wanted) > 0
    as_bytes = images().astype("uint8")
    np.testing.assert_array_equal(model(as_bytes), model(as_bytes.astype("float32")))


@pytest.mark.parametrize("name", [slow("VGG16"), "MobileNet", "resnet18"])
def test_saving_keeps_the_preprocessing_and_what_is_frozen(name, tmp_path):
    model = backbone(name, None, (32, 32, 3), num_classes=3, trainable="last")
    model.save(tmp_path / "model.keras")
    restored = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(restored(images()), model(images()))
    assert [w.path for w in restored.trainable_variables] == ["logits/kernel", "logits/bias"]


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras", ".h5"])
def test_weights_from_a_file(suffix, tmp_path):
    constructor = keras.applications.MobileNet
    network = constructor(include_top=False, weights=None, input_shape=(32, 32, 3))
    randomize(network)
    path = tmp_path / f"saved{suffix}"
    network.save_weights(path) if suffix == ".weights.h5" else network.save(path)
    model = backbone("MobileNet", path, input_shape=(48, 48, 3), num_classes=5, batch_norm="freeze")
    loaded = model.get_layer("MobileNet").weights
    for weight, wanted in zip(loaded, network.weights, strict=True):
        np.testing.assert_array_equal(weight, wanted)


def test_replacement_keeps_the_loaded_kernels(tmp_path):
    _, network = backbone_bodies.body("resnet18", (32, 32, 3))
    randomize(network)
    network.save_weights(tmp_path / "saved.weights.h5")
    path = str(tmp_path / "saved.weights.h5")
    model = backbone("resnet18", path, (32, 32, 3), num_classes=3, batch_norm="replace")
    assert not norms_of(model)
    assert len(norms_of(model, GroupNorm)) == len(norms_of(network))
    kernels = [w for w in network.weights if w.name in ("kernel", "gamma", "beta")]
    for weight, wanted in zip(model.get_layer("resnet18").weights, kernels, strict=True):
        np.testing.assert_array_equal(weight, wanted)
    assert model.trainable_variables


def test_frozen_batch_norm_is_a_fixed_map_of_each_example():
    model = backbone("resnet18", None, (32, 32, 3), num_classes=3, batch_norm="freeze")
    norms = norms_of(model)
    assert norms and not any(layer.trainable_variables for layer in norms)
    for layer in norms:
        layer.moving_mean.assign(np.linspace(-1, 1, layer.moving_mean.shape[0]))
    before = [np.array(layer.moving_mean) for layer in norms]
    together = model(images(rows=3), training=True)
    alone = model(images(rows=3)[:1], training=True)
    np.testing.assert_allclose(together[:1], alone, rtol=1e-4, atol=1e-5)
    for layer, old in zip(norms, before, strict=True):
        np.testing.assert_array_equal(layer.moving_mean, old)


def test_last_layer_alone():
    model = backbone("MobileNet", input_shape=(32, 32, 3), num_classes=3, trainable="last")
    assert [weight.path for weight in model.trainable_variables] == ["logits/kernel", "logits/bias"]
    assert model.output_shape == (None, 3)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("resnet18", {"batch_norm": "freeze"}),
        slow("resnet18_v2", {"batch_norm": "replace"}),
        slow("mit_b0", {"input_shape": (64, 64, 3)}),
        slow("MobileNet", {"trainable": "last"}),
    ],
)
@pytest.mark.slow
def test_one_private_update(name, arguments):
    model = backbone(name, **{"input_shape": (32, 32, 3), "num_classes": 3, **arguments})
    optimizer = tfdpx.DPSGD(0.5, batch_size=2, noise_multiplier=1.0, l2_norm_clip=1.0, seed=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, run_eagerly=True)
    frozen = [np.array(weight) for weight in model.non_trainable_variables]
    before = [np.array(weight) for weight in model.trainable_variables]
    model.train_on_batch(images(model.input_shape[1]), np.array([0, 2]))
    for weight, old in zip(model.trainable_variables, before, strict=True):
        change = np.asarray(weight) - old
        assert np.isfinite(change).all() and change.any(), weight.path
    for weight, old in zip(model.non_trainable_variables, frozen, strict=True):
        assert "seed" in weight.path or np.array_equal(weight, old), weight.path


@pytest.mark.slow
def test_private_gradients_are_those_of_batches_of_one():
    model = backbone("resnet18", input_shape=(32, 32, 3), num_classes=3, batch_norm="freeze")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert_matches_batches_of_one(model, images(), np.array([0, 2]), tolerance=1e-4)


@pytest.mark.parametrize("batch_norm", [None, "typo"])
def test_trainable_batch_norm_is_refused(batch_norm):
    message = "holds 20 layers of batch normalization.*'freeze'.*'replace'.*'last'"
    if batch_norm is not None:
        message = "`batch_norm` must be one of .*Received: batch_norm='typo'"
    with pytest.raises(ValueError, match=message):
        backbone("resnet18", input_shape=(32, 32, 3), num_classes=3, batch_norm=batch_norm)


def test_networks_without_batch_norm_need_no_choice():
    model = backbone("VGG16", input_shape=(32, 32, 3), num_classes=3)
    assert len(model.trainable_variables) == 2 * 13 + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "Vgg16"}, "`name` must be one of .*ConvNeXtBase.*mit_b5.*mean 'VGG16'"),
        ({"name": None}, "`name` must be one of .*Received: name=None"),
        ({"weights": "imagenet"}, "path to a file.*Received: weights='imagenet'.*save_weights"),
        ({"weights": "/no/such.weights.h5"}, "weights='/no/such.weights.h5', which is no file"),
        ({"trainable": "first"}, "`trainable` must be one of .*Received: trainable='first'"),
        ({"num_classes": 0}, "`num_classes` must be a positive integer"),
        ({"input_shape": (32, 32)}, "`input_shape` must be"),
        ({"name": "mit_b0", "input_shape": (64, 96, 3)}, "square.*multiple of 32.*at least 64"),
        ({"name": "mit_b0", "input_shape": (72, 72, 3)}, r"Received: input_shape=\(72, 72, 3\)"),
    ],
)
def test_errors_name_argument_value_and_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        backbone(**{"name": "VGG16", "input_shape": (32, 32, 3), **arguments})


@pytest.mark.parametrize("suffix", [".weights.h5", ".keras", ".h5"])
def test_weights_of_another_network(suffix, tmp_path):
    path = tmp_path / f"saved{suffix}"
    network = keras.applications.MobileNet(include_top=False, weights=None, input_shape=(32, 32, 3))
    network.save_weights(path) if suffix == ".weights.h5" else network.save(path)
    with pytest.raises(ValueError, match="does not fit the backbone 'VGG16' of 26 weights"):
        backbone("VGG16", path, (32, 32, 3))


def test_weights_that_the_file_lacks(tmp_path, monkeypatch):
    network = keras.applications.VGG16(include_top=False, weights=None, input_shape=(32, 32, 3))
    network.save_weights(tmp_path / "saved.weights.h5")
    real = keras.layers.Conv2D.load_own_variables

    def skip_one(layer, store):
        if layer.name != "block5_conv2":
            real(layer, store)

    monkeypatch.setattr(keras.layers.Conv2D, "load_own_variables", skip_one)
    with pytest.raises(ValueError, match="2 weights are not in it, such as block5_conv2/kernel"):
        backbone("VGG16", tmp_path / "saved.weights.h5", (32, 32, 3))


def test_file_that_holds_no_weights(tmp_path):
    (tmp_path / "text.weights.h5").write_text("not weights")
    with pytest.raises(ValueError, match="does not fit the backbone 'VGG16'.*text.weights.h5"):
        backbone("VGG16", tmp_path / "text.weights.h5", (32, 32, 3))
