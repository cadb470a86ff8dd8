"""What a model file says of the data that its weights have seen, and which starts are refused."""

import types
import zipfile

import pytest

from tfdpx.train.config.errors import UserError
from tfdpx.train.run import origin


def settings(path=None, dataset="digits", init_data=None, allow_seen_data=False):
    return types.SimpleNamespace(
        init_from=path and str(path),
        dataset=dataset,
        init_data=init_data,
        allow_seen_data=allow_seen_data,
    )


@pytest.fixture
def file(tmp_path):
    """A function that makes a file which has seen the given data sets."""

    def make(*names, epsilon=3.0):
        path, seen = tmp_path / f"{len(list(tmp_path.iterdir()))}.keras", []
        for name in names:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("config.json", "{}")
            record = {"dataset": name, "epsilon": epsilon, "delta": 1e-5, "steps": 7, "model": "m"}
            origin.write(path, seen, record)
            seen = origin.seen_by(settings(path))
        return path

    return make


def test_what_is_written_is_read(file):
    path = file("sklearn_digits:0-4", "mnist", epsilon=float("inf"))
    first, second = origin.seen_by(settings(path))
    inf = float("inf")
    assert first == {"dataset": "sklearn_digits:0-4", "epsilon": inf, "delta": 1e-5, "steps": 7}
    assert second["dataset"] == "mnist"
    assert origin.seen_by(settings()) == []


@pytest.mark.parametrize(
    ("seen", "dataset", "is_refused"),
    [
        ("sklearn_digits", "digits", True),
        ("sklearn_digits:0-4", "digits:5-9", False),
        ("sklearn_digits:0-4", "digits:4-9", True),
        ("sklearn_digits:0-4", "digits", True),
        ("mnist", "digits", False),
        ("mnist", "mnist:3.0.1", True),
        ("imagenet_resized/32x32", "imagenet2012", True),
        ("imagenet_resized/32x32", "imagenet_resized/64x64", True),
        ("cifar10", "cifar100", False),
        ("synthetic:strokes", "digits", False),
    ],
)
def test_private_data_must_be_unseen(file, seen, dataset, is_refused):
    for path in (file(seen), file(seen, "places365_small"), file("places365_small", seen)):
        if is_refused:
            with pytest.raises(UserError, match=f"{seen} already, at epsilon=3.*--head_steps"):
                origin.check_unseen(settings(path, dataset))
        else:
            origin.check_unseen(settings(path, dataset))


def test_folders_are_the_same_by_whichever_path(file, tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "images")
    monkeypatch.chdir(tmp_path)
    path = file("folder:images")
    monkeypatch.chdir("/")
    for same in ("images", "link", "images/../link"):
        with pytest.raises(UserError, match="was trained on folder:"):
            origin.check_unseen(settings(path, f"folder:{tmp_path}/{same}"))
    origin.check_unseen(settings(path, f"folder:{tmp_path}/others"))


def test_a_folder_within_a_folder_has_the_same_images(file, tmp_path):
    path = file(f"folder:{tmp_path}/images/train")
    for same in ("images", "images/train", "images/train/cat"):
        with pytest.raises(UserError, match="was trained on folder:"):
            origin.check_unseen(settings(path, f"folder:{tmp_path}/{same}"))
    for other in ("images/test", "images/training", "other"):
        origin.check_unseen(settings(path, f"folder:{tmp_path}/{other}"))


def test_an_explicit_word_lets_what_is_known_pass_and_no_more(file, tmp_path):
    path = file("mnist", "sklearn_digits", "digits:0-1", epsilon=1.5)
    given = settings(path, "digits:1-4", allow_seen_data=True)
    origin.check_unseen(given)
    again = origin.repeated(origin.seen_by(given), given.dataset)
    assert [each["dataset"] for each in again] == ["sklearn_digits", "digits:0-1"]
    assert sum(each["epsilon"] for each in again) == 3.0
    (tmp_path / "other.keras").write_bytes(b"weights")
    with pytest.raises(UserError, match="does not say"):
        origin.check_unseen(settings(tmp_path / "other.keras", allow_seen_data=True))


def test_what_cost_nothing_is_no_reason(file):
    origin.check_unseen(settings(file("sklearn_digits", epsilon=0.0)))


def test_a_file_that_does_not_say(tmp_path, file):
    """As of another program, or rewritten by Keras."""
    path = tmp_path / "other.weights.h5"
    path.write_bytes(b"weights")
    assert origin.seen_by(settings(path)) is None
    with pytest.raises(UserError, match="does not say.*name it with --init_data"):
        origin.check_unseen(settings(path))
    origin.check_unseen(settings(path, init_data="imagenet32"))
    with pytest.raises(UserError, match="trained on digits already"):
        origin.check_unseen(settings(path, init_data="digits"))
    # What the file says goes before what the user says.
    with pytest.raises(UserError, match="trained on sklearn_digits already"):
        origin.check_unseen(settings(file("sklearn_digits"), init_data="mnist"))


def test_training_on_does_not_hide_an_unknown_origin(tmp_path):
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    origin.write(path, None, {"dataset": "mnist", "epsilon": 1.0})
    assert origin.seen_by(settings(path)) is None


def test_a_damaged_file(tmp_path, file):
    path = tmp_path / "model.keras"
    for text in ("{", '{"dataset": "mnist"}', '{"epsilon": 1}', "[1]", ""):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tfdpx_seen.jsonl", text)
        with pytest.raises(UserError, match="Damaged"):
            origin.seen_by(settings(path))
