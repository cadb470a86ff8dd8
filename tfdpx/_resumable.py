"""Resumes interrupted work in a folder, with the settings that it began with.

A file in the folder holds the settings of its results. Other settings are refused, because they
would mix up the results or make their epsilon wrong. Each result is written as soon as it is
computed, and is not computed again.
"""

import json

from tfdpx import _files as files

_FORMAT = "tfdpx.Settings/1"


def begin(path, settings, holder, remedy, free=(), **more):
    """Begins work with these settings, or resumes work that began with the same.

    Args:
        path: `pathlib.Path` of the file for the settings; its folder is created if needed.
        settings: Dict of JSON values.
        holder: String for the error, for example "The folder X holds a sweep".
        remedy: String for the end of the error.
        free: Names of settings that may change.
        **more: JSON values to store with the settings of new work.

    Returns:
        The content of the file, a dict: "settings", and all of `more`.

    Raises:
        ValueError: If the work began with other settings, naming one, or the file is damaged.
    """
    record = begun(path)
    if record is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(path, settings, **more)
    check_same(record["settings"], settings, holder, remedy, free)
    return record


def begun(path):
    """Returns the content of the file of work that has begun, as for `begin`, or None.

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
    """Writes the settings and `more` to a file, replacing earlier ones; returns its content."""
    record = json.loads(json.dumps({"format": _FORMAT, "settings": settings, **more}))
    files.write(path, files.sealed(record))
    return record


def check_same(began, settings, holder, remedy, free=()):
    """Raises ValueError that names a setting if `settings` differ from the first ones."""
    settings = json.loads(json.dumps(settings))
    for name in {**settings, **began}:
        was, now = began.get(name, "not given"), settings.get(name, "not given")
        if name not in free and was != now:
            raise ValueError(f"{holder} with {name}={was}. Received: {name}={now}. {remedy}")


def lines(path):
    """Returns the dicts that `add_line` wrote to a file, a list."""
    return [json.loads(line) for line in _whole_lines(path).splitlines()]


def add_line(path, result):
    """Appends a dict of JSON values to a file of results, one per line."""
    files.write(path, _whole_lines(path) + json.dumps(result).encode() + b"\n", mode=0o644)


def _whole_lines(path):
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]
