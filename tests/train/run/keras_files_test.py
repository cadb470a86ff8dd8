"""Classifiers on models of others: what reaches them, what trains, and what is refused."""

import dataclasses
import zipfile

import keras
import numpy as np
import pytest

import tfdpx
from tfdpx.train.config import preset_lookup
from tfdpx.train.errors import UserError
from tfdpx.train.run import classifiers, finetuning
from tfdpx.train.run.keras_files import KerasFile

L = keras.layers
SHAPE = (8, 8, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (4, *SHAPE)).astype("uint8")


def model(*first, shape=SHAPE, name="theirs"):
    """A model with batch normalization whose statistics are not those of new layers."""
    layers = [L.Conv2D(4, 3, name="conv"), L.BatchNormalization(name="norm"), L.ReLU()]
    head = [L.GlobalAveragePooling2D(), L.Dropout(0.5), L.Dense(3, activation="softmax")]
    made = keras.Sequential([keras.Input(shape), *first, *layers, *head], name=name)
    norm, rng = made.get_layer("norm"), np.random.default_rng(1)
    norm.set_weights([rng.uniform(0.5, 2.0, 4).astype("float32") for _ in range(4)])
    return made


def expected_features(source, values):
    """The inputs of the last layer of `source`, computed with its own layers."""
    x = source.get_layer("norm")(source.get_layer("conv")(values), training=False)
    return np.asarray(keras.ops.relu(x)).mean(axis=(1, 2))


PIXELS = {
    "0..255": lambda x: x,
    "0..1": lambda x: x / 255,
    "-1..1": lambda x: x / 127.5 - 1,
    "imagenet": lambda x: (x / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225],
    "caffe": lambda x: x[..., ::-1] - [103.939, 116.779, 123.68],
}


@pytest.mark.parametrize(
    ("pixels", "first", "name", "scaled"),
    [
        *((pixels, [], "theirs", pixels) for pixels in PIXELS),
        (None, [L.Rescaling(1 / 255)], "theirs", "0..255"),
        (None, [], "mobilenetv2_1.00_224", "-1..1"),
        (None, [], "ResNet50", "caffe"),
        (None, [], "densenet121", "imagenet"),
    ],
)
def test_pixels_arrive_as_the_flag_says_or_the_model_expects(pixels, first, name, scaled):
    source = model(*first, name=name)
    features = KerasFile(source, "a.keras", pixels).classifier(SHAPE, None)
    values = PIXELS[scaled](IMAGES.astype("float64"))
    values = values / 255 if first else values
    expected = expected_features(source, values.astype("float32"))
    np.testing.assert_allclose(features(IMAGES), expected, rtol=1e-4)
    assert not features.trainable_variables


def test_unknown_scaling_of_pixels_is_asked_for():
    for name in ("theirs", "convnext_tiny"):  # The second, without its scaling.
        with pytest.raises(UserError, match="by pixels=0..255 or pixels=0..1 or"):
            KerasFile(model(name=name), "a.keras")


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["last", "all"])
def test_what_trains_and_that_statistics_do_not(trainable, tmp_path):
    source = model(L.Rescaling(1 / 255))
    source.trainable = trainable == "last"  # What the file says does not matter.
    source.save(tmp_path / "a.keras")
    source = finetuning.read(str(tmp_path / "a.keras"))
    classifier = KerasFile(source, "a.keras").classifier(SHAPE, 2, trainable)
    names = {v.path.split("/")[-2] for v in classifier.trainable_variables}
    assert names == ({"logits"} if trainable == "last" else {"conv", "logits"})
    before, kernel = (source.get_layer(name).get_weights() for name in ("norm", "conv"))
    plan = tfdpx.PrivacyPlan(4, 4, 2, 1.0, delta=1e-5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(tfdpx.DPSGD(1.0, plan=plan, seed=0), loss)
    classifier.fit(plan.batches(IMAGES, np.arange(4) % 2, seed=0), verbose=0)
    for a, b in zip(before, source.get_layer("norm").get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    changed = not np.array_equal(kernel[0], source.get_layer("conv").get_weights()[0])
    assert changed == (trainable == "all")
    assert classifier.optimizer.ledger.is_complete
    classifier.save(tmp_path / "b.keras")
    again = keras.saving.load_model(tmp_path / "b.keras", compile=False)
    np.testing.assert_allclose(again(IMAGES), classifier(IMAGES), rtol=1e-5)


def test_batch_normalization_is_replaced():
    source = model(L.Rescaling(1 / 255))
    classifier = KerasFile(source, "a.keras").classifier(SHAPE, 2, batch_norm="replace")
    layers = list(classifier._flatten_layers())
    assert any(isinstance(layer, tfdpx.layers.GroupNorm) for layer in layers)
    assert not any(isinstance(layer, L.BatchNormalization) for layer in layers)
    assert any("norm/gamma" in v.path for v in classifier.trainable_variables)


@pytest.fixture
def file(tmp_path):
    """A function that saves a model and returns settings of a run from it."""

    def make(source, **given):
        source.save(tmp_path / "a.keras")
        settings = preset_lookup.resolve("digits", {"epsilon": 1.0, **given})
        return dataclasses.replace(settings, init_from=str(tmp_path / "a.keras"))

    return make


def test_a_file_is_taken_as_it_is_unless_a_model_of_tfdpx_is_asked_for(file):
    ours = classifiers.build("small_cnn", (8, 8, 1), 3, 100.0)
    settings, source = finetuning.source(file(ours, model="small_cnn"))
    assert source is None and settings.model == "small_cnn"
    settings, source = finetuning.source(file(ours))
    assert source.image_shape == (8, 8, 1)
    expected = finetuning.features(ours)(IMAGES[..., :1])
    found = source.classifier((8, 8, 1), None)(IMAGES[..., :1])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    _, source = finetuning.source(file(model(L.Rescaling(1.0)), model="small_cnn"))
    assert source.image_shape == SHAPE


MISFITS = [
    ({"model": "small_cnn", "batch_norm": "freeze"}, "Flags --pixels and --batch_norm belong"),
    ({"model": "small_cnn", "pixels": "0..1"}, "--pixels=0..1 --batch_norm=None"),
    ({"precision": "mixed_bfloat16"}, "--precision=mixed_bfloat16"),
]


def test_flags_that_do_not_fit(file):
    ours = classifiers.build("small_cnn", (8, 8, 1), 3, 100.0)
    for given, message in MISFITS:
        with pytest.raises(UserError, match=message):
            finetuning.source(file(ours, **given))


def test_a_run_folder_stands_for_its_model(tmp_path):
    settings = preset_lookup.resolve("digits", {"epsilon": 1.0, "init_from": str(tmp_path)})
    with pytest.raises(UserError, match="holds no finished run"):
        finetuning.check(settings)
    (tmp_path / "record.json").touch()
    (tmp_path / "model.keras").touch()
    with pytest.raises(UserError, match="not a model that Keras saved"):
        finetuning.check(settings)
    zipfile.ZipFile(tmp_path / "model.keras", "w").close()
    assert finetuning.check(settings).init_from == str(tmp_path / "model.keras")
    (tmp_path / "old.h5").touch()
    with pytest.raises(UserError, match="another kind.*load_model"):
        finetuning.model_file(str(tmp_path / "old.h5"))
