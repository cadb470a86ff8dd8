"""Pre-training, then private fine-tuning from its file, end to end."""

import keras
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from interrupting import ctrl_c_after

from tfdpx.accounting import record as records
from tfdpx.train import classify, pretrain

SHORT = dict(dataset="digits:0-4", steps=25, report_every=10, seed=3, warmup_steps=5)


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["pretrain"])


@pytest.fixture(scope="module")
def data_dir(finished_runs):
    return finished_runs.data_dir


def run(binary, data_dir, workdir, **given):
    with flagsaver.flagsaver(data_dir=data_dir, workdir=str(workdir), **given):
        binary.main(["binary"])
    return records.plain(records.read(workdir / "record.json").view())


@pytest.fixture(scope="module")
def finished(data_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("pretrained")
    given = dict(SHORT, augment_padding=1)
    return workdir, run(pretrain, data_dir, workdir, **given)


@pytest.mark.slow
def test_the_report_is_plainly_not_private(finished):
    _, record = finished
    assert record["private"] is False and record["epsilon"] == "inf"
    assert (record["steps"], record["num_examples"]) == (25, 721)
    assert record["test_accuracy"] > 0.6  # Chance is 0.2.


@pytest.mark.slow
def test_ctrl_c_ends_pretraining_in_a_line_and_the_folder_alone_resumes(
    finished, data_dir, tmp_path, capsys
):
    with pytest.raises(SystemExit) as error, ctrl_c_after(13):
        run(pretrain, data_dir, tmp_path / "run", **dict(SHORT, augment_padding=1))
    assert error.value.code == 130
    told = capsys.readouterr().err.splitlines()[-1]
    assert "pretrain: interrupted at update 13; nothing is lost. Go on: " in told
    with pytest.raises(SystemExit, match="began with steps=25. Received: steps=30"):
        run(pretrain, data_dir, tmp_path / "run", resume=True, steps=30)
    with flagsaver.flagsaver(workdir=str(tmp_path / "run"), resume=True):
        pretrain.main(["pretrain"])
    whole, resumed = (
        keras.saving.load_model(folder / "model.keras").get_weights()
        for folder in (finished[0], tmp_path / "run")
    )
    for a, b in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_classify_goes_on_from_the_file(finished, data_dir, tmp_path):
    record = run(
        classify,
        data_dir,
        tmp_path / "run",
        dataset="digits:5-9",
        model="small_cnn",
        init_from=str(finished[0] / "model.keras"),
        trainable="last",
        batch_size=256,
        steps=3,
        epsilon=2.0,
        accountant="rdp",
    )
    assert record["dataset"] == "sklearn_digits:5-9" and record["num_examples"] == 716
    assert record["trained_parameters"] == 1_285 and record["parameters"] == 29_605
    assert record["private"] is True and 1.9 < record["epsilon"] <= 2
    fresh, tuned = (
        keras.saving.load_model(folder / "model.keras").get_weights()
        for folder in (finished[0], tmp_path / "run")
    )
    assert all(map(np.array_equal, fresh[:-2], tuned[:-2]))


@pytest.mark.slow
def test_errors_of_the_user_are_one_line(data_dir, tmp_path):
    for given, message in [
        (dict(recipe="imagenet"), "no recipe"),
        (dict(epsilon=2.0), "not private.*--epsilon"),
        (dict(schedule="step", decay_steps=["a"]), "--decay_steps=a"),
        (dict(batch_size=5000), "`batch_size` must lie"),
        (dict(model="resnet"), "no model 'resnet'"),
        (dict(augment_padding=8), "smaller than the image"),
    ]:
        with pytest.raises(SystemExit, match=message) as error:
            run(pretrain, data_dir, tmp_path / "run", **given)
        assert "\n" not in error.value.code
