"""The binary from end to end: its files, resumes, releases and refusals."""

import json
import re
import shutil
import sys

import keras
import numpy as np
import pytest
from absl.testing import flagsaver
from finished_runs import NETWORK
from interrupting import ctrl_c_after
from sklearn import metrics
from tensorboard.backend.event_processing import event_accumulator

import tfdpx
from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.accounting.record import DatasetId
from tfdpx.report import report
from tfdpx.train import classify
from tfdpx.train.data import identity, images


def recorded(workdir):
    return records.plain(records.read(workdir / "record.json").view())


@pytest.fixture(scope="module")
def finished(finished_runs):
    return finished_runs("network")


def test_last_line_is_one_strict_json_object_equal_to_the_report(finished):
    workdir, output = finished
    record = json.loads(output.splitlines()[-1], parse_constant=pytest.fail)
    assert record == {**recorded(workdir), "workdir": str(workdir)}
    assert (record["steps"], record["batch_size"], record["seeded"]) == (6, 64, True)
    assert 0 <= record["test_accuracy"] <= 1 and "validation_accuracy" not in record
    assert (record["parameters"], record["num_examples"]) == (30_890, 1437)
    assert record["seconds"] > 0
    assert record["sampling_probability"] == pytest.approx(64 / 1437)
    spent = (record["noise_multiplier"], 64 / 1437, 6, record["delta"], record["accountant"])
    assert record["epsilon"] == pytest.approx(tfdpx.accounting.epsilon(*spent))
    assert 2.97 < record["epsilon"] <= 3.0
    rows = [json.loads(line) for line in (finished.workdir / "curve.jsonl").open()]
    assert [row["step"] for row in rows] == [4, 6]
    assert rows[0]["epsilon"] < rows[1]["epsilon"] == record["epsilon"]
    assert rows[1]["accuracy"] == pytest.approx(record["test_accuracy"])


def test_saved_model_is_the_averaged_one_that_was_measured(finished, finished_runs):
    workdir = finished.workdir
    model, record = keras.saving.load_model(workdir / "model.keras"), recorded(workdir)
    data = images.load("digits", finished_runs.data_dir)

    def accuracy():
        predictions = model.predict(data.eval_x, verbose=0).argmax(axis=-1)
        return np.mean(predictions == data.eval_y)

    assert accuracy() == record["test_accuracy"]
    logits = model.predict(data.eval_x, verbose=0)
    top5 = metrics.top_k_accuracy_score(data.eval_y, logits, k=5)
    assert record["top5_accuracy"] == pytest.approx(top5)
    with np.load(workdir.parent / "weights_before_averaging.npz") as raw:
        assert not any(map(np.array_equal, model.get_weights(), raw.values()))


