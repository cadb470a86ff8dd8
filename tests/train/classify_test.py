"""The binary from end to end: what it writes, resumes, releases and refuses."""

import dataclasses
import io
import json
import zipfile

import h5py
import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from finished_runs import NETWORK
from interrupting import ctrl_c_after
from tensorboard.backend.event_processing import event_accumulator

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.train import classify
from tfdpx.train.config import preset_lookup, setting_flags
from tfdpx.train.config.training import Training
from tfdpx.train.data import loading


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


@pytest.fixture(scope="module")
def finished(finished_runs):
    """A finished run: its folder, its standard output and its weights before averaging."""
    workdir, output = finished_runs("network")
    with np.load(workdir.parent / "weights_before_averaging.npz") as weights:
        return workdir, output, list(weights.values())


def test_last_line_is_one_strict_json_object_equal_to_the_report(finished):
    workdir, output, _ = finished
    refuse = pytest.fail  # JSON has no NaN and no Infinity, though Python reads them.
    record = json.loads(output.splitlines()[-1], parse_constant=refuse)
    assert record == {
        **records.plain(records.read(workdir / "record.json").view()),
        "workdir": str(workdir),
    }
    assert record["workdir"] == str(workdir)
    assert (record["steps"], record["batch_size"], record["seeded"]) == (6, 64, True)
    assert 0 <= record["test_accuracy"] <= 1 and record["validation_accuracy"] is None
    assert record["parameters"] == 30_890
    assert record["seconds"] > 0


@pytest.mark.slow
def test_epsilon_is_that_of_the_accountant_for_the_noise_that_was_used(finished):
    record = records.plain(records.read(finished[0] / "record.json").view())
    assert record["num_examples"] == 1437
    assert record["sampling_probability"] == pytest.approx(64 / 1437)
    assert record["epsilon"] == pytest.approx(
        tfdpx.accounting.epsilon(
            record["noise_multiplier"], 64 / 1437, 6, record["delta"], record["accountant"]
        )
    )
    assert 7.9 < record["epsilon"] <= 8.0


