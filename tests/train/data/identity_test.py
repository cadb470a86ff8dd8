"""The same data are recognized in every place and under every name."""

import os
import pathlib

import pytest

from tfdpx.train.data import identity
from tfdpx.train.errors import UserError


@pytest.fixture(autouse=True)
def key(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "_KEY", tmp_path / "home" / "key")
    return tmp_path / "home" / "key"


@pytest.fixture
def folders(tmp_path):
    """Makes folders of one image each: `images`, links to it, and `others`."""
    for name in ("images/train/cats", "others", "files"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images/train/cats/1.png").touch()
    (tmp_path / "others/1.png").touch()
    (tmp_path / "link").symlink_to(tmp_path / "images")
    (tmp_path / "images/back").symlink_to(tmp_path / "images")
    (tmp_path / "files/1.png").symlink_to(tmp_path / "images/train/cats/1.png")
    (tmp_path / "files/2.png").symlink_to(tmp_path / "nowhere")
    return tmp_path


SAME = ("images", "link", "images/../link", "images/train", "files", ".")


def test_folders_are_the_same_by_whichever_path(folders, monkeypatch):
    monkeypatch.chdir(folders)
    data = identity.of("folder:images", 5)
    assert (data.name, data.num_examples) == ("folder:images", 5)
    assert identity.of("folder:images") == identity.of("folder:link/../images")
    monkeypatch.chdir("/")
    for same in SAME:
        assert identity.overlap(data, f"folder:{folders}/{same}"), same
    assert not identity.overlap(data, f"folder:{folders}/others")
    assert not identity.overlap(data, "digits")
    # The file moves with the images.
    os.rename(folders / "images", folders / "moved")
    assert identity.overlap(data, f"folder:{folders}/moved")


def test_a_folder_that_cannot_be_written_is_known_by_its_owners_key(folders, key, monkeypatch):
    open_ = pathlib.Path.open

    def refusing(path, mode="r", *args, **kwargs):
        if path.name == identity.FILE and mode == "x":
            raise PermissionError
        return open_(path, mode, *args, **kwargs)

    monkeypatch.setattr(pathlib.Path, "open", refusing)
    data = identity.of(f"folder:{folders}/images")
    assert identity.of(f"folder:{folders}/images") == data and len(data.identifier) == 32
    for same in SAME:
        assert identity.overlap(data, f"folder:{folders}/{same}"), same
    assert not identity.overlap(data, f"folder:{folders}/others")
    assert key.stat().st_mode & 0o077 == 0
    odd = folders / os.fsdecode(b"bad\xff")
    odd.mkdir()
    assert identity.of(f"folder:{odd}").name.encode()


def test_an_identifier_is_never_replaced(tmp_path):
    (tmp_path / identity.FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read or is damaged"):
        identity.of(f"folder:{tmp_path}")
    assert (tmp_path / identity.FILE).read_bytes() == b"\xff\xfe"


def test_a_table_is_known_by_its_columns_and_rows(tmp_path, key):
    def write(name, text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        return f"csv:{tmp_path / name}"

    data = identity.of(write("people.csv", "age,city\n30,Rome\n40,Oslo\n30,Rome\n"), 3)
    assert (data.name, data.num_examples) == ("csv:people.csv", 3)
    moved = write("else/where.csv", "city;age\nOslo;40\nRome;30\nRome;30\n")
    assert identity.of(moved).identifier == data.identifier and identity.overlap(data, moved)
    for text in ("age,city\n30,Rome\n40,Oslo\n", "age,town\n30,Rome\n40,Oslo\n30,Rome\n"):
        assert not identity.overlap(data, write("people.csv", text))
    # Only the key, which lies outside of this folder, links the two.
    assert {path.name for path in tmp_path.iterdir()} == {"people.csv", "else", "home"}
    key.unlink()
    assert not identity.overlap(data, moved)
