"""Runs from trained weights: which come from the file, which train, and what they have seen."""

import math
import types

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf

import tfdpx
from tfdpx.accounting import Ledger
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import Record
from tfdpx.layers.private_model import last_layer
from tfdpx.train import classifiers, settings, start_from
from tfdpx.train.data import identity
from tfdpx.train.errors import UserError
from tfdpx.train.start_from import Start

L = keras.layers
PRIVATE = Ledger((Entry(4.0, 0.1, 60, run=7),))
SHAPE = (8, 8, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (4, *SHAPE)).astype("uint8")
GRAY = IMAGES[..., :1]


def start(path=None, **given):
    """The start of a run, and its settings."""
    own = {name: given.pop(name, None) for name in ("pixels", "batch_norm")}
    given = {"epsilon": 1.0, "init_from": path and str(path), "init_data": "mnist", **given}
    return Start(settings.resolve("digits", given), **own)


def built(path=None, num_classes=3, shape=(8, 8, 1), **given):
    """The model of a run on data of another centre than the file's."""
    data = dict(image_shape=shape, num_classes=num_classes, centre=100.0, deviation=50.0)
    return start(path, **{"model": "small_cnn", **given}).build(types.SimpleNamespace(**data))


def saved(path, *arguments, **given):
    model = classifiers.build(*arguments, **given)
    model.save(path / "model.keras")
    return model, str(path / "model.keras")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model, path = saved(tmp_path_factory.mktemp("trained"), "small_cnn", (8, 8, 1), 3, 120.0)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    return model, path


@pytest.mark.parametrize("num_classes", [3, 4])
def test_the_last_layer_starts_anew(trained, num_classes):
    source, path = trained
    seeds.fix(7)
    model = built(path, num_classes)
    assert all(map(np.array_equal, model.get_weights()[:-2], source.get_weights()[:-2]))
    kernel, bias = model.get_weights()[-2:]
    assert kernel.shape == (kernel.shape[0], num_classes) and kernel.std() > 0 and not bias.any()
    # As many classes need not be the same ones.
    assert not np.array_equal(kernel, source.get_weights()[-2])
    model.compile(tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0), loss="mse")
    assert model.optimizer.ledger.is_complete  # The origin is in the record.


def test_all_weights_come_from_a_file_of_weights(trained):
    source, path = trained
    model = built(path.replace(".keras", ".weights.h5"))
    assert all(map(np.array_equal, model.get_weights(), source.get_weights()))
    model.compile(tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0), loss="mse")
    assert model.optimizer.ledger.is_complete


def test_pixels_are_normalised_as_the_weights_expect(trained, tmp_path):
    def normalised(model, images):
        return np.asarray(model.get_layer("normalise")(images))

    source, path = trained
    np.testing.assert_allclose(normalised(built(path), GRAY), normalised(source, GRAY), atol=1e-5)
    np.testing.assert_allclose(normalised(built(), GRAY), (GRAY - 100.0) / 50.0, atol=1e-5)
    mean, deviation = (10.0, 120.0, 130.0), (20.0, 50.0, 60.0)
    _, path = saved(tmp_path, "small_cnn", SHAPE, 3, mean, deviation)
    values = normalised(built(path, shape=SHAPE), IMAGES)
    np.testing.assert_allclose(values, (IMAGES - np.array(mean)) / np.array(deviation), atol=1e-5)


