"""The comparison of AdaMix with its baselines, on generated features."""

import json

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.adamix import __main__ as study
from experiments.adamix import methods, pictures

METHODS = ["only_public", "adamix", "fully_private", "paragon"]


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["adamix"])


def made_up(num_private=None):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), [30, 40, 50])

    def features(labels, shift):
        x = np.eye(6)[labels + shift] + 0.3 * rng.normal(size=(len(labels), 6))
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")

    test = rng.integers(0, 3, 60)
    domains = {"none": features(labels, 0), "rotated": features(labels, 1)}
    return methods.Study(domains, labels, (features(test, 0), test), 3, num_private)


def flags_of(**changes):
    values = flags.FlagValues()
    study.define_flags(values)
    values.mark_as_parsed()
    for name, value in {"methods": METHODS, "epsilons": ["1"], "shots": ["2"], **changes}.items():
        setattr(values, name, value)
    return values


def test_flags_are_defined_beside_those_of_the_programs():
    values = flags.FlagValues()
    values.append_flag_values(flags.FLAGS)
    assert "dataset" in values
    study.define_flags(values)
    assert values["shots"].default == ["2", "5"]


def run(workdir, **changes):
    return study.run(flags_of(**changes), workdir)


@pytest.mark.slow
def test_a_study_resumes_and_draws_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "load", lambda values: made_up())
    arguments = {"seeds": ["0", "1"], "methods": METHODS[:3]}
    run(tmp_path, **{**arguments, "seeds": ["0"]})
    lines = (tmp_path / "results.jsonl").read_text()
    run(tmp_path, **arguments)
    after = (tmp_path / "results.jsonl").read_text()
    assert after.startswith(lines) and len(after.splitlines()) == 2 * len(lines.splitlines()) == 6
    results = run(tmp_path, **{**arguments, "methods": METHODS, "shifts": ["none", "rotated"]})
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(rows) == 14 == sum(len(runs) for runs in results.values())
    assert results["paragon", 2, "none", None][0]["error"] <= 0.1
    assert all(max(line.get("individual", [0])) <= line["spent"] * (1 + 1e-6) for line in rows)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "errors_2_none.png", "errors_2_rotated.png", "membership_2.png", "boost_1.png",
        "individual_2_1.png",
    }  # fmt: skip
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(METHODS)
    assert "2 public per class, epsilon 1 | rotated, 2 public per class" in table[0]
    # Results for another number of private images are kept apart.
    assert len(run(tmp_path, methods=["only_public"], seeds=["0"], num_private=40)) == 1
    public, private = made_up(num_private=20).sets(2, seed=0, shift="rotated")
    assert len(public[0]) == 6 and len(private[0]) == 20


def test_shifts_keep_shape_and_dtype_and_undo_themselves():
    images = np.random.default_rng(0).integers(0, 241, (3, 8, 8, 1)).astype("uint8")
    for shift, times in (("rotated", 4), ("inverted", 2)):
        shifted = images
        for _ in range(times):
            shifted = study.SHIFTS[shift](shifted, 240)
            assert shifted.dtype == "uint8" and shifted.shape == images.shape
        np.testing.assert_array_equal(shifted, images)


def test_the_boost_is_the_papers():
    key = (2, "none")
    results = {
        ("paragon", *key, None): [{"error": 0.1}],
        ("only_public", *key, None): [{"error": 0.5}, {"error": 0.3}],
        ("adamix", *key, 1.0): [{"error": 0.2}],
        ("ngd", *key, 1.0): [{"error": 0.1}],
    }
    assert pictures.boost(results, "adamix", 2, 1.0) == pytest.approx(3.0)
    assert pictures.boost(results, "ngd", 2, 1.0) == float("inf")
    assert pictures.spread([0.1, 0.3]) == "20.0 ± 14.1"


@pytest.mark.slow
def test_on_the_digits_it_beats_what_the_paper_compares(tmp_path):
    names = ["only_public", "fully_private", "ngd", "adamix"]
    with flagsaver.flagsaver(data_dir=str(tmp_path / "data")):
        results = run(tmp_path / "work", methods=names)
        layers = keras.layers.Rescaling(1 / 16), keras.layers.Flatten(), keras.layers.Dense(5)
        keras.Sequential([keras.Input((8, 8, 1)), *layers]).save(tmp_path / "other.keras")
        values = flags_of(init_from=str(tmp_path / "other.keras"), shifts=["inverted"])
        features = study.load(values).features
    only, private, ngd, adamix = (
        np.mean([result["error"] for result in results[name, 2, "none", epsilon]])
        for name, epsilon in zip(names, (None, 1.0, 1.0, 1.0), strict=True)
    )
    assert adamix <= ngd and adamix < 0.5 * only and adamix < private
    for rows in features.values():  # Features of the network without its last layer.
        assert rows.shape == (1437, 64)
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
