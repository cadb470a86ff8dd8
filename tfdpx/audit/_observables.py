"""What can be observed of a run: its files, prints, calls in order and result."""

import contextlib
import fnmatch
import io
import os
import pathlib
import re
import tempfile
import zipfile
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

_CALLS = ("fit", "evaluate", "predict", "save", "save_weights", "load_weights")
_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_TIMES = re.compile(r"\b\d+(\.\d+)?(ms|us|s|m|h)(/step|/epoch|/sample)?\b|\b\d+:\d\d(:\d\d)?\b")
_EVENTS = re.compile(r"(events\.out\.tfevents)\..*?(\.v2)?$")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Observables:
    """Records what happens within `watched`.

    Args:
        ignore: Sequence of glob patterns of paths that are not looked at.
    """

    def __init__(self, ignore=()):
        self._ignore = tuple(ignore)
        self.calls, self.files, self.printed, self.returned = [], {}, [], None

    @contextlib.contextmanager
    def watched(self):
        """Within it, the current folder is an empty one, and the run is recorded."""
        printed, before = io.StringIO(), os.getcwd()
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
            for name in _CALLS:
                stack.enter_context(mock.patch.object(keras.Model, name, self._noting(name)))
            stack.enter_context(contextlib.redirect_stdout(printed))
            os.chdir(folder)
            try:
                yield
            finally:
                os.chdir(before)
                self.printed = _lines(printed.getvalue())
                self.files = self._contents(pathlib.Path(folder))

    def _noting(self, name):
        original = getattr(keras.Model, name)

        def noted(model, *args, **kwargs):
            given = [*args, *(f"{key}={_brief(kwargs[key])}" for key in sorted(kwargs))]
            given = ", ".join(each if isinstance(each, str) else _brief(each) for each in given)
            self.calls.append(f"{name}({given})")
            return original(model, *args, **kwargs)

        return noted

    def _contents(self, folder):
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        contents = {}
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if any(fnmatch.fnmatch(name, pattern) for pattern in self._ignore):
                continue
            name = _EVENTS.sub(r"\1\2", name)
            while name in contents:
                name += "+"
            contents[name] = _content(path)
        return contents


def _content(path):
    """What a file says, without the time at which it said so."""
    if "tfevents" in path.name:
        events = []
        for event in tf.compat.v1.train.summary_iterator(os.fspath(path)):
            for value in event.summary.value:
                events.append(f"step {event.step}, {value.tag}: {tf.make_ndarray(value.tensor)}")
        return events
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return [f"{each.filename}: {each.file_size} bytes" for each in archive.infolist()]
    content = path.read_bytes()
    try:
        return content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return [f"{len(content)} bytes"]


def _lines(text):
    """What stays on a terminal, without times."""
    kept = []
    for line in _TERMINAL.sub("", text).splitlines():
        line = re.split(r"[\r\x08]+", line.rstrip("\r\x08"))[-1]
        kept.append(_TIMES.sub("TIME", line).rstrip())
    return kept


def _brief(value):
    """A text of an argument without the values of arrays."""
    if isinstance(value, (str, int, float, bool, type(None))):
        return repr(value)
    if isinstance(value, tf.data.Dataset):
        return _ADDRESS.sub("", repr(value))
    if isinstance(value, (list, tuple, dict)):
        return str(tf.nest.map_structure(_brief, value))
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else str(list(shape)))


def leaves(value, name="the result"):
    """Pairs of a name and a value of all parts of what a function returned."""
    if isinstance(value, keras.callbacks.History):
        value = value.history
    if isinstance(value, keras.Model):
        value = {variable.path: variable.numpy() for variable in value.weights}
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from leaves(each, f"{name}[{index}]")
    elif tf.is_tensor(value) or isinstance(value, (np.ndarray, np.generic)):
        yield name, np.asarray(value)
    else:
        yield name, value if isinstance(value, (int, float)) else _ADDRESS.sub("", repr(value))
