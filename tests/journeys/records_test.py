"""A privacy officer asks what runs have spent: by the files that programs left, and no other."""

import json
import shutil

import keras
import numpy as np
import own_images
import pytest
from absl import flags
from absl.testing import flagsaver
from finished_runs import TINY

import tfdpx
from experiments.heads import search as head_search
from tfdpx.accounting import record as records
from tfdpx.train import account, adamix, classify, features


@pytest.fixture(scope="module", autouse=True)
def parsed_flags(finished_runs):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])
    with flagsaver.flagsaver(data_dir=finished_runs.data_dir):
        yield


def run(binary, workdir, **given):
    with flagsaver.flagsaver(workdir=str(workdir), **given):
        binary.main(["binary"])
    return workdir


def run_with(binary, folder, capsys, **given):
    """What a binary with flags of its own prints on its last line."""
    values = flags.FlagValues()
    binary.define_flags(values)
    values.mark_as_parsed()
    for name, value in given.items():
        setattr(values, name, value)
    capsys.readouterr()
    with flagsaver.flagsaver(workdir=folder and str(folder)):
        binary.main(["binary"], values)
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def ask(capsys, *paths, **given):
    return run_with(account, None, capsys, workdir=[str(path) for path in paths], **given)


@pytest.fixture(scope="module")
def private(finished_runs):
    return finished_runs("private").workdir


@pytest.fixture(scope="module")
def public(finished_runs):
    """A backbone that saw the digits without privacy."""
    return finished_runs("public").workdir


@pytest.mark.slow
def test_a_folder_of_runs_and_a_model_of_ones_own_give_one_statement(private, capsys, tmp_path):
    own = keras.Sequential([keras.Input([8, 8, 1]), keras.layers.Flatten(), keras.layers.Dense(3)])
    plan = tfdpx.PrivacyPlan(100, batch_size=20, steps=5, noise_multiplier=2.0, delta=1e-5)
    own.compile(optimizer=tfdpx.DPSGD(0.1, plan=plan), loss="mse")
    own.fit(plan.batches(np.zeros([100, 8, 8, 1]), np.zeros([100, 3])), verbose=0)
    own.save(tmp_path / "own.keras")
    found = ask(capsys, private.parent, tmp_path / "own.keras")
    spent = records.read(private / "record.json").ledger + own.optimizer.ledger
    assert found["epsilon"] == pytest.approx(spent.epsilon(1e-5), rel=1e-6)
    assert (found["runs"], found["steps"], found["releasable"]) == (2, 8, True)
    again = ask(capsys, private.parent, private, private / "model.keras", tmp_path / "own.keras")
    assert again["epsilon"] == found["epsilon"]


@pytest.mark.slow
def test_a_seed_is_remembered(private, finished_runs, capsys):
    seeded = finished_runs("network").workdir
    for paths in ([seeded], [seeded / "model.keras"], [private, seeded]):
        assert ask(capsys, *paths)["releasable"] is False
    for paths in ([private], [private / "model.keras"]):
        assert ask(capsys, *paths)["releasable"] is True


