"""Fine-tuning: which weights come from the file, which train, and what the step differentiates."""

import types

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf

import tfdpx
from tfdpx.layers.private_model import last_layer
from tfdpx.train.errors import UserError
from tfdpx.train.run import classifiers, finetuning

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype("uint8")


def built(num_classes=3, shape=(8, 8, 1), **given):
    """The model of a run on data of another centre than the file's."""
    settings = dict(
        model="small_cnn", group_norm=True, weight_standardization=True, init_from=None,
        pretrained_on=None, trainable="all", lora_rank=8, relu_first=False,
    )  # fmt: skip
    data = dict(image_shape=shape, num_classes=num_classes, centre=100.0, deviation=50.0)
    return finetuning.build(
        types.SimpleNamespace(**{**settings, **given}), types.SimpleNamespace(**data)
    )


def saved(path, *arguments, **given):
    """A model of three classes and the path of its file."""
    model = classifiers.build(*arguments, **given)
    model.save(path / "model.keras")
    return model, str(path / "model.keras")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    model, path = saved(tmp_path_factory.mktemp("trained"), "small_cnn", (8, 8, 1), 3, 120.0)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    return model, path


def normalised(model, images):
    return np.asarray(model.get_layer("normalise")(images))


@pytest.mark.parametrize("num_classes", [3, 4])
def test_the_last_layer_starts_anew(trained, num_classes):
    source, path = trained
    seeds.fix(7)
    model = built(num_classes, init_from=path)
    assert all(map(np.array_equal, model.get_weights()[:-2], source.get_weights()[:-2]))
    kernel, bias = model.get_weights()[-2:]
    assert kernel.shape == (kernel.shape[0], num_classes) and kernel.std() > 0 and not bias.any()
    # As many classes need not be the same ones.
    assert not np.array_equal(kernel, source.get_weights()[-2])


def test_all_weights_come_from_a_file_of_weights(trained):
    source, path = trained
    model = built(init_from=path.replace(".keras", ".weights.h5"))
    assert all(map(np.array_equal, model.get_weights(), source.get_weights()))


@pytest.mark.parametrize("kind", [".keras", ".weights.h5", "features"])
def test_the_ledger_is_complete_since_the_origin_is_checked_elsewhere(trained, kind):
    path = trained[1]
    if kind == "features":
        model = keras.Sequential([finetuning.features_of(path), keras.layers.Dense(4)])
        assert not model.layers[0].trainable_variables
    else:
        model = built(init_from=path.replace(".keras", kind))
    model.compile(tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0), loss="mse")
    assert model.optimizer.ledger.is_complete


def test_pixels_are_normalised_as_the_weights_expect(trained, tmp_path):
    source, path = trained
    gray = IMAGES[..., :1]
    np.testing.assert_allclose(
        normalised(built(init_from=path), gray), normalised(source, gray), atol=1e-5
    )
    np.testing.assert_allclose(normalised(built(), gray), (gray - 100.0) / 50.0, atol=1e-5)
    mean, deviation = (10.0, 120.0, 130.0), (20.0, 50.0, 60.0)
    _, path = saved(tmp_path, "small_cnn", (8, 8, 3), 3, mean, deviation)
    found = normalised(built(shape=(8, 8, 3), init_from=path), IMAGES)
    np.testing.assert_allclose(found, (IMAGES - np.array(mean)) / np.array(deviation), atol=1e-5)


def operations(graph):
    """Every operation of a graph and of the functions that it calls."""
    definition = graph.as_graph_def()
    bodies = [definition.node, *(function.node_def for function in definition.library.function)]
    return [node.op for body in bodies for node in body]


@pytest.mark.slow
@pytest.mark.parametrize(("trainable", "is_differentiated"), [("last", False), ("all", True)])
def test_a_frozen_body_runs_once_and_is_not_differentiated(trainable, is_differentiated):
    model = built(trainable=trainable)
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
def test_features_are_what_the_last_layer_receives(name):
    images = np.repeat(np.repeat(IMAGES, 4, 1), 4, 2)
    classifier = classifiers.build(name, (32, 32, 3), 3, 100.0, 50.0)
    features = finetuning.features(classifier)
    logits = last_layer(classifier)(features(images))
    np.testing.assert_allclose(logits, classifier(images), atol=1e-5)


def test_sizes_and_order_of_layers_of_a_wide_resnet(tmp_path):
    source, path = saved(tmp_path, "wrn_10_1", (16, 16, 3), 3, 120.0, relu_first=True)
    given = dict(model="wrn_10_1", init_from=path, shape=(24, 24, 3))
    model = built(**given, relu_first=True)  # Another size, where the weights fit.
    assert model.input_shape == (None, 24, 24, 3)
    assert all(map(np.array_equal, model.get_weights()[:-2], source.get_weights()[:-2]))
    with pytest.raises(UserError, match="--relu_first as it was trained"):
        built(**given)


def test_files_that_do_not_fit(trained, tmp_path):
    _, path = trained
    junk, other = tmp_path / "junk.keras", tmp_path / "other.keras"
    junk.write_bytes(b"junk")
    keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()]).save(other)
    weights = path.replace(".keras", ".weights.h5")
    for given, message in [
        (dict(model="scatter_linear"), "another than --model=scatter_linear.*it is 'small_cnn'"),
        (dict(shape=(8, 8, 3)), r"shape \(8, 8, 3\).*for \(8, 8, 1\)"),
        (dict(init_from=weights, num_classes=4), "do not fit --model=small_cnn with 4 classes"),
        (dict(weight_standardization=False), "other layers.*--weight_standardization"),
        (dict(init_from=str(junk)), "Cannot read --init_from"),
        (dict(init_from=str(other)), "no layer 'normalise'"),
    ]:
        with pytest.raises(UserError, match=message):
            built(**{"init_from": path, **given})
