"""The devices of a run, the worker that writes files, and the death of a worker."""

import json
import os
import pathlib
import subprocess
import sys
import time
import types

import keras
import numpy as np
import processes
import pytest
from cases import slow

from tfdpx.accounting import record as records
from tfdpx.train import classify, devices
from tfdpx.train.errors import UserError

CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


def config(cluster=CLUSTER, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    "kind, tpu, environment, message",
    [
        ("multiworker", None, None, "needs the environment variable TF_CONFIG"),
        ("auto", None, "[]", "TF_CONFIG is no valid JSON"),
        ("auto", None, config(index=2), "its task must be one of them"),
        ("auto", None, config({**CLUSTER, "ps": ["127.0.0.1:3"]}), "a chief and workers only"),
        ("mirrored", "name", None, "--tpu=name needs --strategy=tpu"),
        slow("tpu", None, None, "Cannot use the TPU 'local'"),  # It waits for an answer.
    ],
)
def test_errors_of_the_user(kind, tpu, environment, message, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if environment is not None:
        monkeypatch.setenv("TF_CONFIG", environment)
    with pytest.raises(UserError, match=message):
        devices.make(kind, tpu)


# Two replicas share a batch evenly.
GIVEN = dict(epsilon=1, seed=0, steps=10, batch_size=1436, report_every=5)


def start(workdir, data_dir, *flags, **environment):
    """Starts the binary with a budget for which it trains a small model."""
    arguments = [f"--{name}={value}" for name, value in GIVEN.items()]
    arguments += [f"--workdir={workdir}", f"--data_dir={data_dir}", *flags]
    return subprocess.Popen(
        [sys.executable, "-m", "tfdpx.train.classify", *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(workdir, data_dir, *flags):
    return [start(workdir, data_dir, *flags, TF_CONFIG=config) for config in processes.cluster(2)]


def finish(started):
    """Waits for all processes; returns their standard outputs."""
    try:
        results = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in results]


def test_a_batch_size_that_replicas_cannot_share_is_an_error():
    with pytest.raises(UserError, match="Use 332 or 334"):
        devices.check_batch_size(types.SimpleNamespace(num_replicas_in_sync=2), 333)


@pytest.fixture(scope="module")
def single(run, tmp_path_factory):
    """The folder of a run on one device."""
    workdir = tmp_path_factory.mktemp("single") / "run"
    run(classify, workdir=workdir, **GIVEN)
    return workdir


@pytest.fixture(scope="module")
def data_dir(single, finished_runs):
    return finished_runs.data_dir


def assert_same_run(workdir, single, is_killed=False):
    record, wanted = (records.read(f / "record.json").view() for f in (workdir, single))
    assert record["replicas"] == 2
    for name in ("test_accuracy", "epsilon", "steps", "noise_multiplier"):
        assert record[name] == wanted[name], name
    # A kill after a save, but before the files that follow it, loses the row of that save.
    rows, wanted_rows = ((f / "curve.jsonl").read_text().splitlines() for f in (workdir, single))
    assert set(rows) <= set(wanted_rows) and rows[-1] == wanted_rows[-1]
    assert len(rows) >= len(wanted_rows) - is_killed
    model, other = (keras.saving.load_model(f / "model.keras") for f in (workdir, single))
    for weights, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_devices_train_like_one(single, data_dir, tmp_path):
    finish([start(tmp_path / "run", data_dir, "--cpu_devices=2")])
    assert_same_run(tmp_path / "run", single)


@pytest.mark.nightly
def test_two_workers_train_like_one_and_only_the_chief_writes(single, data_dir, tmp_path):
    outputs = finish(workers(tmp_path / "run", data_dir))
    assert_same_run(tmp_path / "run", single)
    assert json.loads(outputs[0].splitlines()[-1])["replicas"] == 2
    assert outputs[1] == ""
    events = [p.parent.name for p in (tmp_path / "run" / "tensorboard").rglob("events*")]
    assert sorted(events) == ["budget", "train", "validation"]


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_is_resumed_and_every_update_counts_once(
    killed, single, data_dir, tmp_path
):
    workdir = tmp_path / "run"
    started = workers(workdir, data_dir)
    wait_for(workdir / "checkpoint" / "tfdpx-checkpoint.zip", started)
    started[killed].kill()
    _, errors = started[1 - killed].communicate(timeout=100)
    started[killed].communicate()
    assert started[1 - killed].returncode == 1
    assert "another worker stopped; start all with --resume" in errors
    assert not (workdir / "record.json").exists()
    finish(workers(workdir, data_dir, "--resume"))
    assert_same_run(workdir, single, is_killed=True)


def wait_for(path: pathlib.Path, started):
    until = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < until and all(process.poll() is None for process in started)
        time.sleep(0.02)
