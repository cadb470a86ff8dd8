"""A folder of images: the images that are used, the split, the choices, and the refusals."""

import os
import shutil

import numpy as np
import own_images
import pytest
from PIL import Image

from tfdpx.train.data import folder, images
from tfdpx.train.errors import UserError


def save(path, size=(20, 20), mode="L", value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def two_classes(path, count=5, **kwargs):
    for name in ("cat", "dog"):
        for i in range(count):
            save(path / name / f"{i}.png", **kwargs)
    return path


def files_of(source, split):
    return set(source.records(split).names)


def test_one_image_more_or_less_changes_no_others_side(tmp_path):
    """Otherwise the training sets of neighbouring folders would not be neighbours."""
    own_images.write(tmp_path, {3: 20, 5: 20})

    def sides():
        source = folder.read(tmp_path, validation=0.3)
        return {split: files_of(source, split) for split in ("train", "validation", "test")}

    before = sides()
    assert all(2 <= len(files) <= 35 for files in before.values()) and sides() == before
    for file in (sorted(files)[number] for files in before.values() for number in range(2)):
        os.rename(tmp_path / file, tmp_path / "aside")
        assert {split: files - {file} for split, files in before.items()} == sides()
        os.rename(tmp_path / "aside", tmp_path / file)
    # A copy joins the split of its image, under any name and class.
    for number, file in enumerate(sorted(before["train"])[:6]):
        shutil.copy(tmp_path / file, tmp_path / "5" / f"copy {number}.png")
    assert all(sides()[split] == before[split] for split in ("validation", "test"))
    assert files_of(folder.read(tmp_path, test_seed=1), "test") != before["test"]


def test_a_class_on_one_side_alone(tmp_path):
    for value in range(30):
        save(tmp_path / "dog" / f"{value}.png", value=value)
    save(tmp_path / "cat" / "0.png", value=200)
    results = []
    for seed in range(20):
        try:
            results += folder.read(tmp_path, test_seed=seed, test_fraction=0.5).notes
        except UserError as error:
            results.append(str(error))
    refusals = ["no image of class cat to train on" in text for text in results]
    notes = ["Classes without a test image: cat." in text for text in results]
    assert 0 < sum(refusals) < 20 and sum(refusals) + sum(notes) == 20


def test_train_and_test_are_taken_where_they_are(tmp_path):
    for name, count in (("train", 5), ("val", 2), ("Test", 3)):
        two_classes(tmp_path / name, count)
    source = folder.read(tmp_path)
    assert (source.records("train").count, source.records("test").count) == (10, 6)
    assert all("Test" in file for file in files_of(source, "test"))
    assert "in no folder of a class: 4" in " ".join(source.notes)
    with pytest.raises(UserError, match="test images in Test: leave out --test_fraction"):
        folder.read(tmp_path, test_fraction=0.1)
    save(tmp_path / "Test" / "bird" / "0.png")
    with pytest.raises(UserError, match="no image of class bird to train on"):
        folder.read(tmp_path)
    for name in ("train", "test"):  # These are classes, of pictures of trains.
        for i in range(5):
            save(tmp_path / "pictures" / name / f"{i}.png", value=i)
    assert set(folder.read(tmp_path / "pictures").class_names) == {"train", "test"}


SIZES = [
    ([(20, 12)], "L", (12, 20, 1)),
    ([(20, 12)], "RGB", (12, 20, 3)),
    ([(100, 300)], "L", (64, 64, 1)),
    ([(20, 12), (30, 40), (30, 50)], "L", (30, 30, 1)),
    ([(4, 4), (4, 5)], "L", (8, 8, 1)),
]


def test_the_size_comes_from_the_files(tmp_path):
    for number, (sizes, mode, shape) in enumerate(SIZES):
        path = tmp_path / f"{number}"
        for i, size in enumerate(sizes * 2):
            save(path / f"class {i % 2}" / f"{i}.png", size, mode, (9, 99, 9)[: len(mode)])
        assert folder.read(path, test_fraction=0.0).shape == shape


def test_pixels_mean_the_same_in_every_mode(tmp_path):
    def decoded(name, channels=1):
        return images.decode((tmp_path / name).read_bytes(), (8, 52, channels))[..., 0]

    ramp = np.tile(np.arange(0, 256, 5, dtype="uint8"), (8, 1))
    gray = Image.fromarray(ramp)
    opaque = gray.convert("RGBA")
    sixteen = Image.fromarray(ramp.astype("uint16") * 257)
    for image in (gray, sixteen, opaque):
        image.save(tmp_path / "image.png")
        for channels in (1, 3):
            np.testing.assert_array_equal(decoded("image.png", channels), ramp)
    opaque.putalpha(0)
    opaque.save(tmp_path / "clear.png")
    assert (decoded("clear.png") == 255).all()
    Image.fromarray(ramp.astype("float32")).save(tmp_path / "float.tiff")
    _, broken = folder.check([tmp_path / "float.tiff"], tmp_path, "--images", True)
    assert "32 bits" in broken[tmp_path / "float.tiff"]
    # A photo from a rotated camera.
    upright = Image.fromarray(np.tile(np.arange(0, 240, 6, dtype="uint8"), (20, 1)))
    exif = Image.Exif()
    exif[0x0112] = 6  # Viewers turn it back by a quarter.
    upright.rotate(90, expand=True).save(tmp_path / "turned.jpg", exif=exif, quality=100)
    [image], _ = folder.check([tmp_path / "turned.jpg"], tmp_path, "--images")
    assert image.size == (20, 40)
    pixels = images.decode((tmp_path / "turned.jpg").read_bytes(), (20, 40, 1))
    assert np.abs(pixels[..., 0].astype(int) - np.asarray(upright)).max() < 8


def test_links_and_odd_names(tmp_path):
    two_classes(tmp_path / "real")
    (tmp_path / "set").mkdir()
    for name, target in (("set/cat", "cat"), ("set/dog", "dog"), ("real/dog/again", "dog")):
        (tmp_path / name).symlink_to(tmp_path / "real" / target)
    odd = tmp_path / "real" / "cat" / os.fsdecode(b"\xff[red].png")
    shutil.copy(tmp_path / "real" / "cat" / "0.png", odd)
    assert folder.read(tmp_path / "set", test_fraction=0.0).records("train").count == 11
    odd.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cat/\\udcff\[red\].png \(is no image") as error:
        folder.read(tmp_path / "set")
    str(error.value).encode()


def test_folders_and_options_that_do_not_fit(tmp_path):
    (tmp_path / "file").touch()
    two_classes(tmp_path / "set")
    save(tmp_path / "one" / "cat" / "0.png")
    save(tmp_path / "one" / "1.png")
    for name, options, message in [
        ("folder:{}/file", {}, f"There is no folder {tmp_path}/file"),
        ("folder:{}/set/cat", {}, "at least two classes, as PATH/CLASS/NAME.*with classes: none"),
        ("folder:{}/one", {}, "classes: cat Not used, in no folder of a class: 1 .1.png"),
        ("{}/set", {}, "needs the kind of data before a path: write --dataset=folder:/"),
        ("digits", dict(test_fraction=0.3), "belong to --dataset=folder:PATH"),
        ("folder:{}/set", dict(image_size=12, takes=(12, 16, 3)), "images of 12x16.*_size=12"),
        (
            "folder:{}/set",
            dict(test_fraction=0.0),
            "no test image in.*--validation",
        ),
        ("folder:{}/set", dict(validation=2), "must be a fraction.*--validation=2"),
    ]:
        with pytest.raises(UserError, match=message):
            images.load(name.format(tmp_path), **options)


def test_formats_without_a_reader_and_empty_classes_are_named(tmp_path):
    two_classes(tmp_path)
    (tmp_path / "unsorted").mkdir()
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "1.HEIC").write_bytes(b"x")
    notes = " ".join(folder.read(tmp_path, test_fraction=0.0).notes)
    assert "name (convert HEIC and other formats to JPEG): 1 (phone/1.HEIC)" in notes
    assert "class without an image: 2 (phone, unsorted)" in notes
    (tmp_path / "cat" / "sent.jpg").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    with pytest.raises(UserError, match="cat/sent.jpg .is no image that can be read: convert HEIC"):
        folder.read(tmp_path)
