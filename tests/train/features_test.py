"""Extraction of features, and the heads that are fitted to them."""

import json
import math

import keras
import numpy as np
import pytest
import scipy.stats
from absl import flags
from absl.testing import flagsaver

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.accounting.spent import Data
from tfdpx.train import account, compare_heads, features
from tfdpx.train.benchmarks import head_speed
from tfdpx.train.benchmarks.mixture import mixture
from tfdpx.train.config import head_presets
from tfdpx.train.config.errors import UserError
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.run import classifiers, head_search, noisy_score, provenance


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
    with pytest.raises(UserError, match="holds features made by"):
        FeatureFolder(folder, record_of({"num_classes": 10}))


def record_of(settings):
    """What an extraction writes down."""
    return Record("features", Data("mixture"), provenance.not_private(), None, settings=settings)


@pytest.fixture
def folder(tmp_path):
    made = FeatureFolder(tmp_path / "made", record_of({"num_classes": 3}))
    for split, seed, count in (("train", 0, 600), ("test", 1, 200)):
        x, y = mixture(count, 12, 3, seed=seed, separation=3.0)
        made.write(split, 0, x, y, x)
    return made


@pytest.mark.parametrize(
    "given",
    [
        {"method": "dp_fc", "seed": 1},
        {"method": "dp_ls", "trials": 3},
        {"method": "dp_ls", "private_tuning": 2.0},
    ],
)
def test_a_head_is_fitted_searched_and_reported(folder, given):
    with flagsaver.flagsaver(workdir=str(folder.path)):
        record = features.run(values(features.define_flags, epsilon=4.0, **given))
    assert record["test_accuracy"] > 0.6
    assert 3.9 < record["epsilon"] <= 4.0
    head = folder.path / "head-001"
    kept = records.read(head / "record.json")
    assert {**records.plain(kept.view()), "workdir": str(head)} == records.plain(record)
    assert np.load(head / "weights.npz")["kernel"].shape == (12, 3)
    assert record["releasable"] is ("private_tuning" in given)  # A seed; a search without noise.
    assert f"{record['epsilon']:.2f}" in (head / "privacy_statement.txt").read_text()


def test_a_preset_says_what_flags_leave_open(folder):
    preset = "table8/vit_g14_jft/cifar10"
    given = dict(preset=preset, epsilon=4.0, trials=1)
    with flagsaver.flagsaver(workdir=str(folder.path)):
        found = features.run(values(features.define_flags, **given))
        with pytest.raises(UserError, match="preset is of another method.*dp_ls.*dp_fc"):
            features.run(values(features.define_flags, **given, method="dp_fc"))
    table = head_presets.resolve(preset)
    assert (found["method"], found["delta"]) == (table["method"], table["delta"])
    assert "1 trials of Optuna" in found["searched"] and found["releasable"] is False


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


def test_leaving_one_image_out_moves_no_other_in_a_private_search(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, [300, 4, 4, 1]).astype("uint8")
    made = FeatureFolder(tmp_path / "made", record_of({"num_classes": 3}))
    x, y = images.reshape([300, -1]) / 255, np.arange(300) % 3
    made.write("train", 0, x, y, images)
    made.write("test", 0, x[1:], y[1:], images[1:])  # One less.
    (_, _, draws), (_, _, without) = made.arrays("train"), made.arrays("test")
    np.testing.assert_array_equal(draws[1:], without)
    other = FeatureFolder(tmp_path / "other", record_of({"num_classes": 3}))
    other.write("train", 0, x, y, images)
    assert (other.arrays("train")[2] != draws).all()  # Nobody else can compute the parts.


def test_the_score_of_a_private_search_is_noisy(folder):
    train, held_out = head_search.split(*folder.arrays("train"), 0.5)
    assert len(train[1]) + len(held_out[1]) == 600 and 200 < len(train[1]) < 400
    scores = [noisy_score.noisy_count(100.4, 20.0) for _ in range(200)]
    assert np.std(scores) == pytest.approx(20.0, rel=0.2)
    assert np.mean(scores) == pytest.approx(100, abs=6)


def test_presets_are_the_tables():
    assert len(head_presets.names()) == 4 * 8
    large = head_presets.resolve("table9/vit_g14_jft/imagenet")
    assert (large["l2_norm_clip"], large["trials"], large["delta"]) == (1.0, 300, 8e-7)
    flagged = values(
        features.define_flags, preset="table10/vit_b16_imagenet1k/cifar100", epsilon=1.0
    )
    record = features.describe(flagged)
    assert record["noise_multiplier"] == pytest.approx(12.37, abs=5e-3)
    assert record["l2_norm_clip"] == 0.005 and record["dimension"] == 768
    with pytest.raises(UserError, match="no preset 'table11'"):
        head_presets.resolve("table11")


def test_methods_are_compared_and_the_comparison_goes_on(folder, tmp_path, capsys):
    given = dict(
        features=str(folder.path), methods=["dp_ls", "dp_fc"], workdir=str(tmp_path / "out")
    )
    compare_heads.compare(values(compare_heads.define_flags, epsilons=["4"], **given))
    capsys.readouterr()
    compare_heads.compare(values(compare_heads.define_flags, epsilons=["4", "inf"], **given))
    assert capsys.readouterr().out.count("epsilon") == 2
    table = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert table[0] == "| epsilon | dp_ls | dp_fc |" and len(table) == 4
    assert (tmp_path / "out" / "heads.png").stat().st_size > 5000
    assert math.isinf(float(table[-1].split("|")[1]))


def test_speed_is_a_ratio_of_medians():
    record = head_speed.measure(256, repeats=1)
    assert record["ratio_to_numpy_products"] == pytest.approx(
        record["fit_seconds"] / record["numpy_products_seconds"]
    )
    assert record["features_mib"] < record["added_peak_mib"] < 2000
