"""Lets work that writes results to a folder, for example a sweep, resume after an interruption.

A file in the folder holds the settings of the work. A resume with other settings is refused: the
folder would mix results of different settings, and their epsilon would be wrong. Each result is
written as soon as it is computed, and a resume does not compute it again.
"""

import json

from tfdpx import _files as files

_FORMAT = "tfdpx.Settings/1"


def begin(path, settings, holder, remedy, free=(), **more):
    """Begins new work, or resumes work that was begun with the same settings.

    Args:
        path: `pathlib.Path` of the file of settings. Its folder is created if needed.
        settings: Dict of JSON values.
        holder: String, the beginning of the error for other settings, for example "The folder X
            holds a sweep".
        remedy: String, the end of this error.
        free: Collection of strings, the names of settings that a resume may change.
        **more: JSON values to save with the settings of new work. A resume ignores them.

    Returns:
        Dict, the content of the file: the entry "settings", and the entries of `more` in the call
        that began the work.

    Raises:
        ValueError: If the work was begun with other settings (the message names one that differs),
            or if the file is damaged.
    """
    record = begun(path)
    if record is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(path, settings, **more)
    check_same(record["settings"], settings, holder, remedy, free)
    return record


def begun(path):
    """Returns the content of the file of settings, as `begin` does; None if there is no file.

    Raises:
        ValueError: If the file is damaged.
    """
    if not path.exists():
        return None
    try:
        return files.opened(path.read_bytes(), _FORMAT)
    except ValueError as error:
        raise ValueError(f"The file {path} of unfinished work is damaged: {error}.") from error


def save(path, settings, **more):
    """Writes a file of settings, as `begin` does for new work. Returns the content, a dict."""
    record = json.loads(json.dumps({"format": _FORMAT, "settings": settings, **more}))
    files.write(path, files.sealed(record))
    return record


def check_same(began, settings, holder, remedy, free=()):
    """Raises ValueError if a setting is not as it was when the work began. The error names it.

    Args:
        began: Dict, the settings when the work began.
        settings: Dict, the settings now.
        holder: String, the beginning of the error.
        remedy: String, the end of the error.
        free: Collection of strings, the names of settings that may differ.
    """
    settings = json.loads(json.dumps(settings))
    for name in {**settings, **began}:
        was, now = began.get(name, "not given"), settings.get(name, "not given")
        if name not in free and was != now:
            raise ValueError(f"{holder} with {name}={was}. Received: {name}={now}. {remedy}")


def lines(path):
    """Returns a list of the dicts that `add_line` has written to a file."""
    return [json.loads(line) for line in _whole_lines(path).splitlines()]


def add_line(path, result):
    """Appends one result, a dict of JSON values, as a line to a file of results."""
    files.write(path, _whole_lines(path) + json.dumps(result).encode() + b"\n", mode=0o644)


def _whole_lines(path):
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]
