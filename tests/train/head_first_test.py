"""A private run of two phases: the last layer first, then all layers."""

import json

import keras
import numpy as np
import pytest
from interrupting import ctrl_c_after

import tfdpx
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import classify, start_from

HEAD_FIRST = dict(
    model="small_cnn", batch_size=256, steps=6, head_steps=2, head_learning_rate=2.0, epsilon=3.0,
    report_every=2, seed=3, accountant="rdp",
)  # fmt: skip


def weights_of(workdir):
    return keras.saving.load_model(workdir / "model.keras").get_weights()


@pytest.fixture(scope="module")
def shared_flags(tmp_path_factory):
    """The flags, with the folder of a model with generated images in its record."""
    workdir = tmp_path_factory.mktemp("pretrained")
    start_from.classifier("small_cnn", (8, 8, 1), 10, 120.0).save(workdir / "model.keras")
    Record("pretrain", DatasetId("synthetic:strokes"), Ledger(), None).save(workdir / "model.keras")
    return HEAD_FIRST | {"init_from": str(workdir / "model.keras")}


@pytest.fixture(scope="module")
def head_first(shared_flags, run, tmp_path_factory):
    """The folder of a run, its report, and for each phase the trained weights and all values."""
    workdir, phases = tmp_path_factory.mktemp("head_first"), []
    fit = keras.Model.fit

    def spy(model, *args, **kwargs):
        rate = float(model.optimizer.learning_rate)
        fit(model, *args, **kwargs)
        phases.append((len(model.trainable_variables), rate, model.get_weights()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "fit", spy)
        record, _ = run(classify, workdir=workdir, **shared_flags)
    return workdir, record, phases


@pytest.mark.slow
def test_the_last_layer_is_trained_first_and_both_phases_are_on_one_account(
    shared_flags, head_first
):
    workdir, record, phases = head_first
    start = keras.saving.load_model(shared_flags["init_from"]).get_weights()
    (count, rate, head), (count_of_all, rate_of_all, every) = phases
    assert (count, count_of_all) == (2, len(start)) and rate == 2.0 != rate_of_all
    same = [np.array_equal(a, b) for a, b in zip(start, head, strict=True)]
    assert same == [True] * (len(start) - 2) + [False] * 2
    assert not any(map(np.array_equal, start, every))
    assert all(map(np.array_equal, weights_of(workdir), every))

    assert (record["steps"], record["head_steps"]) == (6, 2)
    assert record["trained_parameters"] == record["parameters"] == 30_890
    probability = record["sampling_probability"]
    spent = tfdpx.accounting.epsilon(record["noise_multiplier"], probability, 6, 1e-5, "rdp")
    assert record["epsilon"] == pytest.approx(spent) and 2.99 < spent <= 3
    assert not record["epsilon_is_approximate"]
    rows = [json.loads(line) for line in (workdir / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"] == record["epsilon"]


@pytest.mark.nightly
def test_ctrl_c_in_each_phase_and_a_second_one_that_does_not_wait(
    shared_flags, head_first, run, tmp_path, capsys
):
    shared_flags = shared_flags | {"workdir": tmp_path}
    with pytest.raises(SystemExit, match="130"), ctrl_c_after(1):  # Phase one: the last layer.
        run(classify, **shared_flags)
    assert "interrupted at update 1; nothing is lost" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="130"), ctrl_c_after(3, times=2):  # Phase two: all layers.
        run(classify, resume=True, **shared_flags)
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert "interrupted; the last save is intact" in last_line and last_line.endswith("--resume")
    record, _ = run(classify, resume=True, **shared_flags)
    assert (record["steps"], record["epsilon"]) == (6, head_first[1]["epsilon"])
    assert all(map(np.array_equal, weights_of(tmp_path), weights_of(head_first[0])))