@pytest.mark.slow
def test_a_head_on_a_private_backbone_pays_for_both(private, finished_runs, capsys, tmp_path):
    finished = finished_runs("head")
    found = json.loads(finished.output.splitlines()[-1])
    shutil.copytree(finished.workdir, tmp_path / "heads")
    head = records.read(tmp_path / "heads/head-001/record.json")
    backbone = records.read(private / "record.json").ledger
    assert {entry.run for entry in backbone.entries} < {entry.run for entry in head.ledger.entries}
    assert 2.0 < found["epsilon"] < 3.0
    assert ask(capsys, private, tmp_path / "heads")["epsilon"] == pytest.approx(found["epsilon"])
    text = (tmp_path / "heads/head-001/privacy_statement.txt").read_text()
    assert "on these too, which epsilon covers" in " ".join(text.split())
    given = ["--method=dp_ls", "--epsilon=1", "--private_tuning=2"]
    head_search.main([f"--workdir={tmp_path / 'heads'}", *given])
    second = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert second["epsilon"] > 2.9 and second["num_held_out"] + second["num_fitted"] == 1437
    assert ask(capsys, tmp_path / "heads")["epsilon"] > second["epsilon"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "binary, given", [(features, {"dataset": "digits"}), (adamix, {"dataset": "digits:0-4"})]
)
def test_a_backbone_that_saw_the_images_without_privacy_is_refused(
    public, capsys, tmp_path, binary, given
):
    with pytest.raises(SystemExit, match="trained on sklearn_digits already, without an account"):
        run_with(binary, tmp_path / "w", capsys, init_from=str(public / "model.keras"), **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_that_were_trained_on_privately_are_recorded_together(private, capsys, tmp_path):
    run(classify, tmp_path / "on", **TINY, init_from=str(private / "model.keras"))
    first, both = (records.read(path / "record.json") for path in (private, tmp_path / "on"))
    assert both.ledger.steps == 6 and both.epsilon > 1.1 * first.epsilon
    assert ask(capsys, private, tmp_path)["epsilon"] == pytest.approx(both.epsilon, rel=1e-6)
    # And on from that: each of the runs counts once, and what was shuffled stays shuffled.
    given = dict(TINY, init_from=str(tmp_path / "on" / "model.keras"))
    run(classify, tmp_path / "third", **given, sampling="shuffle")
    third = records.read(tmp_path / "third" / "record.json")
    assert third.ledger.steps == 9 and third.epsilon > both.epsilon
    assert ask(capsys, tmp_path / "third")["neighbours"] == "zero_out"
    given = dict(TINY, init_from=str(tmp_path / "third" / "model.keras"))
    run(classify, tmp_path / "fourth", **given)
    found = ask(capsys, tmp_path / "fourth")
    assert found["neighbours"] == "zero_out" and found["epsilon"] > third.epsilon


def test_a_folder_is_asked_whole(private, public, capsys, tmp_path):
    (tmp_path / "linked").symlink_to(private)
    found = ask(capsys, tmp_path)
    assert (found["runs"], found["epsilon"]) == (1, ask(capsys, private)["epsilon"])
    shutil.copy(private / "record.json", tmp_path / "alice.json")
    assert ask(capsys, tmp_path / "alice.json")["epsilon"] == found["epsilon"]
    shutil.copy(public / "model.keras", tmp_path / "own.keras")
    assert ask(capsys, tmp_path)["epsilon"] == "inf"
    # Keras saves it without its record: nobody knows then.
    keras.saving.load_model(private / "model.keras").save(tmp_path / "own.keras")
    with pytest.raises(SystemExit, match="nobody knows what its weights have spent"):
        ask(capsys, tmp_path)


@pytest.mark.slow
def test_trainings_behind_weights_count_where_the_data_are_the_same(private, capsys, tmp_path):
    more = dict(TINY, noise_multiplier=0.6)
    first = run(classify, tmp_path / "first", **more, dataset="digits:0-4")
    init = str(first / "model.keras")
    second = run(classify, tmp_path / "second", **TINY, dataset="digits:5-9", init_from=init)
    alone = records.read(second / "record.json").epsilon
    assert ask(capsys, second)["epsilon"] == alone
    both = records.read(first / "record.json").epsilon
    assert alone < both < ask(capsys, private, second)["epsilon"]


@pytest.mark.slow
def test_names_that_look_like_markup_or_formulas(tmp_path):
    own_images.write(tmp_path / "photos", {5: 20, 8: 20}, size=8)
    for digit, name in (("5", "$5_$10"), ("8", "[b]")):
        (tmp_path / "photos" / digit).rename(tmp_path / "photos" / name)
    given = dict(dataset=f"folder:{tmp_path / 'photos'}", steps=2, noise_multiplier=2.0)
    workdir = run(classify, tmp_path / "w[/a]", **given)
    assert records.read(workdir / "record.json").inputs["class_names"] == ["$5_$10", "[b]"]
    assert (workdir / "confusion_matrix.png").stat().st_size > 5000


@pytest.mark.slow
def test_the_record_is_there_before_the_pictures(tmp_path, monkeypatch):
    class Full(Exception):
        pass

    def fail(*args, **kwargs):
        raise Full

    monkeypatch.setattr("tfdpx.train.report.pictures.confusion_matrix", fail)
    with pytest.raises(Full):
        run(classify, tmp_path / "run", **TINY)
    for name in ("record.json", "model.keras"):
        assert records.read(tmp_path / "run" / name).epsilon > 0
    assert (tmp_path / "run" / "privacy_statement.txt").exists()
