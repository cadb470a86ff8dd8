"""The comparison of AdaMix with its baselines, on features that are made here."""

import json

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import tfdpx
from tfdpx.train import adamix
from tfdpx.train.config.errors import UserError
from tfdpx.train.data import public_split
from tfdpx.train.report import mixed_pictures
from tfdpx.train.run import mixed_methods

METHODS = ["only_public", "adamix", "fully_private", "paragon"]


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["adamix"])


def study(num_private=None):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(3), [30, 40, 50])

    def features(labels, shift):
        x = np.eye(6)[labels + shift] + 0.3 * rng.normal(size=(len(labels), 6))
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")

    test = rng.integers(0, 3, 60)
    domains = {"none": features(labels, 0), "rotated": features(labels, 1)}
    return mixed_methods.Study(domains, labels, (features(test, 0), test), 3, num_private)


def values(**given):
    found = flags.FlagValues()
    adamix.define_flags(found)
    found.mark_as_parsed()
    defaults = {"epsilons": ["1"], "shots": ["2"], "noise_multiplier": 10.0}  # 7 steps.
    for name, value in {"methods": METHODS, **defaults, **given}.items():
        setattr(found, name, value)
    return found


def run(workdir, **given):
    with flagsaver.flagsaver(workdir=str(workdir)):
        return adamix.run(values(**given))


def test_a_study_resumes_and_draws_what_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(adamix, "load", lambda values: study())
    given = {"seeds": ["0", "1"], "methods": METHODS[:3]}
    run(tmp_path, **{**given, "seeds": ["0"]})
    lines = (tmp_path / "results.jsonl").read_text()
    record = run(tmp_path, **given)
    after = (tmp_path / "results.jsonl").read_text()
    assert after.startswith(lines) and len(after.splitlines()) == 2 * len(lines.splitlines()) == 6
    record = run(tmp_path, **{**given, "methods": METHODS, "shifts": ["none", "rotated"]})
    kept = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(kept) == 14
    errors = [k["error"] for k in kept if (k["method"], k["shift"]) == ("adamix", "none")]
    assert record["adamix_2_eps1_error"] == pytest.approx(np.mean(errors))
    assert record["paragon_2_error"] <= 0.1
    spent = {k["method"]: k["spent"] for k in kept}
    exact = tfdpx.accounting.epsilon(10.0, 1.0, 7, 1e-5, "gdp")
    assert spent["adamix"] == spent["fully_private"] == exact
    assert spent["only_public"] == 0 and spent["paragon"] > 1e300
    worst = [max(k["individual"]) for k in kept if k["method"] == "adamix" and "individual" in k]
    assert worst and max(worst) <= spent["adamix"] * (1 + 1e-6)
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {
        "errors_2_none.png", "errors_2_rotated.png", "membership_2.png", "boost_1.png",
        "individual_2_1.png",
    }  # fmt: skip
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(METHODS)
    assert "2 public a class, epsilon 1 | rotated, 2 public a class" in table[0]
    assert "The 6 public examples get no guarantee" in record["privacy"]


def test_the_last_line_is_one_json_object(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(adamix, "load", lambda values: study(num_private=40))
    given = values(methods=["only_public"], seeds=["0"], num_private=40)
    with flagsaver.flagsaver(workdir=str(tmp_path)):
        adamix.main(["adamix"], given)
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_private"] == 40
        with pytest.raises(SystemExit, match="holds results of"):
            adamix.main(["adamix"], values())
        with pytest.raises(SystemExit, match="--methods takes only_public|adamix.*Received: dpsgd"):
            adamix.main(["adamix"], values(methods=["dpsgd"], num_private=40))
    with flagsaver.flagsaver(workdir=None), pytest.raises(UserError, match="--workdir"):
        adamix.run(values())


@pytest.mark.parametrize("shots", [1, 5, 29])
def test_a_split_has_shots_of_each_class_and_loses_none(shots):
    labels = study().labels
    public, private = public_split.split(labels, shots, seed=3)
    assert np.bincount(labels[public]).tolist() == [shots] * 3
    np.testing.assert_array_equal(np.sort(np.concatenate([public, private])), np.arange(120))
    assert not np.array_equal(public, public_split.split(labels, shots, seed=4)[0])
    with pytest.raises(ValueError, match="shots=30, and class 0 has 30"):
        public_split.split(labels, 30, seed=3)


def test_shifts_keep_shape_and_dtype_and_undo_themselves():
    images = np.random.default_rng(0).integers(0, 241, (3, 8, 8, 1)).astype("uint8")
    images[0, 0, 0], images[0, 0, 1] = 240, 0
    turned = images
    for _ in range(4):
        turned = public_split.shifted(turned, "rotated")
    np.testing.assert_array_equal(turned, images)
    dark = public_split.shifted(images, "inverted", 240)
    assert dark.dtype == "uint8" and dark[0, 0, 0] == 0
    np.testing.assert_array_equal(public_split.shifted(dark, "inverted", 240), images)


def test_private_sets_are_cut_to_size_and_apart_from_the_public():
    public, private = study(num_private=20).sets(2, seed=0, shift="rotated")
    assert len(public[0]) == 6 and len(private[0]) == 20
    whole = study().features["none"]
    assert all(any(np.array_equal(row, other) for other in whole) for row in private[0])


def test_the_boost_is_the_papers():
    key = (2, "none")
    results = {
        ("paragon", *key, None): [{"error": 0.1}],
        ("only_public", *key, None): [{"error": 0.5}, {"error": 0.3}],
        ("adamix", *key, 1.0): [{"error": 0.2}],
        ("ngd", *key, 1.0): [{"error": 0.1}],
    }
    assert mixed_pictures.boost(results, "adamix", 2, "none", 1.0) == pytest.approx(3.0)
    assert mixed_pictures.boost(results, "ngd", 2, "none", 1.0) == float("inf")
    assert mixed_pictures.spread([0.1, 0.3]) == "20.0 ± 14.1"


@pytest.mark.slow
def test_on_the_digits_it_beats_what_the_paper_compares(tmp_path):
    arguments = dict(methods=["only_public", "fully_private", "ngd", "adamix"])
    with flagsaver.flagsaver(data_dir=str(tmp_path / "data")):
        record = run(tmp_path / "work", noise_multiplier=20.0, **arguments)
    adamix_error = record["adamix_2_eps1_error"]
    assert adamix_error <= record["ngd_2_eps1_error"]
    assert adamix_error < 0.5 * record["only_public_2_error"]
    assert adamix_error < 0.8 * record["fully_private_2_eps1_error"]