def operations(graph):
    """Every operation of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    bodies = [definition.node, *(function.node_def for function in definition.library.function)]
    return [node.op for body in bodies for node in body]


@pytest.mark.slow
@pytest.mark.parametrize(("trainable", "is_differentiated"), [("last", False), ("all", True)])
def test_a_frozen_body_runs_once_and_is_not_differentiated(trained, trainable, is_differentiated):
    model = built(trained[1], trainable=trainable)
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-5)
    augment = tfdpx.augment.RandomCropFlip(1)
    model.compile(
        tfdpx.DPSGD(0.1, plan=plan, augment=augment, augmult=4, seed=0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batch = (tf.zeros([8, 8, 8, 1], tf.uint8), tf.zeros([8], tf.int64), tf.ones([8]))
    step = tf.function(model.train_step, autograph=False).get_concrete_function(batch)
    ops = operations(step.graph)
    assert any(op.startswith("Conv2DBackprop") for op in ops) == is_differentiated
    if not is_differentiated:
        assert ops.count("Conv2D") == 3  # The body has three.


@pytest.mark.parametrize("name", ["wrn_10_1", pytest.param("nf_resnet_26", marks=pytest.mark.slow)])
def test_an_extractor_gives_the_inputs_of_the_last_layer_at_norm_one(name, tmp_path):
    images = np.repeat(np.repeat(IMAGES, 4, 1), 4, 2)
    classifier, path = saved(tmp_path, name, (32, 32, 3), 3, 100.0, 50.0)
    rows = np.asarray(start(path, model=name).extractor((32, 32, 3))(images))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-5)
    layer = last_layer(classifier)
    kernel = np.asarray(layer.kernel)
    raw = np.asarray(classifier(images)) - np.asarray(layer.bias)
    scales = raw[:, :1] / (rows @ kernel)[:, :1]
    np.testing.assert_allclose(scales * (rows @ kernel), raw, rtol=1e-3, atol=1e-4)


def test_sizes_and_order_of_layers_of_a_wide_resnet(tmp_path):
    source, path = saved(tmp_path, "wrn_10_1", (16, 16, 3), 3, 120.0, relu_first=True)
    given = dict(model="wrn_10_1", shape=(24, 24, 3))
    model = built(path, **given, relu_first=True)  # Another size, where the weights fit.
    assert model.input_shape == (None, 24, 24, 3)
    assert all(map(np.array_equal, model.get_weights()[:-2], source.get_weights()[:-2]))
    with pytest.raises(UserError, match="--relu_first as it was trained"):
        built(path, **given)


def test_files_that_do_not_fit(trained, tmp_path):
    _, path = trained
    junk = tmp_path / "junk.keras"
    junk.write_bytes(b"junk")
    weights = path.replace(".keras", ".weights.h5")
    for file, given, message in [
        (path, dict(model="scatter_linear"), "another than --model=scatter_linear.*'small_cnn'"),
        (path, dict(shape=SHAPE), r"shape \(8, 8, 3\).*for \(8, 8, 1\)"),
        (weights, dict(num_classes=4), "do not fit --model=small_cnn with 4 classes"),
        (path, dict(weight_standardization=False), "other layers.*--weight_standardization"),
        (junk, {}, "Cannot read --init_from"),
        (path, dict(batch_norm="freeze"), "Flags --pixels and --batch_norm belong"),
        (path, dict(pixels="0..1"), "--pixels=0..1 --batch_norm=None"),
        (path, dict(model="auto", precision="mixed_bfloat16"), "--precision=mixed_bfloat16"),
    ]:
        with pytest.raises(UserError, match=message):
            built(file, **given)


def theirs(*first, shape=SHAPE, name="theirs"):
    """A model with batch normalization whose statistics are not those of new layers."""
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
    for name in ("theirs", "convnext_tiny"):  # The second, without its scaling.
        with pytest.raises(UserError, match="by pixels=0..255 or pixels=0..1 or"):
            start(file_of(theirs(name=name), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["last", "all"])
def test_weights_that_train_and_statistics_that_do_not(trainable, tmp_path):
    source = theirs(L.Rescaling(1 / 255))
    source.trainable = trainable == "last"  # The state in the file does not matter.
    path = file_of(source, tmp_path)
    classifier = built(path, 2, SHAPE, trainable=trainable)
    names = {v.path.split("/")[-2] for v in classifier.trainable_variables}
    assert names == ({"logits"} if trainable == "last" else {"conv", "logits"})
    variables = classifier.variables
    before = [v.numpy() for v in variables]
    plan = tfdpx.PrivacyPlan(4, 4, 2, 1.0, delta=1e-5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile(tfdpx.DPSGD(1.0, plan=plan, seed=0), loss)
    classifier.fit(plan.batches(IMAGES, np.arange(4) % 2, seed=0), verbose=0)
    for value, variable in zip(before, variables, strict=True):
        layer = variable.path.split("/")[-2]
        trains = layer == "logits" or (trainable == "all" and layer == "conv")
        assert np.array_equal(value, variable.numpy()) != trains, variable.path
    assert classifier.optimizer.ledger.is_complete


def test_batch_normalization_is_replaced(tmp_path):
    path = file_of(theirs(L.Rescaling(1 / 255)), tmp_path)
    classifier = built(path, 2, SHAPE, batch_norm="replace")
    layers = list(classifier._flatten_layers())
    assert any(isinstance(layer, tfdpx.layers.GroupNorm) for layer in layers)
    assert not any(isinstance(layer, L.BatchNormalization) for layer in layers)


def test_a_file_is_taken_as_it_is_unless_a_model_of_tfdpx_is_asked_for(trained, tmp_path):
    _, path = trained
    assert start(path, model="small_cnn").settings.model == "small_cnn"
    assert start(path).settings.model == "of init_from" and start(path).image_shape == (8, 8, 1)
    path = file_of(theirs(L.Rescaling(1.0)), tmp_path)
    assert start(path, model="small_cnn").image_shape == SHAPE


def test_a_run_folder_stands_for_its_model(trained, tmp_path):
    with pytest.raises(UserError, match="holds no finished run"):
        start(tmp_path)
    (tmp_path / "record.json").touch()
    (tmp_path / "model.keras").touch()
    with pytest.raises(UserError, match="not a model that Keras saved"):
        start(tmp_path)
    trained[0].save(tmp_path / "model.keras")
    assert start(tmp_path).settings.init_from == str(tmp_path / "model.keras")
    (tmp_path / "old.h5").touch()
    with pytest.raises(UserError, match="another kind.*load_model"):
        start_from.model_file(str(tmp_path / "old.h5"))


@pytest.fixture
def file(tmp_path):
    """A function that makes a file whose weights were trained on the given data sets."""

    def make(*names, ledger=PRIVATE):
        path, seen = tmp_path / f"{len(list(tmp_path.iterdir()))}.keras", ()
        for name in names:
            theirs(L.Rescaling(1.0)).save(path)
            Record("classify", identity.of(name), ledger, 1e-5, seen=seen).save(path)
            seen = start(path, init_data=None).seen
        return path

    return make


def before(path, dataset, init_data=None, **given):
    return start(path, init_data=init_data).ledger_on(dataset, **given)


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
    for seen, dataset, overlaps in SEEN:
        names = (seen, "places365_small") if seen == "mnist" else ("places365_small", seen)
        assert before(file(*names), dataset) == (PRIVATE if overlaps else Ledger()), seen


def test_a_training_without_an_account_needs_a_word(file):
    path = file("places365_small", "digits", ledger=start_from.not_private())
    with pytest.raises(UserError, match="already, without an account.*--head_steps"):
        before(path, "digits:0-4")
    assert before(path, "digits:0-4", allow_unaccounted=True).epsilon(1e-5) == math.inf
    assert before(path, "mnist") == Ledger()
    assert before(file("digits", ledger=Ledger()), "digits") == Ledger()  # It cost nothing.


@pytest.mark.parametrize("name", ["other.weights.h5", "rewritten.keras"])
def test_a_file_that_does_not_say(file, tmp_path, name):
    path = tmp_path / name
    model = keras.saving.load_model(file("digits"))  # Rewritten by Keras.
    (model.save if name.endswith(".keras") else model.save_weights)(path)
    given = dict(model="small_cnn") if name.endswith(".h5") else {}
    with pytest.raises(UserError, match="does not say.*name its data with --init_data"):
        start(path, init_data=None, **given).seen  # noqa: B018
    assert start(path, init_data="imagenet32", **given).ledger_on("digits") == Ledger()
    with pytest.raises(UserError, match="trained on sklearn_digits already, without"):
        start(path, init_data="digits", **given).ledger_on("digits")
    # The word of the file goes before that of the user.
    assert before(file("digits"), "digits", init_data="mnist") == PRIVATE
