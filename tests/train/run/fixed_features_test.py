"""Fixed features are computed once: what is built on them, by --trainable=last and --features."""

import types

import keras
import numpy as np
import pytest
import seeds

import tfdpx
from tfdpx.accounting import Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train.config import preset_lookup
from tfdpx.train.data.images import ImageData
from tfdpx.train.errors import UserError
from tfdpx.train.run import (
    auto_settings,
    classifiers,
    finetuning,
    fitting,
    provenance,
    side_by_side,
)

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


def last_layer(**given):
    given = dict(model="small_cnn", trainable="last", pretrained_on="somewhere") | given
    values = dict(epsilon=3.0, steps=3, batch_size=COUNT, learning_rate=0.5, l2_norm_clip=0.1)
    return preset_lookup.resolve("digits", values | given)


def fitted(model, x, y):
    plan = tfdpx.PrivacyPlan(COUNT, COUNT // 2, steps=3, noise_multiplier=0.5, delta=1e-5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.5, plan=plan, l2_norm_clip=0.1, seed=0), loss)
    model.fit(plan.batches(x, y, optimizer=model.optimizer, seed=1), verbose=0)


@pytest.mark.slow
def test_equals_training_the_whole_model(data):
    seeds.fix(0)
    whole = finetuning.build(last_layer(), data)
    started = whole.get_weights()
    head, features = fitting.head_and_features(last_layer(), whole, data)
    fitted(head, features.train_x, features.train_y)
    quick = whole.get_weights()
    np.testing.assert_allclose(
        head.predict(features.eval_x, verbose=0), whole.predict(data.eval_x, verbose=0), atol=1e-5
    )
    # Another model, since weights that were trained before continue their run.
    slow = finetuning.build(last_layer(), data)
    slow.set_weights(started)
    fitted(slow, data.train_x, data.train_y)
    changed = [np.abs(a - b).max() > 1e-3 for a, b in zip(started, quick, strict=True)]
    assert sum(changed) == len(head.trainable_variables) == len(whole.trainable_variables)
    for ours, plain in zip(quick, slow.get_weights(), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)


def test_what_must_run_in_every_update_does(monkeypatch, data):
    def kept(**given):
        model = finetuning.build(last_layer(**given), data)
        head, features = fitting.head_and_features(last_layer(**given), model, data)
        assert (head is model) == (features is data)
        return features is not data

    assert kept() and not kept(trainable="all") and not kept(augmult=2, augment_padding=1)
    monkeypatch.setattr(fitting, "MOST_BYTES", 10_000)
    assert not kept()  # Too large for memory.


def of_features(features):
    return preset_lookup.resolve("digits", dict(model="auto", features=features, epsilon=3.0))


@pytest.fixture
def run_folder(tmp_path):
    classifier = classifiers.build("small_cnn", SHAPE, 4, 100.0, 50.0)
    classifier.save(tmp_path / "model.keras")
    Record("pretrain", Data("synthetic:strokes"), Ledger(), None).save(tmp_path / "model.keras")
    return tmp_path


@pytest.mark.slow
def test_features_are_those_of_the_file_and_of_scattering(run_folder):
    built = side_by_side.build(of_features(f"scatter + {run_folder}"), DATA)
    assert built.input.dtype == "uint8" and built.output_shape == (None, 3)
    images = np.random.default_rng(0).integers(0, 256, [4, *SHAPE]).astype("uint8")
    rows = finetuning.features(built)(images).numpy()[:, :-1]
    source = keras.saving.load_model(run_folder / "model.keras")
    network = finetuning.features(source)(images)
    scatter = finetuning.features(classifiers.build("scatter_linear", SHAPE, 3, 0.0))(images)
    expected = [np.array(scatter)[:, :-1], np.array(network)]
    found = np.split(rows, [expected[0].shape[1]], axis=1)
    for kind, wanted in zip(found, expected, strict=True):
        unit = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(kind * np.sqrt(2 * 1.01), unit, atol=1e-4)


def test_their_model_is_chosen_and_they_are_computed_once(run_folder, data):
    chosen, text = auto_settings.complete(of_features(f"{run_folder}/model.keras"), 100)
    assert chosen.model == "linear_on_features" and "--model=linear_on_features" in text
    assert chosen.l2_norm_clip == 0.02
    head, features = fitting.head_and_features(chosen, side_by_side.build(chosen, DATA), data)
    assert len(head.trainable_variables) == 1 and features.train_x.shape == (COUNT, 257)


def test_files_that_do_not_fit_are_refused(run_folder):
    with pytest.raises(UserError, match="must name each kind once"):
        side_by_side.files(f"{run_folder}+{run_folder}/model.keras")
    keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()]).save(run_folder / "o.keras")
    (run_folder / "broken.keras").write_bytes(b"no archive")
    wider = types.SimpleNamespace(**(vars(DATA) | {"image_shape": (16, 16, 1)}))
    for name, given, message in [
        ("model.keras", wider, r"takes images of shape \(8, 8, 1\)"),
        ("o.keras", DATA, r"--features=.*o\.keras was written by neither"),
        ("broken.keras", DATA, r"Cannot read --features=.*broken\.keras"),
    ]:
        with pytest.raises(UserError, match=message):
            side_by_side.build(of_features(f"{run_folder}/{name}"), given)


def test_they_are_asked_what_they_saw(run_folder):
    features = f"scatter+{run_folder}"
    [seen] = provenance.seen_by(provenance.files(of_features(features)))
    assert seen.data.name == "synthetic:strokes" and seen.epsilon == 0
    classifiers.build("small_cnn", SHAPE, 4, 100.0).save(run_folder / "own.keras")
    both = provenance.files(of_features(f"{features}+{run_folder}/own.keras"))
    with pytest.raises(UserError, match=r"own\.keras does not say what it was trained on"):
        provenance.seen_by(both)
