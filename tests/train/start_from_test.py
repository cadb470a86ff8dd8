"""Runs from trained weights: those from the file, those that train, and the data they have seen."""

import math
import shutil
import types
import zipfile

import keras
import numpy as np
import pytest
import seeds

import tfdpx
from tfdpx.accounting import Ledger
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import settings, start_from
from tfdpx.train.data import identity
from tfdpx.train.errors import UserError
from tfdpx.train.start_from import Start, ledger_on, model_file

L = keras.layers
PRIVATE = Ledger((Entry(4.0, 0.1, 60, run=7),))
SHAPE = (8, 8, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (4, *SHAPE)).astype("uint8")
GRAY = IMAGES[..., :1]


def start(path=None, **arguments):
    """Returns the start of a run."""
    arguments = {"epsilon": 1.0, "init_from": path and str(path), "init_data": "mnist", **arguments}
    return Start(settings.resolve("digits", arguments))


def built(path=None, num_classes=3, shape=(8, 8, 1), **arguments):
    """Returns the model of a run on data of another centre than the file's."""
    data = dict(image_shape=shape, num_classes=num_classes, centre=100.0, deviation=50.0)
    return start(path, **{"model": "small_cnn", **arguments}).build(types.SimpleNamespace(**data))


def saved(path, *arguments, **keywords):
    model = start_from.classifier(*arguments, **keywords)
    model.save(path / "model.keras")
    return model, str(path / "model.keras")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model, path = saved(tmp_path_factory.mktemp("trained"), "small_cnn", (8, 8, 1), 3, 120.0)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    return model, path


def test_the_last_layer_starts_anew(trained):
    source, path = trained
    wanted = source.get_weights()
    seeds.fix(7)
    # As many classes need not be the same ones.
    weights = path.replace(".keras", ".weights.h5")
    cases = [(path, 3), (path, 4), (weights, 3), (weights, 4)]
    for file, num_classes in cases:
        model = built(file, num_classes)
        *body, kernel, bias = model.get_weights()
        assert all(map(np.array_equal, body, wanted[:-2])) and not bias.any()
        assert kernel.shape[1] == num_classes and not np.array_equal(kernel, wanted[-2])
        if file == path:  # Scaled for the loaded weights.
            pixels = [np.asarray(net.get_layer("normalise")(GRAY)) for net in (model, source)]
            np.testing.assert_allclose(*pixels, atol=1e-5)
        model.compile(tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0), loss="mse")
        assert model.optimizer.ledger.is_complete  # The origin is in the record.


@pytest.mark.slow
def test_files_that_do_not_fit(trained, tmp_path):
    _, path = trained
    junk = tmp_path / "junk.keras"
    junk.write_bytes(b"junk")
    weights = path.replace(".keras", ".weights.h5")
    (tmp_path / "of_a_newer_version").mkdir()
    _, newer = saved(tmp_path / "of_a_newer_version", "small_cnn", (8, 8, 1), 3, 120.0)
    with zipfile.ZipFile(newer, "a") as archive:
        archive.writestr(records._ENTRY, '{"format": "tfdpx.Record/99"}')
    shape = dict(model="wrn_10_1", shape=(24, 24, 3))
    _, other_order = saved(tmp_path, "wrn_10_1:norm_before_relu=false", (16, 16, 3), 3, 120.0)
    for file, arguments, message in [
        (path, dict(model="scatter_linear"), "'small_cnn', has other layers than --model=scatter"),
        (path, dict(shape=SHAPE), r"do not fit --model=small_cnn.*shape \(8, 8, 3\)"),
        (weights, dict(model="resnet_20"), "do not fit --model=resnet_20"),
        (newer, {}, "Damaged: the account in the file"),
        (path, dict(model="small_cnn:weight_standardization=false"), "other layers"),
        (other_order, shape, "name it with the arguments that it was"),
        (junk, {}, "Cannot read --init_from"),
        (path, dict(batch_norm="freeze"), "Flags --pixels and --batch_norm belong"),
        (path, dict(pixels="0..1"), "Flags --pixels and --batch_norm belong to.*--model=small_cnn"),
        (weights, dict(model="auto", pixels="0..1"), "no architecture.*--init_from=.*--model=auto"),
        ("ResNet50", {}, r"ResNet50\(weights=.*--init_from=m.keras --init_data"),
        (path, dict(model="auto", precision="mixed_bfloat16"), "--precision=mixed_bfloat16"),
    ]:
        with pytest.raises(UserError, match=message):
            built(file, **arguments)


def theirs(*first, shape=SHAPE, name="theirs"):
    """Returns a model with batch normalization, with statistics that differ from new layers."""
    layers = [L.Conv2D(4, 3, name="conv"), L.BatchNormalization(name="norm"), L.ReLU()]
    head = [L.GlobalAveragePooling2D(), L.Dropout(0.5), L.Dense(3, activation="softmax")]
    model = keras.Sequential([keras.Input(shape), *first, *layers, *head], name=name)
    rng = np.random.default_rng(1)
    model.get_layer("norm").set_weights(
        [rng.uniform(0.5, 2.0, 4).astype("float32") for _ in range(4)]
    )
    return model


def file_of(model, tmp_path):
    model.save(tmp_path / "theirs.keras")
    return tmp_path / "theirs.keras"


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
def test_pixels_arrive_as_the_flag_says_or_the_model_expects(pixels, first, name, scaled, tmp_path):
    source = theirs(*first, name=name)
    features = start(file_of(source, tmp_path), pixels=pixels).extractor(SHAPE)
    values = PIXELS[scaled](IMAGES.astype("float64"))
    values = (values / 255 if first else values).astype("float32")
    x = source.get_layer("norm")(source.get_layer("conv")(values), training=False)
    expected = np.asarray(keras.ops.relu(x)).mean(axis=(1, 2))
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(features(IMAGES), expected, rtol=1e-4)
    assert not features.trainable_variables


