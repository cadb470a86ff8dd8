"""Tuning within a budget: what is kept, what is spent, and what is refused."""

import keras
import pytest
from absl.testing import flagsaver

from tfdpx.accounting import record as records
from tfdpx.accounting import selection
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train import classify, sweep
from tfdpx.train.errors import UserError
from tfdpx.train.sweeps import private_tuning

GRID = {"learning_rate": (1.0, 2.0)}
GIVEN = dict(model="small_cnn", steps=3, batch_size=64, epsilon=2.0)


@pytest.fixture(scope="module")
def data_dir(run, finished_runs):
    with flagsaver.flagsaver(data_dir=finished_runs.data_dir):
        yield


@pytest.fixture
def made_up(monkeypatch):
    """Runs that train nothing; a dict receives how many and at which noise."""
    seen = {"flags": [], "right": iter([500, 1400, 900, 1000])}

    def execute(runs, folder, extra, say):
        del extra, say
        there = folder / "runs" / runs[0].name
        there.mkdir(parents=True)
        seen["flags"].append(dict(a[2:].split("=", 1) for a in runs[0].arguments))
        noise = float(seen["flags"][-1]["noise_multiplier"])
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]).save(there / "model.keras")
        for name in ("model.keras", "record.json"):
            Record(
                "classify",
                Data("sklearn_digits", 1437),
                Ledger((Entry(noise, 64 / 1437, 3, run=len(seen["flags"])),)),
                1e-5,
                results={"run": len(seen["flags"]), "model": "small_cnn", "steps": 3},
            ).save(there / name)
        for name in ("log.txt", "curve.jsonl", "learning_curve.png", "confusion_matrix.png"):
            (there / name).write_text("epsilon of a run")
        (there / "tensorboard").mkdir()
        return {}

    monkeypatch.setattr(private_tuning.runs, "execute", execute)
    monkeypatch.setattr(private_tuning, "_right", lambda folder, data: next(seen["right"]))
    monkeypatch.setattr(selection, "draw_runs", lambda mean: 4)
    return seen


@pytest.mark.slow
def test_the_best_of_all_runs_is_kept_alone_and_pays_for_all(tmp_path, data_dir, made_up):
    report = private_tuning.tune("digits", GIVEN, GRID, 5.0, tmp_path / "tuned", [])
    assert report["run"] == 2  # 400 images ahead; the noise is of some 30.
    assert [path.name for path in (tmp_path / "tuned").iterdir()] == ["best"]
    best = tmp_path / "tuned/best"
    assert sorted(path.name for path in best.iterdir()) == [
        "confusion_matrix.png",
        "model.keras",
        "privacy_statement.txt",
        "record.json",
        "report.html",
    ]
    assert "differential privacy" in (best / "report.html").read_text()
    assert "5 on average" in (best / "report.html").read_text()
    assert report["epsilon"] <= 2.0 and report["epsilon"] > 1.99
    for name in ("record.json", "model.keras"):
        assert records.read(best / name).epsilon == report["epsilon"]
    statement = " ".join((best / "privacy_statement.txt").read_text().split())
    assert "number of runs, 5 on average" in statement
    assert not {"runs", "number_of_runs", "epsilon_of_a_run"} & set(report)
    # All runs have the same noise, which is that of the account.
    noises = {float(each["noise_multiplier"]) for each in made_up["flags"]}
    [sigma] = noises
    assert all("epsilon" not in each for each in made_up["flags"])
    assert {float(each["learning_rate"]) for each in made_up["flags"]} <= {1.0, 2.0}
    spent = selection.selection_epsilon([Entry(sigma, 64 / 1437, 3)], 1e-5, 5.0)
    assert spent < report["epsilon"]
    with pytest.raises(UserError, match="holds a tuned run"):
        private_tuning.tune("digits", GIVEN, GRID, 5.0, tmp_path / "tuned", [])


@pytest.mark.slow
def test_a_run_that_fails_leaves_nothing(tmp_path, data_dir, monkeypatch):
    def execute(runs, folder, extra, say):
        del extra, say
        folder.mkdir()
        return {runs[0].name: "failed: loss."}

    monkeypatch.setattr(private_tuning.runs, "execute", execute)
    with pytest.raises(UserError, match="Nothing is kept"):
        private_tuning.tune("digits", GIVEN, GRID, 5.0, tmp_path / "tuned", [])
    assert not list((tmp_path / "tuned").iterdir())


REFUSED = [
    (GIVEN, {"batch_size": (64, 128)}, "all runs share batch_size"),
    (GIVEN, {"epsilon": (1.0, 2.0)}, "all runs share epsilon"),
    (GIVEN, {"preset": ("digits", "table12/eps8")}, "all runs share preset"),
    ({**GIVEN, "validation": 0.25}, GRID, "--validation=0.25"),
    ({**GIVEN, "sampling": "shuffle"}, GRID, "--sampling=shuffle"),
    ({"private": False}, GRID, "--private=False"),
    ({**GIVEN, "noise_multiplier": 1.0, "steps": None}, GRID, "--noise_multiplier=1.0"),
    ({"epsilon": 2.0}, {"model": ("scatter_linear", "small_cnn")}, "all runs share batch_size"),
]


def test_what_the_account_has_no_room_for_is_refused(tmp_path, data_dir):
    for given, swept, message in REFUSED:
        with pytest.raises(UserError, match=message):
            private_tuning.tune("digits", given, swept, 5.0, tmp_path / "tuned", [])
        assert not (tmp_path / "tuned").exists()


@pytest.mark.slow
def test_the_binary_tunes_the_digits(tmp_path, run, refusal, monkeypatch):
    given = dict(private_tuning=1.5, grid="learning_rate=10,20", workdir=tmp_path / "tuned")
    for more in (dict(seeds=[0]), dict(jobs=2), dict(table_only=True)):
        assert "exclude each other" in refusal(sweep, **{**given, "workdir": tmp_path}, **more)
    assert "number above 1" in refusal(sweep, **{**given, "private_tuning": 1.0})
    monkeypatch.setattr(selection, "draw_runs", lambda mean: 1)  # For always the same time.
    record, _ = run(sweep, epsilon=4.0, **given)
    assert 3.9 < record["epsilon"] <= 4.0
    assert record["test_accuracy"] > 0.9 and record["noisy_train_accuracy"] > 0.8
    assert (tmp_path / "tuned/best/model.keras").exists()
    assert not (tmp_path / "tuned/best/log.txt").exists()

    # Whoever trains on from it pays for all runs.
    given = dict(init_from=str(tmp_path / "tuned/best"), allow_seen_data=True)
    on, _ = run(classify, workdir=tmp_path / "on", steps=3, epsilon=1.0, **given)
    assert 4.9 < on["epsilon"] <= 5.0
