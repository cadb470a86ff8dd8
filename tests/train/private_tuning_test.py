"""Tuning within a budget: what is kept, what is spent, and what is refused."""

import keras
import own_images
import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx.accounting import record as records
from tfdpx.accounting import selection
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train import classify, private_tuning, sweep
from tfdpx.train.errors import UserError

GIVEN = dict(model="small_cnn", steps=3, batch_size=64, epsilon=2.0)


@pytest.fixture(scope="module", autouse=True)
def data_dir(finished_runs):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    with flagsaver.flagsaver(data_dir=finished_runs.data_dir):
        yield


def tune(workdir, train=None, grid="learning_rate=1,2", **given):
    shared = {"preset": "digits", "validation": 0.0, "eval_split": "test", **GIVEN, **given}
    grid = sweep.parse(grid)
    runs = sweep.grid_runs(grid, {k: v for k, v in shared.items() if k not in grid})
    return private_tuning.tune(runs, 5.0, workdir, train)


@pytest.fixture
def made_up(monkeypatch):
    """Four runs that train nothing and get so many images right, and the flags of each."""
    right, runs = iter([500, 1400, 900, 1000]), []

    def train(run, folder, steps=3, entries=()):
        runs.append(run.chosen)
        folder = folder / "runs" / run.name
        folder.mkdir(parents=True)
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]).save(folder / "model.keras")
        updates = Entry(run.chosen["noise_multiplier"], 64 / 1437, steps, run=len(runs))
        found = {"run": len(runs), "model": "small_cnn", "steps": 3}
        for name in ("model.keras", "record.json"):
            ledger = Ledger((updates, *entries))
            record = Record("classify", Data("sklearn_digits", 1437), ledger, 1e-5, results=found)
            record.save(folder / name)
        for name in ("log.txt", "point.json", "curve.jsonl", "learning_curve.png"):
            (folder / name).write_text("epsilon of a run")
        (folder / "tensorboard").mkdir()
        return folder

    monkeypatch.setattr(private_tuning, "_count_right", lambda folder, settings: next(right))
    monkeypatch.setattr(selection, "draw_runs", lambda mean: 4)
    return train, runs


@pytest.mark.slow
def test_the_best_of_all_runs_is_kept_alone_and_pays_for_all(tmp_path, made_up):
    train, runs = made_up
    report = tune(tmp_path / "tuned", train)
    assert report["run"] == 2  # 400 images ahead; the noise is of some 30.
    assert [path.name for path in (tmp_path / "tuned").iterdir()] == ["best"]
    best = tmp_path / "tuned/best"
    assert sorted(path.name for path in best.iterdir()) == [
        "model.keras",
        "privacy_statement.txt",
        "record.json",
        "report.html",
    ]
    assert "differential privacy" in (best / "report.html").read_text()
    assert "5 on average" in (best / "report.html").read_text()
    assert 1.99 < report["epsilon"] <= 2.0
    statement = " ".join((best / "privacy_statement.txt").read_text().split())
    assert "number of runs, 5 on average" in statement
    assert not {"runs", "number_of_runs", "epsilon_of_a_run"} & set(report)
    # All runs have the same noise, and epsilon follows from the ledger of the one that is kept.
    [sigma] = {chosen["noise_multiplier"] for chosen in runs}
    assert all("epsilon" not in chosen for chosen in runs)
    assert {chosen["learning_rate"] for chosen in runs} <= {1.0, 2.0}
    for name in ("record.json", "model.keras"):
        record = records.read(best / name)
        assert record.epsilon == report["epsilon"]
        [(updates, score)] = record.ledger.selections
        assert (updates.noise_multiplier, updates.steps) == (sigma, 3)
        assert selection.selection_epsilon([updates, score], 1e-5, 5.0) == report["epsilon"]
    with pytest.raises(UserError, match="holds a tuned run"):
        tune(tmp_path / "tuned", train)


def fail(run, folder):
    folder.mkdir()
    raise UserError("A run failed: loss. Nothing is kept.")


@pytest.mark.slow
def test_a_run_that_fails_or_spends_more_than_planned_leaves_nothing(tmp_path, made_up):
    train, _ = made_up
    another = Entry(1.0, 0.5, 1, run=99)
    for run, message in [
        (fail, "Nothing is kept"),
        (lambda run, folder: train(run, folder, steps=4), "not trained as planned"),
        (lambda run, folder: train(run, folder, entries=[another]), "not trained as planned"),
    ]:
        with pytest.raises(UserError, match=message):
            tune(tmp_path / "tuned", run)
        assert not list((tmp_path / "tuned").iterdir())


SHARED = "batch_size=64,128 steps=3,4 epsilon=1,2 delta=1e-5,1e-4 accountant=rdp,pld".split()
SHARED += ["dataset=digits,digits:0-4", "eval_split=test,validation;validation=0.25"]
REFUSED = [
    *((dict(grid=grid), f"all runs share {grid.partition('=')[0]}") for grid in SHARED[:-1]),
    (dict(grid=SHARED[-1]), "--validation=0.25"),
    (dict(grid="validation=0,0.25"), "--validation=0.25"),
    (dict(grid="model=scatter_linear,small_cnn", steps=None, batch_size=None), "share batch_size"),
    (dict(validation=0.25), "--validation=0.25"),
    (dict(sampling="shuffle"), "--sampling=shuffle"),
    (dict(private=False, epsilon=None), "--private=False"),
    (dict(noise_multiplier=1.0, steps=None), "--noise_multiplier=1.0"),
    (dict(grid="individual=false,true"), "--individual=True"),
    (dict(seed=3), "--seed=3"),
]


def test_what_the_account_has_no_room_for_is_refused(tmp_path):
    for given, message in REFUSED:
        with pytest.raises(UserError, match=message):
            tune(tmp_path / "tuned", **given)
        assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize("name", ["test_fraction=0.2,0.9", "test_seed=0,1", "skip_broken=0,1"])
def test_points_of_other_training_images_are_refused(tmp_path, name):
    own_images.write(tmp_path / "images", {3: 6, 5: 6}, size=8)
    with pytest.raises(UserError, match=f"all runs share {name.partition('=')[0]}"):
        tune(tmp_path / "tuned", grid=name, dataset=f"folder:{tmp_path / 'images'}", batch_size=8)


@pytest.mark.slow
def test_the_program_tunes_the_digits(tmp_path, run, refusal, monkeypatch):
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

    # A run that trains on from it pays for all runs.
    given = dict(init_from=str(tmp_path / "tuned/best"), allow_seen_data=True)
    on, _ = run(classify, workdir=tmp_path / "on", steps=3, epsilon=1.0, **given)
    assert 4.9 < on["epsilon"] <= 5.0
