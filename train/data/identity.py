"""Which data set a name means, so that no file needs to hold where it lies or which rows it has.

- A folder of images is known by a random identifier in a hidden file in it, which moves with it.
  Where that file cannot be written it is known by a keyed hash of where it lies.
- A table is known by a keyed hash of its columns and rows, in any file and in any order.

The key of both hashes stays with its owner, because a hash without a key would tell anyone who
guesses a row or a path whether it is the right one. It is in no other file.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import secrets

from tfdpx import _files as files
from tfdpx.accounting.record import DatasetId
from tfdpx.train.data import folder, tables, tfds
from tfdpx.train.errors import UserError, printable

FILE = ".tfdpx_identifier"
_KEY = pathlib.Path("~/.config/tfdpx/key")


def of(name, num_examples=None):
    """Returns the `DatasetId` that a name of `--dataset` means.

    Args:
        name: String as of `--dataset`.
        num_examples: Optional int, of its training examples.

    Raises:
        UserError: If it is a folder or a table that is not there, or no identifier can be kept.
    """
    parsed = tfds.Name.parse(name)
    if parsed.path is None:
        return DatasetId(parsed.full, num_examples)
    is_table = parsed.entry.name in tfds.TABLES
    identifier = _of_table(name) if is_table else _of_folder(folder.existing(parsed.path).resolve())
    return DatasetId(called(name), num_examples, identifier)


def called(name):
    """Returns what records call the data of a name of `--dataset`, a string without a path."""
    parsed = tfds.Name.parse(name)
    if parsed.path is None:
        return parsed.full
    return f"{parsed.entry.name}:{printable(parsed.path.resolve().name)}"


def overlap(data, name):
    """Whether a recorded data set may share examples with the one that a name means.

    One folder may lie in the other; versions and sizes of a public data set are no other data.

    Args:
        data: `DatasetId`.
        name: String as of `--dataset`.
    """
    parsed = tfds.Name.parse(name)
    if parsed.entry.name in tfds.TABLES:
        return data.identifier == _of_table(name)
    if parsed.path is not None:
        return data.identifier in _around(folder.existing(parsed.path).resolve())
    if data.identifier is not None:
        return False
    recorded, everything = tfds.Name.parse(data.name), range(10**9)
    first, second = recorded.classes or everything, parsed.classes or everything
    shared = range(max(first.start, second.start), min(first.stop, second.stop))
    return _images(recorded) == _images(parsed) and len(shared) > 0


def _images(name):
    source = name.entry.source.partition(":")[0].partition("/")[0]
    return "imagenet" if source.startswith("imagenet") else source


def _of_table(name):
    table = tables.read(name.partition(":")[2], {}, f"--dataset={name}")
    names = sorted(table.column_names)
    rows = zip(*(table[column].to_pylist() for column in names), strict=True)
    return _keyed("\n".join([repr(names), *sorted(map(repr, rows))]).encode())


def _of_folder(path):
    file = path / FILE
    if identifier := _read(file):
        return identifier
    try:
        with file.open("x") as opened:  # Never in place of one that a record may name.
            opened.write(f"{secrets.token_hex(16)}\n")
    except FileExistsError:
        pass
    except OSError:  # Of a read-only disk.
        return _keyed(os.fsencode(path))
    if identifier := _read(file):
        return identifier
    raise UserError(
        f"The file {file}, by which records know these data, cannot be read or is damaged: "
        "restore it from a copy. If no run was on these data, delete it."
    )


def _read(file):
    with contextlib.suppress(OSError):
        text = file.read_bytes().decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", text):
            return text
    return None


def _around(path):
    """Returns identifiers of a folder, of those in it, behind its links, and above all these."""
    images, others = folder.find(path)
    inside = {file.parent.resolve() for file in (*images, *others)} | {path}
    behind = {file.resolve().parent for file in (*images, *others) if file.is_symlink()}
    folders = (inside | behind).union(*(parent.parents for parent in inside | behind))
    identifiers = {_read(parent / FILE) for parent in folders} - {None}
    if _KEY.expanduser().exists():
        identifiers |= {_keyed(os.fsencode(parent)) for parent in folders}
    return identifiers


def _keyed(content):
    """Returns a hash of bytes under the owner's key, a string of 32 digits."""
    path = _KEY.expanduser()
    try:
        if not path.exists():
            files.make_folder(path.parent)
            files.write(path, secrets.token_bytes(32))
        return hashlib.blake2b(content, key=path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(
            f"No identifier of the data can be kept: {error}. Make the file {path} writable."
        ) from error
