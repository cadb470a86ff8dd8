"""Fixed features are computed once: of --trainable=last and of --features."""

import types

import keras
import numpy as np
import pytest
import seeds

import tfdpx
from tfdpx.accounting import Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import defaults, fitting, settings, start_from
from tfdpx.train.data.images import ImageData
from tfdpx.train.errors import UserError
from tfdpx.train.start_from import Start

COUNT, SHAPE = 24, (8, 8, 1)
DATA = types.SimpleNamespace(image_shape=SHAPE, num_classes=3, centre=120.0, deviation=60.0)


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (COUNT, *SHAPE)).astype("uint8")
    labels = rng.integers(0, 3, COUNT)
    return ImageData(
        "made up", images, labels, images[:5], labels[:5], COUNT, SHAPE, "test", ("a", "b", "c"),
        127.5, 127.5,
    )  # fmt: skip


def last_layer(**arguments):
    arguments = dict(model="small_cnn", trainable="last", init_data="mnist") | arguments
    values = dict(epsilon=3.0, steps=3, batch_size=COUNT, learning_rate=0.5, l2_norm_clip=0.1)
    return settings.resolve("digits", values | arguments)


@pytest.fixture
def whole(tmp_path, data):
    """A function that builds the classifier of a run from a file."""
    seeds.fix(0)
    path = tmp_path / "source.keras"
    start_from.classifier("small_cnn", SHAPE, 4, 100.0).save(path)
    return lambda **arguments: Start(last_layer(init_from=str(path), **arguments)).build(data)


def fitted(model, x, y):
    plan = tfdpx.PrivacyPlan(COUNT, COUNT // 2, steps=3, noise_multiplier=0.5, delta=1e-5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.5, plan=plan, l2_norm_clip=0.1, seed=0), loss)
    model.fit(plan.batches(x, y, optimizer=model.optimizer, seed=1), verbose=0)


@pytest.mark.slow
def test_equals_training_the_whole_model(data, whole):
    quick = whole()
    started = quick.get_weights()
    head, features = fitting.head_and_features(last_layer(init_from="x.keras"), quick, data)
    fitted(head, features.train_x, features.train_y)
    np.testing.assert_allclose(
        head.predict(features.eval_x, verbose=0), quick.predict(data.eval_x, verbose=0), atol=1e-5
    )
    # Another model: weights that were trained before continue their run.
    slow = whole()
    slow.set_weights(started)
    fitted(slow, data.train_x, data.train_y)
    pairs = zip(started, quick.get_weights(), strict=True)
    changed = [np.abs(a - b).max() > 1e-3 for a, b in pairs]
    assert sum(changed) == len(head.trainable_variables) == len(quick.trainable_variables)
    for ours, plain in zip(quick.get_weights(), slow.get_weights(), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)


def start(features):
    values = dict(model="auto", features=features, epsilon=3.0)
    return Start(settings.resolve("digits", values))


@pytest.fixture
def run_folder(tmp_path):
    classifier = start_from.classifier("small_cnn", SHAPE, 4, 100.0, 50.0)
    classifier.save(tmp_path / "model.keras")
    Record("pretrain", DatasetId("synthetic:strokes"), Ledger(), None).save(
        tmp_path / "model.keras"
    )
    return tmp_path


@pytest.mark.slow
def test_features_are_those_of_the_file_and_computed_once(run_folder, data):
    both = start(f"scatter + {run_folder}").build(DATA)
    assert both.input.dtype == "uint8" and both.output_shape == (None, 3)
    values, text = defaults.complete(start(f"{run_folder}/model.keras").settings, 100)
    assert values.model == "linear_on_features" and "--model=linear_on_features" in text
    assert values.l2_norm_clip == 0.1
    whole = start(f"{run_folder}/model.keras").build(DATA)
    head, features = fitting.head_and_features(values, whole, data)
    assert len(head.trainable_variables) == 1 and features.train_x.shape == (COUNT, 257)
    source = keras.saving.load_model(run_folder / "model.keras")
    inner = source.layers[-1]
    body = keras.Model(inner.inputs, inner.layers[-1].input)
    rows = np.asarray(body(source.get_layer("normalise")(data.train_x)))
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(features.train_x[:, :-1] * np.sqrt(1.01), rows, atol=1e-4)


def test_what_the_files_have_seen_is_read_or_asked_for(run_folder):
    [upstream] = start(f"scatter+{run_folder}").seen
    assert upstream.data.name == "synthetic:strokes" and upstream.epsilon == 0
    start_from.classifier("small_cnn", SHAPE, 4, 100.0).save(run_folder / "own.keras")
    with pytest.raises(UserError, match=r"own\.keras does not say what it was trained on"):
        start(f"scatter+{run_folder}+{run_folder}/own.keras").seen  # noqa: B018
    (run_folder / "broken.keras").write_bytes(b"no archive")
    for names, message in (
        (f"{run_folder}+{run_folder}/model.keras", "must name each kind once"),
        (f"{run_folder}/broken.keras", r"Damaged: the account in.*broken\.keras"),
    ):
        with pytest.raises(UserError, match=message):
            start(names).build(DATA)