def test_unknown_scaling_of_pixels_is_asked_for(tmp_path):
    for name in ("theirs", "convnext_tiny"):  # The second has lost its scaling.
        with pytest.raises(UserError, match="--pixels=0..255 or --pixels=0..1 or"):
            start(file_of(theirs(name=name), tmp_path))


@pytest.mark.slow
def test_weights_that_train_and_statistics_that_do_not(tmp_path):
    source = theirs(L.Rescaling(1 / 255))
    for trainable, wanted in (("last", {"logits"}), ("all", {"conv", "logits"})):
        source.trainable = trainable == "last"  # The state in the file does not matter.
        classifier = built(file_of(source, tmp_path), 2, SHAPE, trainable=trainable, model="auto")
        assert {v.path.split("/")[-2] for v in classifier.trainable_variables} == wanted
    before = [v.numpy() for v in classifier.variables]
    plan = tfdpx.PrivacyPlan(4, 4, 2, 1.0, delta=1e-5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(tfdpx.DPSGD(1.0, plan=plan, seed=0), loss)
    classifier.fit(plan.batches(IMAGES, np.arange(4) % 2, seed=0), verbose=0)
    for value, variable in zip(before, classifier.variables, strict=True):
        trains = variable.path.split("/")[-2] in wanted
        assert np.array_equal(value, variable.numpy()) != trains, variable.path
    flags = dict(model="auto", batch_norm="replace")
    replaced = built(tmp_path / "theirs.keras", 2, SHAPE, **flags)._flatten_layers()
    kinds = {type(layer).__name__ for layer in replaced}
    assert "GroupNorm" in kinds and "BatchNormalization" not in kinds


def test_a_run_folder_stands_for_its_model(trained, tmp_path):
    with pytest.raises(UserError, match="holds no finished run"):
        start(tmp_path)
    (tmp_path / "record.json").touch()
    trained[0].save(tmp_path / "model.keras")
    assert start(tmp_path).image_shape == (8, 8, 1)
    (tmp_path / "old.h5").touch()
    with pytest.raises(UserError, match="another kind.*load_model"):
        model_file(str(tmp_path / "old.h5"))


@pytest.fixture
def file(tmp_path):
    """A function that makes a file with weights that were trained on some data sets."""
    bare = tmp_path / "bare.keras"
    keras.Sequential([keras.Input(SHAPE), L.Rescaling(1.0), L.Flatten(), L.Dense(3)]).save(bare)

    def make(*names, ledger=PRIVATE):
        path, upstream = tmp_path / f"{len(list(tmp_path.iterdir()))}.keras", ()
        for name in names:
            shutil.copy(bare, path)
            Record("classify", identity.of(name), ledger, 1e-5, seen=upstream).save(path)
            upstream = start(path, init_data=None).seen
        return path

    return make


def before(path, dataset, init_data=None, **arguments):
    return ledger_on(start(path, init_data=init_data).seen, dataset, **arguments)


SEEN = [
    ("sklearn_digits", "digits", True),
    ("sklearn_digits:0-4", "digits:5-9", False),
    ("sklearn_digits:0-4", "digits:4-9", True),
    ("sklearn_digits:0-4", "digits", True),
    ("mnist", "digits", False),
    ("mnist", "mnist:3.0.1", True),
    ("imagenet_resized/32x32", "imagenet2012", True),
    ("cifar10", "cifar100", False),
    ("synthetic:strokes", "digits", False),
]


def test_a_training_on_the_same_data_is_counted(file):
    for earlier, dataset, overlaps in SEEN:
        names = (earlier, "places365_small") if earlier == "mnist" else ("places365_small", earlier)
        assert before(file(*names), dataset) == (PRIVATE if overlaps else Ledger()), earlier


def test_a_training_on_data_of_a_free_name_is_counted(file, tmp_path):
    path, folder = file("places365_small"), tmp_path / "ward"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
    # `tfdpx.report(model, ..., data="ward 7")` may have read the same files.
    Record("tfdpx.report", DatasetId("ward 7", 80), PRIVATE, 1e-5).save(path)
    assert before(path, f"folder:{folder}") == PRIVATE
    assert before(path, "digits") == Ledger()
    assert before(file("mnist"), f"folder:{folder}") == Ledger()


def test_a_training_without_an_account_needs_a_word(file):
    path = file("places365_small", "digits", ledger=start_from.not_private())
    with pytest.raises(UserError, match="already, without an account.*--head_steps"):
        before(path, "digits:0-4")
    assert before(path, "digits:0-4", allow_unaccounted=True).epsilon(1e-5) == math.inf
    assert before(path, "mnist") == Ledger()
    assert before(file("digits", ledger=Ledger()), "digits") == Ledger()  # It cost nothing.


def test_a_file_that_does_not_say(file, trained, tmp_path):
    keras.saving.load_model(file("digits")).save(tmp_path / "rewritten.keras")
    weights = trained[1].replace(".keras", ".weights.h5")
    for path, arguments in ((tmp_path / "rewritten.keras", {}), (weights, {"model": "small_cnn"})):
        with pytest.raises(UserError, match="does not say.*name its data with --init_data"):
            start(path, init_data=None, **arguments).seen  # noqa: B018
        seen = start(path, init_data="imagenet32", **arguments).seen
        assert ledger_on(seen, "digits") == Ledger()
        with pytest.raises(UserError, match="trained on sklearn_digits already, without"):
            ledger_on(start(path, init_data="digits", **arguments).seen, "digits")
    # The declaration of the file has precedence over the user's.
    assert before(file("digits"), "digits", init_data="mnist") == PRIVATE
