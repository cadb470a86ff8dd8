"""A sweep: its grid, how it resumes, its table, and refusals."""

import csv
import re
import shutil
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx import _files as files
from tfdpx.accounting import Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import defaults, settings, sweep


@pytest.mark.slow
def test_a_sweep_of_the_digits_and_its_table_again(run, tmp_path):
    arguments = dict(model="small_cnn", steps=2, batch_size=64, epsilon=2.0, accountant="rdp")
    arguments |= dict(workdir=tmp_path / "sweep", seeds=[0], grid="l2_norm_clip=0.1", jobs=2)
    record, _ = run(sweep, **arguments)
    assert (record["runs"], record["points"], record["failures"]) == (1, 1, {})
    assert record["measured_on"] == "validation" and record["best"] == {"l2_norm_clip": 0.1}
    [row] = csv.DictReader((tmp_path / "sweep/table.csv").open())
    assert row["validation_accuracy"] == str(record["best_median_accuracy"])
    assert 1.9 < float(row["epsilon"]) <= 2.0
    (tmp_path / "sweep/table.csv").unlink()
    again, _ = run(sweep, **arguments)
    assert (tmp_path / "sweep/table.csv").exists()
    assert again["best_median_accuracy"] == record["best_median_accuracy"]


GRID = dict(grid="steps=5")
ERRORS = [
    ({}, "--grid says what to sweep"),
    (dict(GRID, workdir=None), "--workdir names the folder"),
    (dict(GRID, dataset="csv:x.csv"), "not tables. For tables, search with scikit-learn"),
    (dict(GRID, head="newton"), "not heads. .*Received: --dataset=None --head=newton"),
    (dict(GRID, seed=3), "leave one of them out. Received: --seed=3"),
    (dict(GRID, seeds=["0", "0"]), "invalid values of seed: a value comes twice"),
    (dict(GRID, steps=7), "leave one of them out. Received: --steps=7"),
    (dict(grid="color=5"), "can sweep .*learning_rate.*Received: 'color=5'"),
    (dict(grid="epsilom=5"), "Did you mean 'epsilon'[?] It can sweep"),
    (dict(grid="preset=none"), "no preset 'none'"),
    (dict(grid="steps=1;steps=2"), "each setting once.*Received: 'steps=2'"),
    (dict(grid="steps=many"), "invalid values of steps.*Received: 'many'"),
    (dict(grid="noise_multiplier=2,3", preset="table12/eps8"), "Sweeping noise.* changes epsilon"),
    (dict(grid="preset=table12/eps6,table12/eps8"), "Sweeping preset changes epsilon"),
]


def test_errors_of_the_user_are_one_line(refusal, tmp_path):
    for arguments, message in ERRORS:
        line = refusal(sweep, **{"workdir": tmp_path / "sweep", **arguments})
        assert re.search(message, line), (arguments, line)
        assert not (tmp_path / "sweep").exists()


def settings_of(text, **shared):
    grid = {**sweep.parse(text), "seed": [4, 5]}
    runs = sweep.grid_runs(grid, shared if "preset" in grid else {"preset": "digits", **shared})
    for planned in runs:  # Its process gets these flags.
        preset, arguments = planned.chosen["preset"], planned.arguments
        arguments.remove(f"--preset={preset}")
        with flagsaver.flagsaver():
            flags.FLAGS(["classify", *arguments])
            assert settings.resolve(preset, settings.flag_values()) == planned.settings
    return [planned.settings for planned in runs]


@pytest.mark.slow
def test_every_point_runs_with_every_seed_at_one_epsilon(run):
    text = " batch_size = 128,512 ;learning_rate=1,2.5;optimizer=dpsgd:nesterov=false,momentum=0"
    runs = settings_of(text, epsilon=3.0, accountant="rdp")
    assert [settings.seed for settings in runs] == [4, 5] * 4
    assert {settings.learning_rate for settings in runs} == {1.0, 2.5}
    complete = [defaults.complete(values, 1000)[0] for values in (runs[0], runs[-1])]
    small, large = (settings.privacy_plan(1000) for settings in complete)
    assert 2.99 < small.epsilon <= 3 and 2.99 < large.epsilon <= 3
    assert (large.batch_size, large.noise_multiplier > 1.5 * small.noise_multiplier) == (512, True)
    swept = settings_of("model=small_cnn:groups=none,weight_standardization=true,wrn_10_1")
    assert {s.model.partition(":")[0] for s in swept} == {"small_cnn", "wrn_10_1"}
    swept = settings_of("preset=table12/eps8,table2/ema;epsilon=1,2;augmult=16", delta=1e-4)
    assert {(s.epsilon, s.delta) for s in swept} == {(1.0, 1e-4), (2.0, 1e-4)}

    # No choice uses test images unless the flags ask for it.
    for preset in ("digits", "table12/eps8"):
        planned = settings_of("learning_rate=1", preset=preset)[0]
        assert planned.eval_split == "validation" and planned.validation > 0
        planned = settings_of("learning_rate=1", preset=preset, eval_split="test")[0]
        assert planned.eval_split == "test"
    # Without views the augmentation goes too.
    planned = settings_of("augmult=0,1", preset="table2/augmult", epsilon=8.0)[0]
    assert (planned.augmult, planned.augment) == (0, "")


