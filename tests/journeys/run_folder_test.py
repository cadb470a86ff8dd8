"""A privacy officer looks at the folder of a run, and tries calls that should be refused."""

import json
import shutil
import zipfile

import keras
import numpy as np
import own_images
import pytest
from finished_runs import SEED

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.report import measure, report
from tfdpx.train import account, classify, predict, start_from
from tfdpx.train.data import folder, images


@pytest.fixture(scope="module")
def photos(left, finished_runs):
    return finished_runs.photos


@pytest.fixture(scope="module")
def left(finished_runs):
    """The folder of a seeded run, and its output."""
    return finished_runs("photos")


def test_the_record_holds_everything(left, photos):
    workdir, printed = left
    described = json.loads((workdir / "record.json").read_text(), parse_constant=pytest.fail)
    report = records.read(workdir / "record.json").view()
    last_line = json.loads(printed.splitlines()[-1])
    assert last_line == {**report, "workdir": str(workdir)}
    assert records.read(workdir / "model.keras") == records.read(workdir / "record.json")
    assert (workdir / "record.json").read_text().count("\n") > 50  # It is indented.
    assert described["inputs"]["class_names"] == ["3", "5", "8"]
    assert described["inputs"]["image_shape"] == [8, 8, 1]
    assert report["num_examples"] + report["num_measured"] == 60
    assert report["num_examples"] > report["num_measured"] > 0
    assert described["data"]["identifier"] == (photos / ".tfdpx_identifier").read_text().strip()
    settings = described["settings"]
    assert settings["dataset"] == f"folder:{photos.name}"
    assert (settings["steps"], settings["model"]) == (4, "scatter_linear")
    assert {"l2_norm_clip", "learning_rate", "augmult", "ema_momentum", "test_seed"} <= set(
        settings
    )
    assert settings["learning_rate"] == report["learning_rate"] > 0
    [entry] = described["ledger"]["entries"]
    assert (entry["steps"], entry["poisson_sampled"]) == (4, True)
    assert entry["noise_multiplier"] == report["noise_multiplier"]
    assert {"python", "tensorflow", "keras", "dp-accounting"} <= set(described["versions"])
    assert described["date"].startswith("20")
    assert described["versions"]["tfdpx"] == tfdpx.__version__


def test_no_file_holds_the_seed_or_where_anything_lies(left, photos):
    workdir, printed = left
    texts = {}
    for path in workdir.rglob("*"):
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                texts |= {name: archive.read(name) for name in archive.namelist()}
        elif path.is_file():
            texts[path.name] = path.read_bytes()
    texts["printed"] = printed.encode()
    assert len(texts) > 8
    for name, text in texts.items():
        assert str(SEED).encode() not in text, name
        assert name == "printed" or str(photos.parent).encode() not in text, name
    assert b'"seed"' not in texts["record.json"] and b'"seeded": true' in texts["record.json"]


def test_the_page_is_made_of_the_folder_and_shows_no_private_image(left, tmp_path):
    workdir = shutil.copytree(left.workdir, tmp_path / "run")
    content = (workdir / "report.html").read_bytes()
    report.write_page(workdir)
    assert (workdir / "report.html").read_bytes() == content
    assert content.count(b"data:image/png") == 2 and b"Wrong predictions" not in content
    assert not (workdir / "wrong_predictions.png").exists()
    assert b"Do not release: the run had a seed" in content


def test_accuracy_while_training_is_nowhere_without_public_test(left):
    rows = [json.loads(line) for line in (left.workdir / "curve.jsonl").read_text().splitlines()]
    assert rows and all(set(row) == {"step", "epsilon"} for row in rows)
    assert not (left.workdir / "learning_curve.png").exists()
    assert not (left.workdir / "tensorboard" / "validation").exists()


def test_account_says_that_it_is_not_to_be_released(left, run):
    assert run(account, workdir=left.workdir)[0]["releasable"] is False


def test_the_statement_can_be_cited(left, photos):
    workdir, printed = left
    text = (workdir / "privacy_statement.txt").read_text()
    report = records.read(workdir / "record.json").view()
    assert text in printed and "NOT RELEASABLE" in text
    flat = " ".join(text.split())
    assert f"folder:{photos.name}" in flat and f"N = {report['num_examples']}" in flat
    assert "differ in one image, added or removed" in flat
    assert f"L2 norm of {report['l2_norm_clip']:g}" in flat
    assert "tensorflow-privacy" not in flat and "individual_PRIVATE" not in flat


