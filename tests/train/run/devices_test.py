"""Which devices a run computes on, who writes, and what happens when a worker dies."""

import json
import os
import pathlib
import subprocess
import sys
import time

import keras
import numpy as np
import processes
import pytest
import tensorflow as tf
from cases import slow

from tfdpx.accounting import record as records
from tfdpx.layers import trainable
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import devices

CLUSTER = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}


def config(cluster=CLUSTER, kind="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize("kind", ["auto", "cpu"])
def test_one_device_needs_no_strategy(kind, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert devices.make(kind) is tf.distribute.get_strategy()
    assert devices.is_chief(devices.make(kind))


def test_mirrored_takes_the_cpu_where_there_is_no_gpu(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert devices.make("mirrored").num_replicas_in_sync == 1


@pytest.mark.parametrize(
    "kind, tpu, environment, message",
    [
        ("multiworker", None, None, "needs the environment variable TF_CONFIG"),
        ("multiworker", None, "{", "TF_CONFIG is no valid JSON"),
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


@pytest.mark.parametrize(
    "cluster, kind, index, chief",
    [
        (CLUSTER, "worker", 0, True),
        (CLUSTER, "worker", 1, False),
        ({**CLUSTER, "chief": ["127.0.0.1:3"]}, "worker", 0, False),
        ({**CLUSTER, "chief": ["127.0.0.1:3"]}, "chief", 0, True),
    ],
)
def test_the_chief_is_one(cluster, kind, index, chief, monkeypatch):
    class OfCluster(tf.distribute.MultiWorkerMirroredStrategy):
        def __init__(self):
            pass

    monkeypatch.setenv("TF_CONFIG", config(cluster, kind, index))
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    monkeypatch.setattr(OfCluster, "cluster_resolver", resolver)
    assert devices.is_chief(OfCluster()) is chief


def test_the_copy_for_one_device_predicts_the_same_and_is_not_compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="own")
    model.compile("sgd", "mse")
    copy = devices.on_one_device(model)
    x = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(copy(x), model(x))
    assert copy.name == "own" and not copy.compiled


def test_the_copy_for_one_device_has_the_lora_of_attention():
    inputs = keras.Input((4, 6))
    attended = keras.layers.MultiHeadAttention(2, 3)(inputs, inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(attended))
    trainable(model, "lora", rank=2)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.1)
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype("float32")
    np.testing.assert_array_equal(devices.on_one_device(model)(x), model(x))
    zeros = [np.zeros_like(value) for value in model.get_weights()]
    np.testing.assert_array_equal(devices.on_one_device(model, zeros)(x), 0 * model(x))


def classify(workdir, data_dir, *flags, environment=None):
    """Starts the binary at a budget for which it trains a small model."""
    command = [sys.executable, "-m", "tfdpx.train.classify", "--epsilon=1", "--seed=0"]
    command += ["--batch_size=1436"]  # Of 1,437: two replicas share it evenly.
    return subprocess.Popen(
        [*command, "--report_every=5", f"--workdir={workdir}", f"--data_dir={data_dir}", *flags],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def workers(workdir, data_dir, *flags):
    return [
        classify(workdir, data_dir, *flags, environment={"TF_CONFIG": config})
        for config in processes.cluster(2)
    ]


def finish(started):
    """Waits for all; the standard outputs."""
    try:
        results = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, results, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [output for output, _ in results]


@pytest.mark.slow
def test_a_batch_size_that_replicas_cannot_share_is_an_error(tmp_path):
    process = classify(tmp_path / "run", tmp_path, "--cpu_devices=2", "--batch_size=333")
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 1 and "accuracy" not in output
    assert "Use 332 or 334" in errors.splitlines()[-1]
    assert not any(path.is_file() for path in (tmp_path / "run").rglob("*"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The folder of a run on one device, and the folder of its data."""
    root = tmp_path_factory.mktemp("single")
    finish([classify(root / "run", root / "data")])
    return root / "run", root / "data"


def results(workdir):
    record = records.plain(records.read(workdir / "record.json").view())
    return record, (workdir / "curve.jsonl").read_text()


def assert_same_run(workdir, single, is_killed=False):
    (record, curve), (wanted, wanted_curve) = results(workdir), results(single)
    assert record["replicas"] == 2
    for name in ("test_accuracy", "epsilon", "steps", "noise_multiplier"):
        assert record[name] == wanted[name], name
    # A kill between a save and what is written after it leaves out the row of that save.
    rows, wanted_rows = curve.splitlines(), wanted_curve.splitlines()
    assert set(rows) <= set(wanted_rows) and rows[-1] == wanted_rows[-1]
    assert len(rows) >= len(wanted_rows) - is_killed
    model, other = (keras.saving.load_model(f / "model.keras") for f in (workdir, single))
    for found, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_devices_train_like_one(single, tmp_path):
    finish([classify(tmp_path / "run", single[1], "--cpu_devices=2")])
    assert_same_run(tmp_path / "run", single[0])


@pytest.mark.slow
def test_two_workers_train_like_one_and_only_the_chief_writes(single, tmp_path):
    outputs = finish(workers(tmp_path / "run", single[1]))
    assert_same_run(tmp_path / "run", single[0])
    assert json.loads(outputs[0].splitlines()[-1])["replicas"] == 2
    assert outputs[1] == ""
    events = [p.parent.name for p in (tmp_path / "run" / "tensorboard").rglob("events*")]
    assert sorted(events) == ["budget", "pictures", "train", "validation"]


@pytest.mark.nightly
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_is_resumed_and_every_update_counts_once(killed, single, tmp_path):
    workdir = tmp_path / "run"
    started = workers(workdir, single[1])
    wait_for(workdir / "checkpoint" / "tfdpx-checkpoint.zip", started)
    started[killed].kill()
    _, errors = started[1 - killed].communicate(timeout=100)
    started[killed].communicate()
    assert started[1 - killed].returncode == 1
    assert "another worker is gone; start all with --resume" in errors
    assert not (workdir / "record.json").exists()
    finish(workers(workdir, single[1], "--resume"))
    assert_same_run(workdir, single[0], is_killed=True)


def wait_for(path: pathlib.Path, started):
    until = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < until and all(process.poll() is None for process in started)
        time.sleep(0.02)