# Replaces `python -m tfdpx.train.classify`: writes a record, or fails if asked to.
FAKE = """#!/bin/sh
for argument in "$@"; do
  case "$argument" in --workdir=*) folder="${argument#--workdir=}" ;; esac
done
sweep="$folder/../.."
echo "$folder" >> "$sweep/started"
if [ -e "$sweep/fail" ]; then echo "no luck"; exit 1; fi
if [ -e "$sweep/die" ]; then kill -KILL $$; fi
cp "$sweep/../record.json" "$folder/record.json"
"""


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    results = {"test_accuracy": None, "validation_accuracy": 0.5}
    settings = {"learning_rate": 4.0}
    record = Record(
        "classify", DatasetId("digits"), Ledger(), None, settings=settings, results=results
    )
    record.save(tmp_path / "record.json")
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


def started(workdir):
    return len((workdir / "started").read_text().splitlines())


def test_every_run_is_taken_once_and_later_calls_add_what_is_new(run, refusal, workdir):
    arguments = dict(workdir=workdir, seeds=[0, 1])
    record, text = run(sweep, grid="learning_rate=1,2", **arguments)
    assert (record["runs"], started(workdir)) == (4, 4)
    assert "[4/4] learning_rate=2.0,seed=1: 50.0%" in text
    run(sweep, grid="learning_rate=1,2", **arguments)
    assert started(workdir) == 4
    assert run(sweep, grid="learning_rate=1,2,4", jobs=3, **arguments)[0]["runs"] == 6
    run(sweep, grid="preset=digits,table2/ema", workdir=workdir, seeds=[0])
    rows = list(csv.DictReader((workdir / "table.csv").open()))
    assert [row["preset"] for row in rows] == ["digits"] * 7 + ["table2/ema"]
    assert {row["learning_rate"] for row in rows} >= {"1.0", "2.0", "4.0"}
    line = refusal(sweep, workdir=workdir, grid="learning_rate=1", epsilon=3.0)
    assert "with epsilon=not given. Received: epsilon=3.0" in line
    assert started(workdir) == 8
    with files.locked(workdir):
        assert "Another run writes" in refusal(sweep, workdir=workdir, grid="learning_rate=1")
    for copy in ("copy", "learning_rate=1.0,seed=0 copy"):
        shutil.copytree(workdir / "runs" / "learning_rate=1.0,seed=0", workdir / "runs" / copy)
        line = refusal(sweep, workdir=workdir, grid="learning_rate=1", seeds=[0])
        assert f"{copy} has a run, but not the name of one of this sweep: move it" in line
        shutil.rmtree(workdir / "runs" / copy)
    next((workdir / "runs").glob("*/record.json")).write_text('{"test_accu')
    assert "no whole record" in refusal(sweep, workdir=workdir, grid="learning_rate=1")


def test_failed_runs_say_why_and_are_tried_again(run, workdir):
    shared = {"preset": "digits"}
    runs = sweep.grid_runs({"learning_rate": [1.0, 2.0], "seed": [0]}, shared)
    for file, reason in [("fail", "failed: no luck"), ("die", "killed by SIGKILL")]:
        (workdir / file).touch()
        failures = sweep.execute(runs, workdir, shared)
        assert len(failures) == 2 and all(reason in text for text in failures.values())
        (workdir / file).unlink()
    record, _ = run(sweep, workdir=workdir, grid="learning_rate=1,2", seeds=[0])
    assert (record["failures"], record["runs"], started(workdir)) == ({}, 2, 6)


def test_rows_are_in_order_and_points_summarise_their_seeds(tmp_path):
    for accuracy, seed, rate in [(0.9, 1, 10.0), (0.5, 0, 10.0), (0.8, 2, 10.0), (0.7, 0, 1.0)]:
        folder = tmp_path / "runs" / f"learning_rate={rate},seed={seed}"
        folder.mkdir(parents=True)
        results = {"test_accuracy": None, "validation_accuracy": accuracy, "steps": 5}
        Record("classify", None, Ledger(), None, results=results).save(folder / "record.json")
    rows, swept = sweep.read_table(tmp_path)
    names = ("learning_rate", "seed", "accuracy")
    assert [tuple(row[name] for name in names) for row in rows] == [
        (1.0, 0, 0.7), (10.0, 0, 0.5), (10.0, 1, 0.9), (10.0, 2, 0.8),
    ]  # fmt: skip
    best = {"learning_rate": 10.0, "median": 0.8, "lowest": 0.5, "highest": 0.9, "runs": 3}
    best |= {"mean": pytest.approx(2.2 / 3), "std": pytest.approx(0.2081666)}
    assert max(sweep.points(rows, swept), key=sweep.rank) == best
