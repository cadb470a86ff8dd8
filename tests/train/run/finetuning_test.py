"""Fine-tuning: which weights come from the file, which train, and what the step differentiates."""

import types

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf

import tfdpx
from tfdpx.layers.private_model import last_layer
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import classifiers, finetuning


def settings(**given):
    common = dict(
        model="small_cnn", group_norm=True, weight_standardization=True, init_from=None,
        pretrained_on=None, trainable="all", lora_rank=8, relu_first=False,
    )  # fmt: skip
    return types.SimpleNamespace(**{**common, **given})


def data(num_classes=4, shape=(8, 8, 1), centre=100.0):
    return types.SimpleNamespace(
        image_shape=shape, num_classes=num_classes, centre=centre, deviation=50.0
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model of three classes and the path of its file."""
    model = classifiers.build("small_cnn", (8, 8, 1), 3, 120.0)
    path = str(tmp_path_factory.mktemp("trained") / "model.keras")
    model.save(path)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    return model, path


def assert_equal(weights, others, equal=True):
    for a, b in zip(weights, others, strict=True):
        assert np.array_equal(a, b) == equal


@pytest.mark.parametrize("num_classes", [3, 4])
def test_the_last_layer_starts_anew(trained, num_classes):
    source, path = trained
    seeds.fix(7)
    model = finetuning.build(settings(init_from=path), data(num_classes))
    assert_equal(model.get_weights()[:-2], source.get_weights()[:-2])
    kernel, bias = model.get_weights()[-2:]
    assert kernel.shape == (kernel.shape[0], num_classes) and kernel.std() > 0 and not bias.any()
    if num_classes == 3:  # As many classes need not be the same ones.
        assert_equal([kernel], source.get_weights()[-2:-1], equal=False)


def test_all_weights_come_from_a_file_of_weights(trained):
    source, path = trained
    init_from = path.replace(".keras", ".weights.h5")
    model = finetuning.build(settings(init_from=init_from), data(num_classes=3))
    assert_equal(model.get_weights(), source.get_weights())


@pytest.mark.parametrize("kind", [".keras", ".weights.h5", "features"])
def test_the_ledger_is_complete_since_the_origin_is_checked_elsewhere(trained, kind):
    path = trained[1]
    if kind == "features":
        model = keras.Sequential([finetuning.features_of(path), keras.layers.Dense(4)])
    else:
        init_from = path.replace(".keras", kind)
        model = finetuning.build(settings(init_from=init_from), data(num_classes=3))
    model.compile(tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0), loss="mse")
    assert model.optimizer.ledger.is_complete
    model.load_weights(path) if kind != "features" else model.layers[0].load_weights(path)
    assert not model.optimizer.ledger.is_complete


def test_grey_levels_are_normalised_as_the_weights_expect(trained):
    source, path = trained
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1)).astype("uint8")
    model = finetuning.build(settings(init_from=path), data(num_classes=3))
    np.testing.assert_allclose(
        model.get_layer("normalise")(images), source.get_layer("normalise")(images), atol=1e-5
    )
    new = finetuning.build(settings(), data())
    np.testing.assert_allclose(
        new.get_layer("normalise")(images), (images - 100.0) / 50.0, atol=1e-5
    )


def test_standardization_per_channel_survives_the_file(tmp_path):
    mean, deviation = (10.0, 120.0, 130.0), (20.0, 50.0, 60.0)
    source = classifiers.build("small_cnn", (8, 8, 3), 3, mean, deviation)
    path = str(tmp_path / "model.keras")
    source.save(path)
    model = finetuning.build(settings(init_from=path), data(3, (8, 8, 3)))
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype("uint8")
    expected = (images - np.array(mean)) / np.array(deviation)
    np.testing.assert_allclose(model.get_layer("normalise")(images), expected, atol=1e-5)


def test_a_network_with_its_layers_in_another_order_is_refused(tmp_path):
    path = str(tmp_path / "model.keras")
    classifiers.build("wrn_10_1", (8, 8, 3), 3, 120.0, relu_first=True).save(path)
    given = dict(model="wrn_10_1", init_from=path)
    finetuning.build(settings(**given, relu_first=True), data(3, (8, 8, 3)))
    with pytest.raises(UserError, match="--relu_first as it was trained"):
        finetuning.build(settings(**given), data(3, (8, 8, 3)))


@pytest.mark.parametrize("name", ["small_cnn", "lenet", "wrn_10_1", "nf_resnet_50"])
def test_last_trains_the_logits_alone(name):
    shape = (8, 8, 1) if name == "small_cnn" else (32, 32, 3)
    model = finetuning.build(settings(model=name, trainable="last"), data(4, shape))
    assert [v.path.split("/")[-2:] for v in model.trainable_variables] == [
        ["logits", "kernel"],
        ["logits", "bias"],
    ]


def operations(graph):
    """Every operation of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    bodies = [definition.node, *(function.node_def for function in definition.library.function)]
    return [node.op for body in bodies for node in body]


@pytest.mark.slow
@pytest.mark.parametrize(("trainable", "is_differentiated"), [("last", False), ("all", True)])
def test_a_frozen_body_runs_once_and_is_not_differentiated(trainable, is_differentiated):
    model = finetuning.build(settings(trainable=trainable), data())
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-5)
    augment = tfdpx.augment.RandomCropFlip(1)
    model.compile(
        tfdpx.DPSGD(0.1, plan=plan, augment=augment, augmult=4, seed=0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    batch = (tf.zeros([8, 8, 8, 1], tf.uint8), tf.zeros([8], tf.int64), tf.ones([8]))
    step = tf.function(model.train_step, autograph=False).get_concrete_function(batch)
    ops = operations(step.graph)
    backward = [op for op in ops if op.startswith("Conv2DBackprop")]
    assert bool(backward) == is_differentiated
    if not is_differentiated:
        assert ops.count("Conv2D") == 3  # The body has three.


def test_other_image_sizes_fit_where_the_weights_do(tmp_path):
    source = classifiers.build("wrn_10_1", (16, 16, 3), 3, 120.0)
    source.save(tmp_path / "model.keras")
    init_from = str(tmp_path / "model.keras")
    model = finetuning.build(
        settings(model="wrn_10_1", init_from=init_from), data(3, shape=(24, 24, 3))
    )
    assert model.input_shape == (None, 24, 24, 3)
    assert_equal(model.get_weights()[:-2], source.get_weights()[:-2])


@pytest.mark.slow
def test_training_the_last_layer_leaves_the_body_as_it_was(trained):
    source, path = trained
    model = finetuning.build(settings(init_from=path, trainable="last"), data(num_classes=3))
    plan = tfdpx.PrivacyPlan(16, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-5)
    model.compile(
        tfdpx.DPSGD(1.0, plan=plan, seed=0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 1)).astype("uint8")
    model.fit(plan.batches(images, np.arange(16) % 3, seed=0), verbose=0)
    assert_equal(model.get_weights()[:-2], source.get_weights()[:-2])
    assert_equal(model.get_weights()[-2:], source.get_weights()[-2:], equal=False)


MISSING = [
    (dict(pretrained_on="imagenet32"), "trained on 'imagenet32': name its file"),
    (dict(init_from="/no/such/model.keras"), "=/no/such/model.keras, which does not exist"),
    (dict(init_from="/etc/hostname"), "or a file that ends in .keras"),
]


def test_models_that_are_missing():
    for given, message in MISSING:
        with pytest.raises(UserError, match=message):
            finetuning.check(settings(**given))


@pytest.mark.slow
def test_files_that_do_not_fit(trained, tmp_path):
    _, path = trained
    with pytest.raises(UserError, match="another than --model=scatter_linear.*it is 'small_cnn'"):
        finetuning.build(settings(model="scatter_linear", init_from=path), data())
    with pytest.raises(UserError, match=r"shape \(8, 8, 3\).*for \(8, 8, 1\)"):
        finetuning.build(settings(init_from=path), data(shape=(8, 8, 3)))
    with pytest.raises(UserError, match="do not fit --model=small_cnn with 4 classes"):
        finetuning.build(settings(init_from=path.replace(".keras", ".weights.h5")), data())
    with pytest.raises(UserError, match="other layers.*--weight_standardization"):
        finetuning.build(settings(init_from=path, weight_standardization=False), data())
    (tmp_path / "junk.keras").write_bytes(b"junk")
    with pytest.raises(UserError, match="Cannot read --init_from"):
        finetuning.build(settings(init_from=str(tmp_path / "junk.keras")), data())
    other = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    other.save(tmp_path / "other.keras")
    with pytest.raises(UserError, match="no layer 'normalise'"):
        finetuning.build(settings(init_from=str(tmp_path / "other.keras")), data())


def test_features_are_what_the_last_layer_receives(tmp_path):
    classifier = classifiers.build("small_cnn", (8, 8, 1), 3, 100.0, 50.0)
    classifier.save(tmp_path / "model.keras")
    features = finetuning.features_of(str(tmp_path / "model.keras"))
    images = np.random.default_rng(0).integers(0, 256, [4, 8, 8, 1]).astype("uint8")
    last = last_layer(classifier)
    found = features(images / 255.0)
    assert found.shape == (4, 256) and not features.trainable_variables
    np.testing.assert_allclose(last(found), classifier(images), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wrn_10_1", "nf_resnet_26", "scatter_linear"])
def test_every_classifier_has_features(name):
    shape = (8, 8, 1) if name == "scatter_linear" else (16, 16, 3)
    classifier = classifiers.build(name, shape, 3, 100.0)
    features = finetuning.features(classifier)
    assert len(features.output.shape) == 2
    own = len(last_layer(classifier).weights)
    assert len(features.weights) == len(classifier.weights) - own
    assert isinstance(last_layer(classifier), keras.layers.Dense)
