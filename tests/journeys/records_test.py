"""A privacy officer asks how much runs have spent, from the files of the programs."""

import json
import shutil

import keras
import numpy as np
import own_images
import pytest
from finished_runs import TINY

import tfdpx
from experiments.heads import search as head_search
from tfdpx.accounting import record as records
from tfdpx.report import pictures
from tfdpx.train import account, classify


@pytest.fixture
def ask(run):
    """A function from paths to the privacy that their runs have spent."""
    return lambda *paths: run(account, workdir=list(paths))[0]


@pytest.fixture(scope="module")
def private(finished_runs):
    return finished_runs("private").workdir


@pytest.fixture(scope="module")
def public(finished_runs):
    """A backbone that saw the digits without privacy."""
    return finished_runs("public").workdir


def ledger_of(workdir):
    return records.read(workdir / "record.json").ledger


@pytest.mark.slow
def test_a_folder_of_runs_and_a_model_of_ones_own_give_one_statement(private, ask, tmp_path):
    model = keras.Sequential(
        [keras.Input([8, 8, 1]), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    plan = tfdpx.PrivacyPlan(100, batch_size=20, steps=5, noise_multiplier=2.0, delta=1e-5)
    model.compile(optimizer=tfdpx.DPSGD(0.1, plan=plan), loss="mse")
    model.fit(plan.batches(np.zeros([100, 8, 8, 1]), np.zeros([100, 3])), verbose=0)
    model.save(tmp_path / "own.keras")
    answer = ask(private.parent, tmp_path / "own.keras")
    spent = ledger_of(private) + model.optimizer.ledger
    assert answer["epsilon"] == pytest.approx(spent.epsilon(1e-5), rel=1e-6)
    assert (answer["runs"], answer["steps"], answer["releasable"]) == (2, 8, True)
    again = ask(private.parent, private, private / "model.keras", tmp_path / "own.keras")
    assert again["epsilon"] == answer["epsilon"]


@pytest.mark.slow
def test_a_head_on_a_private_backbone_pays_for_both(private, finished_runs, ask, capsys, tmp_path):
    finished = finished_runs("head")
    record = json.loads(finished.output.splitlines()[-1])
    heads = tmp_path / "heads"
    shutil.copytree(finished.workdir, heads / "first")
    assert 2.0 < record["epsilon"] < 3.0
    assert ask(private, heads)["epsilon"] == pytest.approx(record["epsilon"])
    text = (heads / "first" / "privacy_statement.txt").read_text()
    assert "the same data, and epsilon covers both" in " ".join(text.split())
    search = [f"--workdir={heads / 'second'}", "--dataset=digits", f"--init_from={private}"]
    head_search.main([*search, "--method=dp_ls", "--epsilon=1", "--private_tuning=2"])
    second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert second["epsilon"] > 2.9 and second["num_held_out"] + second["num_fitted"] == 1437
    assert ask(heads)["epsilon"] > second["epsilon"]


@pytest.mark.slow
def test_weights_that_were_trained_on_privately_are_recorded_together(private, run, ask, tmp_path):
    both, _ = run(classify, workdir=tmp_path / "on", **TINY, init_from=str(private))
    assert both["epsilon"] > 1.1 * ask(private)["epsilon"]
    assert ledger_of(tmp_path / "on").steps == 6
    assert ask(private, tmp_path)["epsilon"] == pytest.approx(both["epsilon"], rel=1e-6)
    # A third run continues from that one: each of the runs counts once.
    arguments = dict(TINY, init_from=str(tmp_path / "on"), sampling="shuffle")
    third, _ = run(classify, workdir=tmp_path / "third", **arguments)
    assert ledger_of(tmp_path / "third").steps == 9 and third["epsilon"] > both["epsilon"]
    assert ask(tmp_path / "third")["neighbours"] == "zero_out"


@pytest.mark.slow
def test_a_folder_is_asked_whole(private, public, ask, refusal, tmp_path):
    (tmp_path / "linked").symlink_to(private)
    answer = ask(tmp_path)
    assert (answer["runs"], answer["epsilon"]) == (1, ask(private)["epsilon"])
    shutil.copy(private / "record.json", tmp_path / "alice.json")
    assert ask(tmp_path / "alice.json")["epsilon"] == answer["epsilon"]
    shutil.copy(public / "model.keras", tmp_path / "own.keras")
    assert ask(tmp_path)["epsilon"] == "inf"
    # Keras saves the file without its record, so its history is unknown.
    keras.saving.load_model(private / "model.keras").save(tmp_path / "own.keras")
    answer = ask(tmp_path)
    assert answer["releasable"] is False and answer["not_read"] == [str(tmp_path / "own.keras")]
    message = refusal(account, workdir=tmp_path / "own.keras")
    assert "what its weights have spent is unknown" in message


@pytest.mark.slow
def test_names_like_markup_and_a_record_before_the_pictures(run, tmp_path, monkeypatch):
    own_images.write(tmp_path / "photos", {5: 20, 8: 20}, size=8)
    for digit, name in (("5", "$5_$10"), ("8", "[b]")):
        (tmp_path / "photos" / digit).rename(tmp_path / "photos" / name)
    arguments = dict(dataset=f"folder:{tmp_path / 'photos'}", steps=2, noise_multiplier=2.0)
    workdir = tmp_path / "w[/a]"
    run(classify, workdir=workdir, **arguments)
    assert records.read(workdir / "record.json").inputs["class_names"] == ["$5_$10", "[b]"]
    assert (workdir / "confusion_matrix.png").stat().st_size > 5000

    def fail(*args, **kwargs):
        raise RecursionError

    monkeypatch.setattr(pictures, "confusion_matrix", fail)
    with pytest.raises(RecursionError):
        run(classify, workdir=tmp_path / "run", **arguments)
    for name in ("record.json", "model.keras"):
        assert records.read(tmp_path / "run" / name).epsilon > 0
    assert (tmp_path / "run" / "privacy_statement.txt").exists()
