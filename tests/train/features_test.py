"""Extraction of features, and the heads that are fitted to them."""

import json

import feature_folder
import keras
import numpy as np
import pytest
import scipy.stats
from absl import flags
from absl.testing import flagsaver

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.train import account, features
from tfdpx.train.config.errors import UserError
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.run import classifiers


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["features"])


def values(define, **given):
    found = flags.FlagValues()
    define(found)
    found.mark_as_parsed()
    for name, value in given.items():
        setattr(found, name, value)
    return found


@pytest.mark.slow
def test_features_are_those_before_the_last_layer_and_resume(tmp_path, monkeypatch, capsys):
    model = classifiers.build("small_cnn", (8, 8, 1), 10, centre=120.0)
    model.save(tmp_path / "model.keras")
    with pytest.raises(UserError, match="does not say what it was trained on"):
        features.extract(str(tmp_path / "model.keras"), "digits", str(tmp_path))
    folder = tmp_path / "features"
    monkeypatch.setattr(features, "SHARD", 500)
    arguments = (str(tmp_path / "model.keras"), "digits", str(folder), "mnist")
    with flagsaver.flagsaver(data_dir=str(tmp_path / "data")):
        x, y, draws = features.extract(*arguments).arrays("train")
        capsys.readouterr()
        (folder / "train-00001.npz").unlink()
        again, _, drawn_again = features.extract(*arguments).arrays("train")
    assert capsys.readouterr().out == "train: 1000 of 1437\n"
    (folder / "train-00003.npz").write_bytes((folder / "train-00001.npz").read_bytes())
    with flagsaver.flagsaver(data_dir=str(tmp_path / "data")):
        with pytest.raises(UserError, match="holds features of other train images"):
            features.extract(*arguments)
    (folder / "train-00003.npz").unlink()
    np.testing.assert_allclose(again, x, rtol=1e-5, atol=1e-6)
    assert x.shape == (1437, 256) and len(y) == 1437
    np.testing.assert_array_equal(draws, drawn_again)
    assert scipy.stats.kstest(np.unique(draws), "uniform").pvalue > 1e-4
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1.0, rtol=1e-5)
    backbone = features.backbone(model)
    images = np.full([2, 8, 8, 1], 77, "uint8")
    whole = model.predict(images, verbose=0)
    inner = keras.Model(model.layers[-1].inputs, model.layers[-1].layers[-1].input)
    raw = np.asarray(inner((images - 120.0) / 120.0))
    scaled = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(backbone.predict(images, verbose=0), scaled, rtol=1e-4, atol=1e-6)
    assert whole.shape == (2, 10)
    with pytest.raises(UserError, match="holds features made with"):
        FeatureFolder(folder, feature_folder.record_of({"num_classes": 10}))


@pytest.fixture
def folder(tmp_path):
    return feature_folder.make(tmp_path / "made")


@pytest.mark.parametrize("given", [{"method": "dp_fc", "seed": 1}, {"method": "dp_ls"}])
def test_a_head_is_fitted_and_reported(folder, given):
    with flagsaver.flagsaver(workdir=str(folder.path)):
        record = features.run(values(features.define_flags, epsilon=4.0, **given))
    assert record["test_accuracy"] > 0.6
    assert 3.9 < record["epsilon"] <= 4.0
    head = folder.path / "head-001"
    kept = records.read(head / "record.json")
    assert {**records.plain(kept.view()), "workdir": str(head)} == records.plain(record)
    assert np.load(head / "weights.npz")["kernel"].shape == (12, 3)
    assert record["releasable"] is ("seed" not in given)
    assert f"{record['epsilon']:.2f}" in (head / "privacy_statement.txt").read_text()


def test_a_second_head_is_added_to_the_first(folder, capsys):
    given = dict(method="dp_ls", epsilon=1.0)
    with flagsaver.flagsaver(workdir=str(folder.path)):
        spent = [features.run(values(features.define_flags, **given)) for _ in range(2)]
    found = values(account.define_flags, workdir=[str(folder.path)])
    account.main(["account"], found)
    both = json.loads(capsys.readouterr().out.splitlines()[-1])
    sigma = spent[0]["noise_multiplier"]
    releases = 2 * spent[0]["releases"]
    exact = tfdpx.accounting.epsilon(sigma, 1.0, releases, 1e-5, "gdp")
    assert both["runs"] == 2 and both["epsilon"] == pytest.approx(exact, rel=1e-6)


def test_features_of_other_images_are_not_used(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, [8, 4, 4, 1]).astype("uint8")
    made = FeatureFolder(tmp_path / "made", feature_folder.record_of({"num_classes": 3}))
    x, y = images.reshape([8, -1]) / 255, np.arange(8) % 3
    assert not made.holds("train", 0, y, images)
    made.write("train", 0, x, y, images)
    assert made.holds("train", 0, y, images)
    changed = images.copy()
    changed[5, 1, 2, 0] ^= 1  # One bit of a pixel.
    few = y[:7], images[:7]
    for labels, others in ((y, changed), (y[::-1], images), few, (y[:0], images[:0])):
        with pytest.raises(UserError, match="other train images or labels"):
            made.holds("train", 0, labels, others)
    private = [tmp_path / "made" / name for name in ("train-00000.npz", "split.key")]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600, 0o600]


def test_leaving_one_image_out_moves_no_other_draw(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, [300, 4, 4, 1]).astype("uint8")
    made = FeatureFolder(tmp_path / "made", feature_folder.record_of({"num_classes": 3}))
    x, y = images.reshape([300, -1]) / 255, np.arange(300) % 3
    made.write("train", 0, x, y, images)
    made.write("test", 0, x[1:], y[1:], images[1:])  # One less.
    (_, _, draws), (_, _, without) = made.arrays("train"), made.arrays("test")
    np.testing.assert_array_equal(draws[1:], without)
    other = FeatureFolder(tmp_path / "other", feature_folder.record_of({"num_classes": 3}))
    other.write("train", 0, x, y, images)
    assert (other.arrays("train")[2] != draws).all()  # Nobody else can compute the parts.
