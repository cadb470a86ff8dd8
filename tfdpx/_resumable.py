"""Work in a folder that resumes after an interruption, under the settings that it began with.

A file of the folder says by which settings its results are made, and other settings are refused:
their results would be mixed up, or their epsilon wrong. Results are written as they are made, and
not made twice.
"""

import json

from tfdpx import _files as files

_FORMAT = "tfdpx.Settings/1"


def begin(path, settings, holder, remedy, free=(), **more):
    """Begins work by these settings, or resumes work that began with the same.

    Args:
        path: `pathlib.Path` of the file for the settings; its folder is made if needed.
        settings: Dict of JSON values.
        holder: String for the error, such as "The folder X holds a sweep".
        remedy: String for the end of the error.
        free: Names of settings that may change.
        **more: JSON values to keep with the settings of new work.

    Returns:
        What is kept, a dict: "settings", and all of `more`.

    Raises:
        ValueError: If the work began with other settings, naming one, or the file is damaged.
    """
    kept = begun(path)
    if kept is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        return save(path, settings, **more)
    check_same(kept["settings"], settings, holder, remedy, free)
    return kept


def begun(path):
    """What is kept of work that has begun, a dict as of `begin`; None if none has.

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
    """Writes the settings and `more` to a file, in place of earlier ones; returns what is kept."""
    kept = json.loads(json.dumps({"format": _FORMAT, "settings": settings, **more}))
    files.write(path, files.sealed(kept))
    return kept


def check_same(began, settings, holder, remedy, free=()):
    """Raises ValueError, naming a setting, if `settings` are not those that the work began with."""
    settings = json.loads(json.dumps(settings))
    for name in {**settings, **began}:
        was, now = began.get(name, "not given"), settings.get(name, "not given")
        if name not in free and was != now:
            raise ValueError(f"{holder} with {name}={was}. Received: {name}={now}. {remedy}")


def lines(path):
    """The dicts that `add_line` wrote to a file, a list."""
    return [json.loads(line) for line in _whole_lines(path).splitlines()]


def add_line(path, result):
    """Adds a dict of JSON values to a file of results, a line each."""
    files.write(path, _whole_lines(path) + json.dumps(result).encode() + b"\n", mode=0o644)


def _whole_lines(path):
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]
