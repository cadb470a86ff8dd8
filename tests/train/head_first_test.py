"""A private run of two phases: the last layer first, then all layers."""

import json

import keras
import numpy as np
import pytest
from interrupting import ctrl_c_after

import tfdpx
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import classifiers, classify

HEAD_FIRST = dict(
    model="small_cnn", batch_size=256, steps=6, head_steps=2, head_learning_rate=2.0, epsilon=3.0,
    report_every=2, seed=3, accountant="rdp",
)  # fmt: skip


def weights_of(workdir):
    return keras.saving.load_model(workdir / "model.keras").get_weights()


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """The flags, with the folder of a model whose record names generated images."""
    workdir = tmp_path_factory.mktemp("pretrained")
    classifiers.build("small_cnn", (8, 8, 1), 10, 120.0).save(workdir / "model.keras")
    Record("pretrain", DatasetId("synthetic:strokes"), Ledger(), None).save(workdir / "model.keras")
    return HEAD_FIRST | {"init_from": str(workdir / "model.keras")}


@pytest.fixture(scope="module")
def head_first(given, run, tmp_path_factory):
    """The folder of a run, its report, and of each phase the trained weights and all values."""
    workdir, phases = tmp_path_factory.mktemp("head_first"), []
    fit = keras.Model.fit

    def spy(model, *args, **kwargs):
        rate = float(model.optimizer.learning_rate)
        fit(model, *args, **kwargs)
        phases.append((len(model.trainable_variables), rate, model.get_weights()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "fit", spy)
        record, _ = run(classify, workdir=workdir, **given)
    return workdir, record, phases


@pytest.mark.slow
def test_the_last_layer_is_trained_first_and_both_phases_are_on_one_account(given, head_first):
    workdir, record, phases = head_first
    start = keras.saving.load_model(given["init_from"]).get_weights()
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


@pytest.mark.slow
def test_ctrl_c_in_each_phase_and_a_second_one_that_does_not_wait(
    given, head_first, run, tmp_path, capsys
):
    given = given | {"workdir": tmp_path}
    with pytest.raises(SystemExit, match="130"), ctrl_c_after(1):  # Of the last layer alone.
        run(classify, **given)
    assert "interrupted at update 1; nothing is lost" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="130"), ctrl_c_after(3, times=2):  # Of all layers.
        run(classify, resume=True, **given)
    told = capsys.readouterr().err.splitlines()[-1]
    assert "interrupted; what was saved is whole" in told and told.endswith("--resume")
    record, _ = run(classify, resume=True, **given)
    assert (record["steps"], record["epsilon"]) == (6, head_first[1]["epsilon"])
    assert all(map(np.array_equal, weights_of(tmp_path), weights_of(head_first[0])))
