"""A sweep goes on where it was, leaves failed runs aside, and never mixes two sweeps."""

import sys

import pytest
from absl import flags

from tfdpx import _resumable as resumable
from tfdpx.accounting import Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train.config.errors import UserError
from tfdpx.train.sweeps import table
from tfdpx.train.sweeps.grid import parse, runs
from tfdpx.train.sweeps.runs import _locked, execute, read_all

# Stands for `python -m tfdpx.train.classify`: leaves a record, or fails where it is told to.
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


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["sweep"])


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    found = {"test_accuracy": None, "validation_accuracy": 0.5}
    Record("classify", Data("digits"), Ledger(), None, results=found).save(tmp_path / "record.json")
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    (tmp_path / "sweep").mkdir()
    return tmp_path / "sweep"


def runs_of(rates="1,2", **given):
    return runs("digits", given, parse(f"learning_rate={rates}"), (0, 1))


def started(workdir):
    path = workdir / "started"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_every_run_is_taken_once_and_later_calls_add_what_is_new(workdir):
    lines = []
    assert execute(runs_of(), workdir, say=lines.append) == {}
    assert started(workdir) == 4 and len(read_all(workdir)) == 4
    assert lines[-1].startswith("[4/4] learning_rate=2.0,seed=1: 50.0%")
    assert execute(runs_of(), workdir) == {} and started(workdir) == 4
    execute(runs_of("1,2,4"), workdir)
    assert started(workdir) == 6
    points = [result["point"] for result in read_all(workdir)]
    assert sorted(point["learning_rate"] for point in points) == [1, 1, 2, 2, 4, 4]


def test_runs_side_by_side(workdir):
    assert execute(runs_of(), workdir, jobs=3) == {} and started(workdir) == 4


@pytest.mark.slow
def test_failed_runs_say_why_and_are_tried_again(workdir):
    (workdir / "fail").touch()
    failures = execute(runs_of(), workdir)
    assert len(failures) == 4 and set(failures.values()) == {"failed: no luck"}
    assert read_all(workdir) == []
    (workdir / "fail").rename(workdir / "die")
    assert "killed by SIGKILL" in next(iter(execute(runs_of(), workdir).values()))
    (workdir / "die").unlink()
    assert execute(runs_of(), workdir) == {} and len(read_all(workdir)) == 4


def test_a_damaged_record_is_refused(workdir):
    execute(runs_of(), workdir)
    record = next((workdir / "runs").glob("*/record.json"))
    record.write_text('{"test_accu')
    with pytest.raises(UserError, match="no whole record"):
        read_all(workdir)


def test_a_run_of_other_settings_is_not_taken_for_this_one(workdir):
    execute(runs_of(), workdir)
    path = workdir / "runs/learning_rate=1.0,seed=0/point.json"
    kept = resumable.begun(path)
    assert kept["settings"]["epsilon"] == 8.0
    # As if the preset had been another then.
    resumable.save(path, {**kept["settings"], "epsilon": 3.0}, point=kept["point"])
    with pytest.raises(UserError, match="epsilon=3.0. Received: epsilon=8.0"):
        execute(runs_of(), workdir)


@pytest.mark.parametrize("rates", ["1,2", "4"])
def test_runs_that_differ_in_more_than_what_is_swept_do_not_share_a_folder(workdir, rates):
    execute(runs_of(steps=5), workdir)
    with pytest.raises(UserError, match="with steps=5. Received: steps=not given"):
        execute(runs_of(rates), workdir)
    with pytest.raises(UserError, match="with epsilon=not given. Received: epsilon=3.0"):
        execute(runs_of(rates, steps=5, epsilon=3.0), workdir)
    assert started(workdir) == 4


def test_what_was_given_may_be_swept_later(workdir):
    execute(runs_of("1", steps=5), workdir)
    grid = parse("learning_rate=1;steps=5,6")
    execute(runs("digits", {}, grid, (0,)), workdir)
    rows = table.rows(read_all(workdir))
    assert sorted(row["steps"] for row in rows) == [5, 5, 5, 6]


def test_presets_may_be_swept_later(workdir):
    execute(runs_of("1"), workdir)
    grid = parse("preset=digits,table2/ema")
    execute(runs("digits", {}, grid, (0,)), workdir)
    rows = table.rows(read_all(workdir))
    assert [row["preset"] for row in rows] == ["digits"] * 3 + ["table2/ema"]


def test_two_sweeps_cannot_write_to_one_folder(workdir):
    with _locked(workdir), pytest.raises(UserError, match="Another sweep"):
        execute(runs_of(), workdir)
    (workdir / "file").touch()
    with pytest.raises(UserError, match="Cannot write to --workdir"):
        execute(runs_of(), workdir / "file")
