"""From synthetic images to a private model: no data set is read before the private run."""

import json

import keras
import numpy as np
import pytest
import tensorflow_datasets as tfds

import tfdpx
from tfdpx.train import classify, pretrain
from tfdpx.train.data import loading
from tfdpx.train.run import evaluation, finetuning, provenance

SHORT = dict(recipe="synthetic", num_images=60, batch_size=20, steps=6, warmup_steps=2, seed=1)
HEAD_FIRST = dict(
    model="small_cnn", batch_size=256, steps=6, head_steps=2, head_learning_rate=4.0, epsilon=3.0,
    report_every=2, seed=3, accountant="rdp",
)  # fmt: skip


def weights_of(workdir):
    return keras.saving.load_model(workdir / "model.keras").get_weights()


@pytest.fixture(scope="module")
def pretrained(run, tmp_path_factory):
    """A pre-trained run, in a world where every data set refuses to be read."""

    def refuse(*args, **kwargs):
        raise AssertionError("A data set was read.")

    workdir = tmp_path_factory.mktemp("pretrained")
    with pytest.MonkeyPatch.context() as patch:
        for owner, names in [
            (tfds, ("builder", "load", "data_source")),
            (loading, ("load", "load_for", "open_builder")),
            (evaluation, ("measure", "batches")),
        ]:
            for name in names:
                patch.setattr(owner, name, refuse)
        return workdir, run(pretrain, data_dir="/no/such/folder", workdir=workdir, **SHORT)[0]


@pytest.mark.slow
def test_pretraining_reads_no_data_and_says_so(pretrained, run, tmp_path):
    workdir, record = pretrained
    assert (record["epsilon"], record["private"], record["objective"]) == (0, True, "exemplar")
    assert (record["dataset"], record["num_examples"]) == ("synthetic:strokes", 60)
    assert 0 < record["loss"] < 10 and record["test_accuracy"] is None
    # The constants of the data set's entry.
    model = keras.saving.load_model(workdir / "model.keras")
    np.testing.assert_allclose(model.get_layer("normalise")(np.full([1, 1], 240)), [[1.0]])
    # It changes with its settings.
    other = dict(SHORT, objective="contrastive", generator="shapes")
    run(pretrain, workdir=tmp_path / "other", **other)
    body, changed = (
        finetuning.features_of(str(folder / "model.keras")).get_weights()
        for folder in (workdir, tmp_path / "other")
    )
    assert not any(map(np.array_equal, body, changed))


@pytest.fixture(scope="module")
def head_first(pretrained, run, tmp_path_factory):
    """The folder of a run whose last layer is trained first, its record, and all weights then."""
    workdir, bodies = tmp_path_factory.mktemp("head_first"), []
    fit = keras.Model.fit

    def spy(model, *args, **kwargs):
        fit(model, *args, **kwargs)
        bodies.append(model.get_weights())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "fit", spy)
        given = dict(HEAD_FIRST, init_from=str(pretrained[0]))
        return workdir, run(classify, workdir=workdir, **given)[0], bodies


@pytest.mark.slow
def test_the_last_layer_is_trained_first_then_all_and_on_one_account(pretrained, head_first):
    workdir, record, (head, every) = head_first
    start = weights_of(pretrained[0])
    same = [np.array_equal(a, b) for a, b in zip(start, head, strict=True)]
    assert same == [True] * (len(start) - 2) + [False] * 2
    assert not any(map(np.array_equal, start, every))
    assert all(map(np.array_equal, weights_of(workdir), every))
    assert (record["steps"], record["head_steps"]) == (6, 2)
    assert record["trained_parameters"] == record["parameters"] == 30_890
    probability = record["sampling_probability"]
    spent = tfdpx.accounting.epsilon(record["noise_multiplier"], probability, 6, 1e-5, "rdp")
    assert record["epsilon"] == pytest.approx(spent) and 2.99 < spent <= 3
    rows = [json.loads(line) for line in (workdir / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[0]["epsilon"] < rows[1]["epsilon"] < rows[2]["epsilon"] == record["epsilon"]


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_that_is_killed_in_each_phase_goes_on(pretrained, head_first, run, tmp_path):
    given = dict(HEAD_FIRST, init_from=str(pretrained[0]), workdir=tmp_path / "run")
    save = tfdpx.callbacks.Checkpoint.on_epoch_end

    def save_and_die(self, *args):
        save(self, *args)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfdpx.callbacks.Checkpoint, "on_epoch_end", save_and_die)
        for resume in (False, True):  # After the last layer's epoch; after the first of all layers.
            with pytest.raises(Killed):
                run(classify, resume=resume, **given)
    record, _ = run(classify, resume=True, **given)
    assert (record["steps"], record["epsilon"]) == (6, head_first[1]["epsilon"])
    for a, b in zip(weights_of(head_first[0]), weights_of(tmp_path / "run"), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_what_a_model_has_spent_on_the_data_counts(head_first, run, tmp_path):
    # What the file says goes before what the user says.
    again = dict(HEAD_FIRST, init_from=str(head_first[0]), init_data="mnist")
    both, _ = run(classify, workdir=tmp_path / "both", **again)
    assert both["epsilon"] > 1.1 * head_first[1]["epsilon"] and both["steps"] == 6
    # Also behind a pre-training on drawings.
    run(pretrain, workdir=tmp_path / "on", init_from=str(head_first[0]), **SHORT)
    seen = provenance.seen_by([tmp_path / "on" / "model.keras"])
    spent = provenance.on_same_data(seen, "digits")
    assert spent.steps == 6
    assert spent.epsilon(1e-5, "rdp") == pytest.approx(head_first[1]["epsilon"])
