"""`--features`: which kinds there are, what is built of them, and what is refused."""

import dataclasses
import types

import keras
import numpy as np
import pytest

from tfdpx.accounting import Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train.config import preset_lookup
from tfdpx.train.config.errors import UserError
from tfdpx.train.data import loading
from tfdpx.train.run import (
    auto_settings,
    classifiers,
    finetuning,
    fitting,
    provenance,
    side_by_side,
)

SHAPE = (8, 8, 1)
DATA = types.SimpleNamespace(image_shape=SHAPE, num_classes=3, centre=120.0, deviation=60.0)


def settings(features, **given):
    given = dict(model="auto", features=features, epsilon=3.0) | given
    return preset_lookup.resolve("digits", given)


@pytest.fixture
def run_folder(tmp_path):
    classifier = classifiers.build("small_cnn", SHAPE, 4, 100.0, 50.0)
    classifier.save(tmp_path / "model.keras")
    Record("pretrain", Data("synthetic:strokes"), Ledger(), None).save(tmp_path / "model.keras")
    return tmp_path


@pytest.mark.slow
def test_features_are_those_of_the_file_and_of_scattering(run_folder):
    built = side_by_side.build(settings(f"scatter + {run_folder}"), DATA)
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


def test_they_are_computed_once(run_folder):
    chosen, text = auto_settings.complete(settings(f"{run_folder}/model.keras"), 100)
    assert chosen.model == "linear_on_features" and "--model=linear_on_features" in text
    assert chosen.l2_norm_clip == 0.02
    whole = side_by_side.build(chosen, DATA)
    fields = dict.fromkeys(field.name for field in dataclasses.fields(loading.ImageData))
    images = {"train_x": np.zeros([6, *SHAPE], "uint8"), "eval_x": np.zeros([2, *SHAPE], "uint8")}
    data = loading.ImageData(**fields | images)
    head, features = fitting.head_and_features(chosen, whole, data)
    assert len(head.trainable_variables) == 1 and features.train_x.shape == (6, 257)


UNKNOWN = ["", "scatter+", "pixels", "scatter+missing.keras", "+"]


def test_unknown_kinds_are_refused():
    for features in UNKNOWN:
        with pytest.raises(
            UserError, match=r"must join 'scatter', \.keras files and working folders"
        ):
            side_by_side.files(features)


def test_a_kind_is_named_once(run_folder):
    for features in ("scatter+scatter", f"{run_folder}+{run_folder}/model.keras"):
        with pytest.raises(UserError, match="must name each kind once"):
            side_by_side.files(features)


def test_files_that_do_not_fit_are_refused(run_folder):
    wider = types.SimpleNamespace(**(vars(DATA) | {"image_shape": (16, 16, 1)}))
    with pytest.raises(UserError, match=r"takes images of shape \(8, 8, 1\)"):
        side_by_side.build(settings(str(run_folder)), wider)
    keras.Sequential([keras.Input(SHAPE), keras.layers.Flatten()]).save(run_folder / "o.keras")
    with pytest.raises(UserError, match=r"--features=.*o\.keras was written by neither"):
        side_by_side.build(settings(f"{run_folder}/o.keras"), DATA)
    (run_folder / "broken.keras").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"Cannot read --features=.*broken\.keras"):
        side_by_side.build(settings(f"{run_folder}/broken.keras"), DATA)


MODELS = [{"model": "small_cnn"}, {"init_from": "model.keras"}, {"head_steps": 5}]


def test_they_take_the_place_of_a_model():
    for given in MODELS:
        with pytest.raises(UserError, match="Flag --features takes the place of --model"):
            settings("scatter", **given)


def test_the_model_needs_them():
    with pytest.raises(UserError, match="--model=linear_on_features needs --features"):
        settings(None, model="linear_on_features")


def test_files_of_features_are_asked_what_they_saw(run_folder):
    features = f"scatter+{run_folder}"
    [seen] = provenance.seen_by(provenance.files(settings(features)))
    assert seen.data.name == "synthetic:strokes" and seen.epsilon == 0
    classifiers.build("small_cnn", SHAPE, 4, 100.0).save(run_folder / "own.keras")
    both = provenance.files(settings(f"{features}+{run_folder}/own.keras"))
    with pytest.raises(UserError, match=r"own\.keras does not say what it was trained on"):
        provenance.seen_by(both)
    record = Record("classify", Data("sklearn_digits"), provenance.not_private(), None)
    record.save(run_folder / "own.keras")
    with pytest.raises(UserError, match="trained on sklearn_digits already, without an account"):
        provenance.on_same_data(provenance.seen_by(both), "digits")