@pytest.mark.slow
def test_the_model_knows_its_classes_and_images(left, photos, refusal, tmp_path):
    workdir, _ = left
    takes = start_from.image_input(workdir / "model.keras")
    assert (takes.image_shape, takes.class_names) == ([8, 8, 1], ["3", "5", "8"])
    # The files and the arrays of the training lead to the same predictions.
    model = keras.saving.load_model(workdir / "model.keras")
    data, records = images.load(f"folder:{photos}"), folder.read(photos).records("train")
    files = [photos / name for name in records.names]
    probabilities = measure.probabilities(predict.logits(model, takes, files))
    np.testing.assert_array_equal(records.labels(), data.train_y)
    expected = keras.ops.softmax(model.predict(data.train_x, verbose=0))
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5, atol=1e-7)
    # A file that Keras saved again has lost this information, and `predict` does not guess.
    model.save(tmp_path / "again.keras")
    message = refusal(predict, model=tmp_path / "again.keras", images=photos)
    assert "does not say which images it takes" in message


class Killed(Exception):
    pass


def kill(self, batch, logs=None):
    raise Killed


@pytest.fixture
def killed(run, monkeypatch):
    """Runs `classify` and kills it after its first update."""

    def start(**arguments):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(tfdpx.callbacks.TensorBoard, "on_train_batch_end", kill)
            run(classify, **arguments)

    return start


@pytest.mark.slow
def test_resume_names_what_is_another(killed, run, refusal, tmp_path):
    photos, workdir = tmp_path / "photos", tmp_path / "run"
    own_images.write(photos, {3: 20, 5: 20, 8: 20}, size=8)
    arguments = dict(dataset=f"folder:{photos}", noise_multiplier=2.0, batch_size=40, steps=4)
    arguments |= dict(seed=SEED, workdir=workdir)
    killed(**arguments)
    first, *remaining = (photos / name for name in folder.read(photos).records("train").names)
    content = first.read_bytes()

    def refused(message, **changed):
        line = refusal(classify, resume=True, **{**arguments, **changed})
        assert message in line and str(SEED) not in line

    refused("began with noise_multiplier=2.0. Received: noise_multiplier=1.0", noise_multiplier=1.0)
    first.unlink()
    count = len(remaining)
    refused(f"began with num_examples={count + 1}. Received: num_examples={count}")
    first.write_bytes(content)
    (photos / "8").rename(photos / "9")
    refused("class_names=['3', '5', '8']. Received: class_names=['3', '5', '9']")
    (photos / "9").rename(photos / "8")
    refused("test_seed", test_seed=1)
    # The folder alone says what it began with. After another kill it still knows its preset, which
    # is not the default one.
    killed(resume=True, workdir=workdir, seed=SEED)
    run(classify, resume=True, preset="folder", workdir=workdir, seed=SEED)
    assert (workdir / "record.json").exists()


SEEN = dict(dataset="digits", model="small_cnn", trainable="last", steps=1, batch_size=64)
SEEN |= dict(noise_multiplier=2.0)


@pytest.mark.slow
def test_resume_notices_another_file_to_start_from(finished_runs, killed, refusal, tmp_path):
    copy = shutil.copy(finished_runs("private").workdir / "model.keras", tmp_path)
    arguments = dict(SEEN, init_from=str(copy), workdir=tmp_path / "run")
    killed(**arguments)
    with zipfile.ZipFile(copy, "a") as archive:
        archive.writestr("note.txt", "touched")
    assert "began with file " in refusal(classify, resume=True, **arguments)


@pytest.mark.slow
def test_weights_that_saw_the_data_are_refused_without_a_word(
    finished_runs, run, refusal, tmp_path
):
    arguments = dict(SEEN, init_from=str(finished_runs("public").workdir), workdir=tmp_path / "run")
    message = refusal(classify, **arguments)
    assert "trained on sklearn_digits already, without" in message and "--private=false" in message
    start = {name: arguments[name] for name in ("dataset", "init_from", "workdir")}
    message = refusal(classify, head="newton", epsilon=1.0, **start)
    assert "trained on sklearn_digits already, without an account" in message
    report, _ = run(classify, **arguments | dict(private=False, noise_multiplier=None))
    assert report["epsilon"] == "inf" and report["private"] is False
    statement = (tmp_path / "run" / "privacy_statement.txt").read_text()
    assert "no differential privacy" in statement
    [upstream] = records.read(tmp_path / "run" / "record.json").seen
    assert upstream.data.name == "sklearn_digits"
