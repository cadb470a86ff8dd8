"""Files that are whole or absent, and work that resumes only with its own settings."""

import os
import subprocess
import sys

import pytest

from tfdpx import _files as files
from tfdpx import _resumable as resumable


def test_a_replaced_file_is_whole_and_has_its_mode(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with files.replacing(path, mode=0o644) as fresh:
        assert fresh.parent == tmp_path and fresh.suffix == ".keras"
        fresh.write_text("new")
        assert path.read_text() == "old" and files.leftovers(tmp_path) == [fresh]
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["model.keras"]
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    files.write(tmp_path / "secret", b"1")
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_an_error_leaves_what_was_there_and_no_half(tmp_path, monkeypatch, failing):
    def fail(*arguments):
        raise OSError("disk full")

    files.write(tmp_path / "a", b"old")
    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        files.write(tmp_path / "a", b"new")
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "a"):
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_a_lock_is_held_by_whoever_inherits_it(tmp_path):
    with files.locked(tmp_path) as lock:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[lock])
    with pytest.raises(RuntimeError, match="Another training uses"), files.locked(tmp_path):
        pass
    child.communicate(b"\n")
    with files.locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_used_without(tmp_path, monkeypatch):
    monkeypatch.setattr(files.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "no")))
    with files.locked(tmp_path), files.locked(tmp_path):
        files.write(tmp_path / "a", b"whole")


def begin(path, **settings):
    return resumable.begin(path, settings, "It holds a study", "Take another.", free=("jobs",))


def test_work_resumes_by_the_settings_that_it_began_with(tmp_path):
    path = tmp_path / "new" / "settings.json"
    assert resumable.begun(path) is None
    assert begin(path, rate=0.5, sizes=(1, 2), jobs=1)["settings"]["sizes"] == [1, 2]
    assert begin(path, rate=0.5, sizes=(1, 2), jobs=3)["settings"]["jobs"] == 1
    for settings, message in [
        ({"rate": 0.25, "sizes": (1, 2)}, "a study with rate=0.5. Received: rate=0.25. Take"),
        ({"rate": 0.5}, r"with sizes=\[1, 2\]. Received: sizes=not given"),
        ({"rate": 0.5, "sizes": (1, 2), "seed": 3}, "with seed=not given. Received: seed=3"),
    ]:
        with pytest.raises(ValueError, match=message):
            begin(path, **settings)
    path.write_text(path.read_text().replace("0.5", "0.4"))
    with pytest.raises(ValueError, match="settings.json of unfinished work is damaged"):
        begin(path, rate=0.4)


def test_results_come_line_by_line_and_a_half_one_is_dropped(tmp_path):
    path = tmp_path / "results.jsonl"
    assert resumable.lines(path) == []
    resumable.add_line(path, {"seed": 0})
    resumable.add_line(path, {"seed": 1})
    with path.open("a") as file:
        file.write('{"seed": 2, "err')
    assert resumable.lines(path) == [{"seed": 0}, {"seed": 1}]
    resumable.add_line(path, {"seed": 2})
    assert resumable.lines(path) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
