"""A private run of two phases: the last layer first, then all layers."""

import json

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train import classifiers, classify

HEAD_FIRST = dict(
    model="small_cnn", batch_size=256, steps=6, head_steps=2, head_learning_rate=4.0, epsilon=3.0,
    report_every=2, seed=3, accountant="rdp",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])


@pytest.fixture(scope="module")
def data_dir(finished_runs):
    return finished_runs.data_dir


def run(data_dir, workdir, **given):
    with flagsaver.flagsaver(data_dir=data_dir, workdir=str(workdir), **given):
        classify.main(["classify"])
    return records.plain(records.read(workdir / "record.json").view())


def model_of(workdir):
    return keras.saving.load_model(workdir / "model.keras")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The folder of a model whose record names generated images."""
    workdir = tmp_path_factory.mktemp("pretrained")
    classifiers.build("small_cnn", (8, 8, 1), 10, 120.0).save(workdir / "model.keras")
    Record("pretrain", Data("synthetic:strokes"), Ledger(), None).save(workdir / "model.keras")
    return workdir


@pytest.fixture(scope="module")
def head_first(pretrained, data_dir, tmp_path_factory):
    workdir, bodies = tmp_path_factory.mktemp("head_first"), []
    fit = keras.Model.fit

    def spy(model, *args, **kwargs):
        fit(model, *args, **kwargs)
        bodies.append((len(model.trainable_variables), model.get_weights()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "fit", spy)
        init_from = str(pretrained / "model.keras")
        record = run(data_dir, workdir, init_from=init_from, **HEAD_FIRST)
    return workdir, record, bodies


@pytest.mark.slow
def test_the_last_layer_is_trained_first_and_then_all(pretrained, head_first):
    start = model_of(pretrained).get_weights()
    (count, head), (count_of_all, every) = head_first[2]
    assert (count, count_of_all) == (2, len(start))
    same = [np.array_equal(a, b) for a, b in zip(start, head, strict=True)]
    assert same == [True] * (len(start) - 2) + [False] * 2
    assert not any(map(np.array_equal, start, every))
    for a, b in zip(model_of(head_first[0]).get_weights(), every, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_both_phases_are_on_one_account(head_first):
    workdir, record, _ = head_first
    assert (record["steps"], record["head_steps"]) == (6, 2)
    assert record["trained_parameters"] == record["parameters"] == 30_890
    probability = record["sampling_probability"]
    spent = tfdpx.accounting.epsilon(record["noise_multiplier"], probability, 6, 1e-5, "rdp")
    assert record["epsilon"] == pytest.approx(spent) and 2.99 < spent <= 3
    assert not record["epsilon_is_approximate"]
    rows = [json.loads(line) for line in (workdir / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"] == record["epsilon"]


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_phase_goes_on(pretrained, head_first, data_dir, tmp_path):
    given = dict(HEAD_FIRST, init_from=str(pretrained / "model.keras"))
    save = tfdpx.callbacks.Checkpoint.on_epoch_end

    def save_and_die(self, *args):
        save(self, *args)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfdpx.callbacks.Checkpoint, "on_epoch_end", save_and_die)
        for resume in (False, True):  # After the last layer's epoch; after the first of all layers.
            with pytest.raises(Killed):
                run(data_dir, tmp_path / "run", resume=resume, **given)
    record = run(data_dir, tmp_path / "run", resume=True, **given)
    assert (record["steps"], record["epsilon"]) == (6, head_first[1]["epsilon"])
    for a, b in zip(
        model_of(head_first[0]).get_weights(), model_of(tmp_path / "run").get_weights(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_what_a_model_has_spent_on_the_data_counts(head_first, data_dir, tmp_path):
    again = dict(HEAD_FIRST, init_from=str(head_first[0] / "model.keras"))
    # What the file says goes before what the user says.
    both = run(data_dir, tmp_path / "both", **again, init_data="mnist")
    assert both["epsilon"] > 1.1 * head_first[1]["epsilon"] and both["steps"] == 6
    # What Keras has rewritten does not say what it has seen.
    path = str(tmp_path / "rewritten.keras")
    model_of(head_first[0]).save(path)
    with pytest.raises(SystemExit, match="does not say.*--init_data"):
        given = dict(again, init_from=path, pretrained_on="synthetic")  # As presets say.
        run(data_dir, tmp_path / "run", **given)


ERRORS = [
    (dict(head_steps=200), "--head_steps must lie below.*82.*--head_steps=200"),
    (dict(head_steps=-1), "--head_steps must not be negative"),
    (dict(head_learning_rate=1.0), "--head_learning_rate belongs to --head_steps"),
    (dict(head_steps=1, trainable="last", init_from="x"), "out --trainable=last"),
]


def test_errors_of_the_user_are_one_line(data_dir, tmp_path):
    for given, message in ERRORS:
        with pytest.raises(SystemExit, match=message) as error:
            run(data_dir, tmp_path / "run", **given)
        assert "\n" not in error.value.code
