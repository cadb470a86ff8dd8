"""A person with a folder of images: from the command to predictions, through every mistake."""

import csv
import io
import json
import re
import zipfile

import h5py
import numpy as np
import own_images
import pytest

from tfdpx.train import account, classify, predict


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A typical folder: images of many formats and sizes, two broken files, and other files."""
    folder = tmp_path_factory.mktemp("photos") / "my photos"
    own_images.write(folder, {digit: 30 for digit in range(4)})
    own_images.make_messy(folder)
    own_images.break_two(folder)
    return folder


@pytest.fixture(scope="module")
def photo_flags(photos):
    return dict(dataset=f"folder:{photos}", epsilon=8.0)


@pytest.fixture(scope="module")
def finished(photo_flags, run, tmp_path_factory):
    """The folder of a finished run, and its output."""
    workdir = tmp_path_factory.mktemp("run") / "workdir"
    return workdir, run(classify, workdir=workdir, skip_broken=True, **photo_flags)[1]


@pytest.fixture(scope="module")
def trained(finished):
    return finished[0]


def test_broken_images_stop_the_run_before_it_begins(photo_flags, refusal, tmp_path):
    message = refusal(classify, workdir=tmp_path / "run", **photo_flags)
    assert re.search("2 of 122 images.*cut off.jpg.*text.png.*--skip_broken", message)


@pytest.mark.slow
def test_one_command_says_what_it_took_and_chose(finished):
    workdir, output = finished
    for line in (
        "120 images of 4 classes",
        "(--test_fraction: about 0.2 of the images, by --test_seed=0)",
        "Read as 16x16 pixels, in colour (chosen from the files; --image_size changes it)",
        "Public, so not protected: how many images there are to train on and how many images to",
        "broken, so left out: 2",
        "no image by its name (convert HEIC and other formats to JPEG): 1 (1/notes.txt)",
        "fixed features cost no privacy",
    ):
        assert line in output
    record = json.loads(output.splitlines()[-1], parse_constant=pytest.fail)
    count = record["num_examples"]
    assert count + record["num_measured"] == 120 and 80 < count < 112 and record["left_out"] == 2
    assert f"Chosen for {count} images: --model=scatter_linear --batch_size={count}" in output
    assert 7.9 < record["epsilon"] <= 8.0 and record["test_accuracy"] > 0.8
    assert (workdir / "confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


def test_predictions_are_printed_and_written(photos, trained, run, refusal, tmp_path):
    path = tmp_path / "found.csv"
    arguments = dict(model=trained, images=photos, csv=path)
    assert re.search("2 of 122 images of --images.*--skip_broken", refusal(predict, **arguments))
    assert not path.exists()
    record, output = run(predict, skip_broken=True, **arguments)
    assert (record["images"], record["left_out"]) == (120, 2)
    assert "│ 0/deeper/nested.PNG " in output and f"70 more are in {path}." in output
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120 and list(rows[0]) == ["file", "class", "probability"]
    assert np.mean([f"/{row['class']}/" in row["file"] for row in rows]) > 0.8
    assert all(0.25 <= float(row["probability"]) <= 1 for row in rows)
    assert any("größe.png" in row["file"] for row in rows)


def test_one_file_and_all_its_probabilities(photos, trained, run, tmp_path):
    path, [image, *_] = tmp_path / "one.csv", sorted((photos / "2").glob("*.png"))
    run(predict, model=trained / "model.keras", images=image, csv=path, all_classes=True)
    with path.open(newline="") as file:
        [row] = csv.DictReader(file)
    shares = [float(row[name]) for name in "0123"]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert row["class"] == str(int(np.argmax(shares)))
    assert float(row["probability"]) == pytest.approx(max(shares))


def test_weights_of_another_run_in_the_file_are_refused(photos, trained, refusal, tmp_path):
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
    assert message in refusal(predict, model=path, images=photos, csv=tmp_path / "found.csv")
    assert message in refusal(account, workdir=path)


def test_folders_that_were_never_a_run_are_refused(photos, trained, refusal, tmp_path):
    for name in ("unfinished", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "other.keras").write_bytes((trained / "record.json").read_bytes())
    for arguments, message in [
        (dict(), "--model and one of --images and --rows must be given"),
        (dict(model=tmp_path / "unfinished", images=photos), "no finished run.*--resume"),
        (dict(model=tmp_path / "none", images=photos), "Flag --model must name"),
        (dict(model=tmp_path / "other.keras", images=photos), "Cannot read --model"),
        (dict(model=trained, images=tmp_path / "none"), "nothing at --images"),
        (dict(model=trained, images=tmp_path / "empty"), "no image that can be read"),
        (dict(model=trained, images=photos / "1" / "notes.txt"), "is no image"),
    ]:
        assert re.search(message, refusal(predict, csv=tmp_path / "found.csv", **arguments))
    assert not (tmp_path / "found.csv").exists()
