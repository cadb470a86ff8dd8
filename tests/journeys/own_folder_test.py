"""A person with a folder of images: from the command to predictions, with every stumble."""

import contextlib
import csv
import io
import json
import zipfile

import h5py
import numpy as np
import own_images
import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx.train import classify, predict
from tfdpx.train.accounts import recorded_runs
from tfdpx.train.config.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])


def classify_folder(path, workdir, **given):
    given = dict(dataset=f"folder:{path}", epsilon=8.0) | given
    with flagsaver.flagsaver(workdir=str(workdir), **given):
        classify.main(["classify"])


def predict_with(**given):
    values = flags.FlagValues()
    predict.define_flags(values)
    values.mark_as_parsed()
    for name, value in given.items():
        setattr(values, name, str(value) if name != "skip_broken" else value)
    predict.main(["predict"], values)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """What people have: many formats and sizes, two broken files, files that are no images."""
    folder = tmp_path_factory.mktemp("photos") / "my photos"
    own_images.write(folder, {digit: 30 for digit in range(4)})
    own_images.make_messy(folder)
    own_images.break_two(folder)
    return folder


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    """The folder of a finished run, and what it printed."""
    workdir, output = tmp_path_factory.mktemp("run") / "workdir", io.StringIO()
    with contextlib.redirect_stdout(output):
        classify_folder(photos, workdir, skip_broken=True)
    return workdir, output.getvalue()


def test_broken_images_stop_the_run_before_it_begins(photos, tmp_path):
    with pytest.raises(SystemExit, match="2 of 122 images.*cut off.jpg.*text.png.*--skip_broken"):
        classify_folder(photos, tmp_path / "run")


@pytest.mark.slow
def test_one_command_says_what_it_took_and_chose(trained):
    workdir, output = trained
    for said in (
        "120 images of 4 classes",
        "To train on: 96. To test on: 24 (0.2 of each class, --test_fraction",
        "Read as 16x16 pixels, in colour (chosen from the files; --image_size changes it)",
        "Public, so not protected: how many images there are to train on",
        "broken, so left out: 2",
        "no image by its name: 1 (1/notes.txt)",
        "Chosen for 96 images: --model=scatter_linear --batch_size=96",
        "fixed features cost no privacy",
    ):
        assert said in output
    record = json.loads(output.splitlines()[-1], parse_constant=pytest.fail)
    assert (record["num_examples"], record["left_out"]) == (96, 2)
    assert 7.9 < record["epsilon"] <= 8.0 and record["test_accuracy"] > 0.8
    assert (workdir / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_other_choices_are_flags_away(photos, tmp_path, capsys):
    given = dict(skip_broken=True, test_fraction=0.5, image_size=12, steps=3, learning_rate=9.0)
    classify_folder(photos, tmp_path / "run", **given)
    output = capsys.readouterr().out
    assert "To train on: 60. To test on: 60 (0.5 of each" in output
    assert "Read as 12x12 pixels, in colour (--image_size)" in output
    record = json.loads(output.splitlines()[-1])
    assert (record["steps"], record["learning_rate"], record["num_examples"]) == (3, 9.0, 60)


def test_predictions_are_printed_and_written(photos, trained, tmp_path, capsys):
    (trained, _), path = trained, tmp_path / "found.csv"
    with pytest.raises(SystemExit, match="2 of 122 images of --images.*--skip_broken"):
        predict_with(model=trained, images=photos, csv=path)
    assert not path.exists()
    predict_with(model=trained, images=photos, csv=path, skip_broken=True)
    output = capsys.readouterr().out
    record = json.loads(output.splitlines()[-1])
    assert (record["images"], record["left_out"]) == (120, 2)
    assert "│ 0/deeper/nested.PNG " in output and f"70 more are in {path}." in output
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120 and list(rows[0]) == ["file", "class", "probability"]
    right = [f"/{row['class']}/" in row["file"] for row in rows]
    assert np.mean(right) > 0.8
    assert all(0.25 <= float(row["probability"]) <= 1 for row in rows)
    assert any("größe.png" in row["file"] for row in rows)


def test_one_file_and_all_its_probabilities(photos, trained, tmp_path):
    trained, _ = trained
    path, [image, *_] = tmp_path / "one.csv", sorted((photos / "2").glob("*.png"))
    predict_with(model=trained / "model.keras", images=image, csv=path, all_classes="true")
    with path.open(newline="") as file:
        [row] = csv.DictReader(file)
    shares = [float(row[name]) for name in "0123"]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert row["class"] == str(int(np.argmax(shares)))
    assert float(row["probability"]) == pytest.approx(max(shares))


def test_weights_of_another_run_in_the_file_are_refused(photos, trained, tmp_path):
    trained, _ = trained
    path, names = tmp_path / "mixed.keras", []
    with zipfile.ZipFile(trained / "model.keras") as old, zipfile.ZipFile(path, "w") as new:
        weights = io.BytesIO(old.read("model.weights.h5"))
        with h5py.File(weights, "r+") as file:
            file.visit(names.append)
            arrays = [file[name] for name in names if isinstance(file[name], h5py.Dataset)]
            arrays[-1][...] = arrays[-1][...] + 1
        for name in old.namelist():
            is_changed = name == "model.weights.h5"
            new.writestr(name, weights.getvalue() if is_changed else old.read(name))
    message = "mixed.keras. Its weights are not those that its record speaks of"
    with pytest.raises(SystemExit, match=message):
        predict_with(model=path, images=photos, csv=tmp_path / "found.csv")
    with pytest.raises(UserError, match=message):
        recorded_runs.read(path)


def test_what_was_never_a_run_is_refused(photos, trained, tmp_path):
    trained, _ = trained
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "other.keras").write_bytes((trained / "record.json").read_bytes())
    (tmp_path / "empty").mkdir()
    for given, message in [
        (dict(), "--model and one of --images and --rows must be given"),
        (dict(model=tmp_path / "unfinished", images=photos), "no finished run.*--resume"),
        (dict(model=tmp_path / "none", images=photos), "Flag --model must name"),
        (dict(model=tmp_path / "other.keras", images=photos), "Cannot read --model"),
        (dict(model=trained, images=tmp_path / "none"), "nothing at --images"),
        (dict(model=trained, images=tmp_path / "empty"), "no image that can be read"),
        (dict(model=trained, images=photos / "1" / "notes.txt"), "is no image"),
    ]:
        with pytest.raises(SystemExit, match=message) as error:
            predict_with(**given, csv=tmp_path / "found.csv")
        assert "\n" not in error.value.code
    assert not (tmp_path / "found.csv").exists()