def test_pictures_and_statement_are_written_and_nothing_secret_remains(finished):
    workdir, output = finished
    assert not (workdir / "checkpoint").exists()
    assert not keras.saving.load_model(workdir / "model.keras").compiled
    for name in ("learning_curve.png", "confusion_matrix.png", "wrong_predictions.png"):
        content = (workdir / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    statement = (workdir / "privacy_statement.txt").read_text()
    assert "6 noisy updates" in " ".join(statement.split()) and statement in output


def test_tensorboard_shows_what_the_guarantee_covers_and_no_more(finished):
    tags = {}
    for folder in (finished.workdir / "tensorboard").iterdir():
        events = event_accumulator.EventAccumulator(str(folder)).Reload()
        tags[folder.name] = set(events.Tags()["tensors"])
    names = ("noise_multiplier", "learning_rate", "privatized_gradient_norm")
    assert {"epsilon", *(f"epoch_{name}" for name in names)} <= tags["train"]
    assert not {"epoch_loss", "epoch_accuracy"} & tags["train"]
    assert "not_private" not in tags
    assert "epoch_accuracy" in tags["validation"]


def interrupt(folder):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_ctrl_c_ends_in_a_line_and_the_folder_alone_resumes(
    finished, run, refusal, tmp_path, capsys
):
    workdir = tmp_path / "my run"
    with pytest.raises(SystemExit) as error, ctrl_c_after(5):  # Within an epoch.
        run(classify, workdir=workdir, **NETWORK)
    assert error.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "tfdpx.train.classify: interrupted at update 5; nothing is lost. Go on: "
        f"{sys.orig_argv[0]} -m tfdpx.train.classify --workdir='{workdir}' --resume"
    )
    assert (workdir / "checkpoint").stat().st_mode & 0o077 == 0
    shutil.copytree(workdir / "checkpoint", tmp_path / "old")
    assert "--resume" in refusal(classify, workdir=workdir, **NETWORK)
    for arguments, message in [
        (dict(l2_norm_clip=0.5, **NETWORK), "l2_norm_clip"),
        (dict(epsilon=1.0), "began with epsilon=3.0. Received: epsilon=1.0. Leave the flag"),
        (dict(preset="table12/eps8"), "preset=digits. Received: preset=table12/eps8"),
    ]:
        assert message in refusal(classify, workdir=workdir, resume=True, **arguments)
    with pytest.MonkeyPatch.context() as patch:  # Another folder of the same size and classes.
        patch.setattr(identity, "of", lambda name: DatasetId("sklearn_digits", None, "another"))
        assert "began with data=sklearn_digits" in refusal(classify, workdir=workdir, resume=True)
    # As a user does, without other flags, not even for the data. The seed is in no file; with it
    # the run equals the uninterrupted one. It also resumes if it ends between record and page.
    with flagsaver.flagsaver(workdir=str(workdir), resume=True, seed=3):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(report, "write_page", interrupt)
            classify.main(["classify"])
        assert "Resumed at update 5." in capsys.readouterr().out
        assert (workdir / "record.json").exists() and not (workdir / "report.html").exists()
        classify.main(["classify"])
    assert (workdir / "report.html").exists() and not (workdir / "checkpoint").exists()
    assert (workdir / "curve.jsonl").read_text() == (finished.workdir / "curve.jsonl").read_text()
    whole, resumed = (
        keras.saving.load_model(folder / "model.keras").get_weights()
        for folder in (finished.workdir, workdir)
    )
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert recorded(workdir)["epsilon"] == recorded(finished.workdir)["epsilon"]
    # An old checkpoint in the folder of a finished run makes updates again, and all count.
    shutil.copytree(tmp_path / "old", workdir / "checkpoint")
    with flagsaver.flagsaver(workdir=str(workdir), resume=True):
        classify.main(["classify"])
    assert recorded(workdir)["epsilon"] > recorded(finished.workdir)["epsilon"]