def test_curve_counts_updates_and_ends_at_the_report(finished):
    workdir, _, _ = finished
    record = records.plain(records.read(workdir / "record.json").view())
    rows = [json.loads(line) for line in (workdir / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 6]
    assert rows[0]["epsilon"] < rows[1]["epsilon"] == record["epsilon"]
    assert rows[1]["accuracy"] == pytest.approx(record["test_accuracy"])


def test_saved_model_is_the_averaged_one_that_was_measured(finished, data_dir):
    workdir, _, raw = finished
    model = keras.saving.load_model(workdir / "model.keras")
    data = loading.load("digits", data_dir)
    predictions = np.argmax(model.predict(data.eval_x, verbose=0), axis=-1)
    record = records.plain(records.read(workdir / "record.json").view())
    assert np.mean(predictions == data.eval_y) == record["test_accuracy"]
    assert not any(np.array_equal(a, b) for a, b in zip(model.get_weights(), raw, strict=True))


@pytest.mark.slow
def test_what_is_open_is_chosen_and_the_saved_model_is_whole(data_dir, tmp_path, capsys):
    run(data_dir, tmp_path, epsilon=1.0, seed=0)
    output = capsys.readouterr().out
    assert "Chosen for 1,437 images: --model=scatter_linear --batch_size=1437 --steps=10" in output
    record = json.loads(output.splitlines()[-1])
    assert record["model"] == "scatter_linear" and record["sampling_probability"] == 1.0
    assert (record["parameters"], record["trained_parameters"]) == (20_827, 12_970)
    model = keras.saving.load_model(tmp_path / "model.keras")
    data = loading.load("digits", data_dir)
    predictions = np.argmax(model.predict(data.eval_x, verbose=0), axis=-1)
    assert np.mean(predictions == data.eval_y) == record["test_accuracy"] > 0.9


def test_saved_model_holds_no_optimizer_and_nothing_secret_remains(finished):
    workdir, _, _ = finished
    with zipfile.ZipFile(workdir / "model.keras") as archive:
        assert not json.loads(archive.read("config.json")).get("compile_config")
        with h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as weights:
            assert "optimizer" not in weights
    assert not (workdir / "checkpoint").exists()


def test_pictures_and_statement_are_written(finished):
    workdir, output, _ = finished
    for name in ("learning_curve.png", "confusion_matrix.png"):
        content = (workdir / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 10_000
    statement = (workdir / "privacy_statement.txt").read_text()
    assert "6 noisy updates" in " ".join(statement.split()) and statement in output


def test_tensorboard_shows_what_the_guarantee_covers_and_no_more(finished):
    tags = {}
    for folder in (finished[0] / "tensorboard").iterdir():
        events = event_accumulator.EventAccumulator(str(folder)).Reload()
        tags[folder.name] = set(events.Tags()["tensors"])
    assert {
        "epoch_epsilon",
        "epoch_noise_multiplier",
        "epoch_learning_rate",
        "epoch_privatized_gradient_norm",
    } <= tags["train"]
    assert not {"epoch_loss", "epoch_accuracy"} & tags["train"]
    assert "not_private" not in tags
    assert "epoch_accuracy" in tags["validation"]
    assert tags["pictures"] == {"learning_curve", "confusion_matrix"}


def test_finished_run_is_not_overwritten(finished, data_dir):
    before = (finished[0] / "model.keras").read_bytes()
    with pytest.raises(SystemExit, match="finished run"):
        run(data_dir, finished[0], **NETWORK)
    assert (finished[0] / "model.keras").read_bytes() == before


def resume(workdir, **given):
    with flagsaver.flagsaver(workdir=str(workdir), resume=True, **given):
        classify.main(["classify"])


@pytest.mark.slow
def test_ctrl_c_ends_in_a_line_and_the_folder_alone_resumes(finished, data_dir, tmp_path, capsys):
    workdir = tmp_path / "my run"
    with pytest.raises(SystemExit) as error, ctrl_c_after(5):  # Within an epoch.
        run(data_dir, workdir, **NETWORK)
    assert error.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "tfdpx.train.classify: interrupted at update 5; nothing is lost. Go on: "
        f"python -m tfdpx.train.classify --workdir='{workdir}' --resume"
    )
    with pytest.raises(SystemExit, match="--resume"):
        run(data_dir, workdir, **NETWORK)
    for given, message in [
        (dict(l2_norm_clip=0.5, **NETWORK), "l2_norm_clip"),
        (dict(epsilon=1.0), "began with epsilon=8.0. Received: epsilon=1.0. Leave the flag"),
        (dict(model="lenet"), "model=small_cnn. Received: model=lenet"),
        (dict(preset="table12/eps8"), "preset=digits. Received: preset=table12/eps8"),
    ]:
        with pytest.raises(SystemExit, match=message) as error:
            resume(workdir, **given)
        assert "\n" not in error.value.code
    resume(workdir, seed=3)  # It is in no file. With it, the run equals the uninterrupted one.
    assert (workdir / "curve.jsonl").read_text() == (finished[0] / "curve.jsonl").read_text()
    whole, resumed = (
        keras.saving.load_model(folder / "model.keras").get_weights()
        for folder in (finished[0], workdir)
    )
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(a, b)
    first, second = (records.read(f / "record.json") for f in (finished[0], workdir))
    assert first.epsilon == second.epsilon


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_and_a_head_makes_what_is_left(data_dir, tmp_path, capsys):
    given = dict(model="small_cnn", steps=5, head_steps=3, batch_size=16, ema_momentum=0.0)
    given |= dict(noise_multiplier=2.0)
    with pytest.raises(SystemExit) as error, ctrl_c_after(2):
        run(data_dir, tmp_path, **given)
    assert error.value.code == 130
    with pytest.raises(SystemExit) as error, ctrl_c_after(3, times=2):
        resume(tmp_path)
    assert error.value.code == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert "interrupted; what was saved is whole" in told and told.endswith("--resume")
    resume(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "curve.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 5]


def test_nothing_to_resume_is_said(tmp_path):
    with pytest.raises(SystemExit, match="no unfinished run in --workdir=.*Name the folder of one"):
        resume(tmp_path / "run")
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_without_noise_and_with_every_number_logged(data_dir, tmp_path, capsys):
    workdir = tmp_path / "run"
    short = dict(steps=1, batch_size=16, augmult=0, augment_padding=0, ema_momentum=0.0)
    given = dict(noise_multiplier=0.0, validation=0.2, optimizer="dpadam", log_private_metrics=True)
    with pytest.warns(UserWarning, match="no noise"):
        run(data_dir, workdir, **given, **short)
    record = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert record["epsilon"] == "inf"
    assert record["test_accuracy"] is None and 0 <= record["validation_accuracy"] <= 1
    assert record["num_examples"] == 1149
    assert (workdir / "tensorboard" / "not_private").is_dir()
    assert (workdir / "learning_curve.png").stat().st_size > 10_000


ERRORS = [
    (dict(epsilon=-1.0), "--epsilon=-1.0"),
    (dict(epsilon=0.0), "--epsilon=0.0"),
    (dict(delta=2.0), "--delta=2.0"),
    (dict(preset="mnits"), "no preset 'mnits'.*digits"),
    (dict(dataset="mnits"), "no data set 'mnits'.*digits, mnist"),
    (dict(dataset="mnist"), "not prepared.*--download"),
    (dict(model="resnet"), "no model 'resnet'.*small_cnn"),
    (dict(model="wrn_17_4"), "Argument `depth`"),
    (dict(model="lenet"), "Argument `input_shape`"),
    (dict(batch_size=5000), "Argument `batch_size`.*num_examples"),
    (dict(augmult=2, augment_padding=8), "smaller than the images.*--augment_padding=8"),
    (dict(augment_padding=1), "--augmult"),
    (dict(validation=0.0001), "--validation=0.0001"),
    (dict(noise_multiplier=1.0, epsilon=1.0, steps=5, batch_size=5), "Exactly one of --"),
    (dict(model="lenet", group_norm=False), "--group_norm.*--model=lenet"),
    (dict(final=True, validation=0.1), "--final --validation=0.1"),
    (dict(seconds_per_update=1.0), "--seconds_per_update=1.0 --dry_run=False"),
    (dict(seconds_per_update=-1.0, dry_run=True), "--seconds_per_update=-1.0"),
    (dict(init_from="model.keras"), "--init_from=model.keras, which does not exist"),
    (dict(pretrained_on="cifar100"), "trained on 'cifar100': name its file with --init_from"),
    (dict(preset="table16/eps1"), "trained on 'imagenet32'"),
    (dict(trainable="last"), "--trainable=last"),
    (dict(private=False, epsilon=1.0), "--private=false means no noise"),
    (dict(validation=1437.0), "--validation=1437"),
    (dict(dataset="digits:3-3"), "digits:3-3"),
]


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(data_dir, tmp_path):
    for given, message in ERRORS:
        with pytest.raises(SystemExit, match=message) as error:
            run(data_dir, tmp_path / "run", **given)
        assert "\n" not in error.value.code
        assert not any(path.is_file() for path in (tmp_path / "run").rglob("*"))


def test_final_trains_on_what_the_preset_holds_out():
    with flagsaver.flagsaver(final=True):
        settings = preset_lookup.resolve("table19/eps8", setting_flags.given())
    assert (settings.validation, settings.eval_split) == (0.0, "test")
    assert preset_lookup.resolve("table19/eps8", setting_flags.given()).validation == 0.1


def test_dry_run_prints_one_json_object_and_makes_no_folder(tmp_path, capsys):
    run(None, tmp_path / "run", dry_run=True, seconds_per_update=36.0)
    record = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert (record["steps"], record["estimated_hours"]) == (82, 0.82)
    assert not any(tmp_path.iterdir())


def test_workdir_that_cannot_be_written(data_dir, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="Cannot write to --workdir=.*file/run"):
        run(data_dir, tmp_path / "file" / "run")


def test_every_setting_has_a_flag_that_is_unset_by_default():
    for field in dataclasses.fields(Training):
        assert flags.FLAGS[field.name].default is None
