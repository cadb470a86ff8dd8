"""Extraction of features, and the heads that are fitted to them."""

import feature_folder
import keras
import numpy as np
import pytest
import scipy.stats
from absl.testing import flagsaver

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.train import account, features
from tfdpx.train.errors import UserError
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.run import classifiers


@pytest.mark.slow
def test_features_are_those_before_the_last_layer_and_resume(
    tmp_path, finished_runs, monkeypatch, capsys
):
    model = classifiers.build("small_cnn", (8, 8, 1), 10, centre=120.0)
    model.save(tmp_path / "model.keras")
    folder = tmp_path / "features"
    monkeypatch.setattr(features, "SHARD", 500)
    arguments = (str(tmp_path / "model.keras"), "digits", str(folder), "mnist")
    with flagsaver.flagsaver(data_dir=finished_runs.data_dir):
        x, y, draws = features.extract(*arguments).arrays("train")
        capsys.readouterr()
        (folder / "train-00001.npz").unlink()
        again, _, drawn_again = features.extract(*arguments).arrays("train")
        assert capsys.readouterr().out == "train: 1000 of 1437\n"
        (folder / "train-00003.npz").write_bytes((folder / "train-00001.npz").read_bytes())
        with pytest.raises(UserError, match="holds features of other train images"):
            features.extract(*arguments)
        with pytest.raises(UserError, match="does not say what it was trained on"):
            features.extract(*arguments[:3])
    np.testing.assert_allclose(again, x, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(draws, drawn_again)
    assert x.shape == (1437, 256) and len(y) == 1437
    assert scipy.stats.kstest(np.unique(draws), "uniform").pvalue > 1e-4
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1.0, rtol=1e-5)
    images = np.full([2, 8, 8, 1], 77, "uint8")
    inner = keras.Model(model.layers[-1].inputs, model.layers[-1].layers[-1].input)
    raw = np.asarray(inner((images - 120.0) / 120.0))
    scaled = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    found = features.backbone(model).predict(images, verbose=0)
    np.testing.assert_allclose(found, scaled, rtol=1e-4, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
    return feature_folder.make(tmp_path / "made")


@pytest.mark.parametrize("given", [{"method": "dp_fc", "seed": 1}, {"method": "dp_ls"}])
def test_heads_are_fitted_reported_and_added_up(folder, run, given):
    found = [run(features, workdir=folder.path, epsilon=4.0, **given)[0] for _ in range(2)]
    record = found[0]
    assert record["test_accuracy"] > 0.6
    assert 3.9 < record["epsilon"] <= 4.0
    head = folder.path / "head-001"
    kept = records.plain(records.read(head / "record.json").view())
    assert {**kept, "workdir": str(head)} == record
    assert np.load(head / "weights.npz")["kernel"].shape == (12, 3)
    assert record["releasable"] is ("seed" not in given)
    assert f"{record['epsilon']:.2f}" in (head / "privacy_statement.txt").read_text()
    both, _ = run(account, workdir=folder.path)
    spent = record["noise_multiplier"], 1.0, 2 * record["releases"], 1e-5, "gdp"
    assert both["epsilon"] == pytest.approx(tfdpx.accounting.epsilon(*spent), rel=1e-6)


def written(path, images, y):
    """A folder with features of all images to train on, and of all but the first to test on."""
    folder = FeatureFolder(path, feature_folder.record_of({"num_classes": 3}))
    x = images.reshape([len(images), -1]) / 255
    folder.write("train", 0, x, y, images)
    folder.write("test", 0, x[1:], y[1:], images[1:])
    return folder


def test_features_of_other_images_are_not_used(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, [300, 4, 4, 1]).astype("uint8")
    y = np.arange(300) % 3
    made = written(tmp_path / "made", images, y)
    assert made.holds("train", 0, y, images) and not made.holds("train", 1, y, images)
    changed = images.copy()
    changed[5, 1, 2, 0] ^= 1  # One bit of a pixel.
    for labels, others in ((y, changed), (y[::-1], images), (y[:7], images[:7])):
        with pytest.raises(UserError, match="other train images or labels"):
            made.holds("train", 0, labels, others)
    private = [tmp_path / "made" / name for name in ("train-00000.npz", "split.key")]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o600, 0o600]
    with pytest.raises(UserError, match="holds features made with"):
        FeatureFolder(tmp_path / "made", feature_folder.record_of({"num_classes": 10}))
    # Leaving one image out moves no other draw, and nobody else can compute them.
    draws = made.arrays("train")[2]
    np.testing.assert_array_equal(draws[1:], made.arrays("test")[2])
    assert (written(tmp_path / "other", images, y).arrays("train")[2] != draws).all()