OUT_OF_RANGE = [
    ("epsilon", 0.0), ("epsilon", float("inf")), ("delta", 1.0), ("noise_multiplier", -0.1),
    ("learning_rate", 0.0), ("l2_norm_clip", -1.0), ("l2_norm_clip", float("inf")),
    ("ema_momentum", -0.1), ("validation", 2.5), ("image_size", 0), ("steps", 0),
    ("batch_size", 0), ("microbatch_size", 0), ("report_every", 0), ("augmult", -1),
    ("seed", -1), ("head_steps", -1),
    ("trainable", "first"), ("eval_split", "train"),
]  # fmt: skip
ERRORS = [
    *((dict([pair]), "--{}={}".format(*pair)) for pair in OUT_OF_RANGE),
    (dict(preset="../digits"), "Use one of: .*digits"),
    (dict(preset="table12/eps5"), r"table12/\(eps1\|eps2"),
    (dict(preset="table12/esp8"), "Did you mean 'table12/eps8'?"),
    (dict(dataset="cifar01", dry_run=True), "Did you mean 'cifar10'?"),
    (dict(model="wrn-16-4", dry_run=True), "Did you mean 'wrn_16_4'?"),
    (dict(dataset="mnits"), "no data set 'mnits'.*digits, mnist"),
    (dict(dataset="mnist"), "not prepared.*--download"),
    (dict(dataset="digits:3-3"), "digits:3-3"),
    (dict(model="wrn_17_4"), "Argument `depth`"),
    (dict(model="lenet"), "Argument `input_shape`"),
    (dict(batch_size=5000), "Argument `batch_size`.*num_examples"),
    (dict(noise_multiplier=1.0, epsilon=1.0, steps=5, batch_size=5), "Exactly one of --"),
    (dict(validation=0.0001), "--validation=0.0001"),
    (dict(eval_split="validation"), "--validation=0.0"),
    (dict(init_from="model.keras"), "--init_from=model.keras, which does not exist"),
    (dict(preset="table16/eps1"), "trained on 'imagenet32': name its file with --init_from"),
    (dict(trainable="last"), "--init_from"),
    (dict(private=False, epsilon=1.0), "--private=false.*--epsilon=1.0"),
    (dict(augmult=2, augment="RandomCropFlip:padding=8"), "smaller than the image.*padding=8"),
    (dict(augmult=4), "--augmult"),
    (dict(augment="RandomFlip+MixViews:mixed_views=3", augmult=4), "2 of the `augmult` views"),
    (dict(head_steps=200), "--head_steps must lie below.* 200. .*--head_steps=200"),
    (dict(head_learning_rate=1.0), "--head_learning_rate has no effect without --head_steps"),
    (dict(head_steps=1, trainable="last", init_from="x"), "out --trainable=last"),
    (dict(individual=True, private=False), "needs a private run"),
    (dict(individual=True, sampling="shuffle"), "Poisson sampling"),
    (dict(individual_release=3.0), "no effect without --individual"),
    (dict(features="scatter", model="small_cnn"), "takes the place of --model"),
    (dict(public_test=True, validation=0.1), "--public_test is about test images"),
    (
        dict(dataset="csv:x.csv", target="x", classes=["a"], target_lower=0.0, target_upper=1.0),
        "--classes is for labels",
    ),
    (dict(features="pixels"), r"must join 'scatter', \.keras files and working folders"),
    (dict(model="linear_on_features"), "--model=linear_on_features needs --features"),
    (dict(user="parent_folder"), "--user belong to --dataset=folder"),
    (dict(dataset="/etc"), "kind of data before a path: write --dataset=folder:/etc. Received"),
    (dict(dataset="/etc/hostname"), "write --dataset=csv:/etc/hostname. Received"),
    (dict(resume=True), "no unfinished run in --workdir=.*Name the folder of one"),
]


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(refusal, tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in ERRORS:
        line = refusal(classify, workdir=tmp_path / "run", **arguments)
        assert re.search(message, line), (arguments, line)
        assert [path.name for path in tmp_path.iterdir()] == ["file"]  # Nothing is left.
    line = refusal(classify, workdir=tmp_path / "file" / "run")
    assert re.search("Cannot write to --workdir=.*file/run", line)


def test_one_program_at_a_time_writes_to_a_folder(refusal, tmp_path):
    with files.locked(tmp_path):
        for arguments in (
            {},
            {"head": "least_squares"},
            {"dataset": "csv:missing.csv", "target": "x"},
        ):
            assert "Another run writes to the folder" in refusal(
                classify, workdir=tmp_path, **arguments
            )


def test_a_run_is_not_overwritten_and_folders_that_were_there_stay(finished, refusal, tmp_path):
    before = (finished.workdir / "model.keras").read_bytes()
    assert "finished run" in refusal(classify, workdir=finished.workdir, **NETWORK)
    assert (finished.workdir / "model.keras").read_bytes() == before
    refusal(classify, workdir=tmp_path, model="wrn_17_4")
    assert tmp_path.exists()


def test_dry_run_prints_one_json_object_and_makes_no_folder(run, tmp_path):
    arguments = dict(workdir=tmp_path / "run", dry_run=True)
    assert run(classify, **arguments)[0]["steps"] == 200
    record = run(classify, **arguments, preset="table12/eps8")[0]
    assert (record["num_examples"], record["image_height"]) == (45_000, 32)
    assert not any(tmp_path.iterdir())
