"""Identifies data sets in records, without revealing their paths or rows.

- A folder of images is identified by a random number in a hidden file inside it, so the number
  moves with the folder. If that file cannot be written, the folder is identified by a keyed hash of
  its path.
- A table is identified by a keyed hash of its columns and rows. The hash stays the same if the
  table is saved in another file, or if its rows and columns have another order.

Both hashes use the same key, which is stored only in a file in the owner's home folder. With hashes
that have no key, anyone could guess a path or rows, and confirm the guess by the hash.
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
    """Returns the `DatasetId` of a value of `--dataset`.

    Args:
        name: String, a value of `--dataset`.
        num_examples: Optional int, the number of training examples in the data set.

    Raises:
        UserError: If the folder or table does not exist, or no identifier can be stored.
    """
    parsed = tfds.Name.parse(name)
    if parsed.path is None:
        return DatasetId(parsed.full, num_examples)
    is_table = parsed.entry.name in tfds.TABLES
    identifier = _of_table(name) if is_table else _of_folder(folder.existing(parsed.path).resolve())
    return DatasetId(called(name), num_examples, identifier)


def called(name):
    """Returns the name for a data set in a record: the value of `--dataset` without the path."""
    parsed = tfds.Name.parse(name)
    if parsed.path is None:
        return parsed.full
    return f"{parsed.entry.name}:{printable(parsed.path.resolve().name)}"


def overlap(data, name):
    """Returns whether a recorded data set may share examples with the data set `name`.

    For example, one folder may be inside the other. All versions and sizes of a public data set
    count as the same data.

    Args:
        data: `DatasetId`.
        name: String, a value of `--dataset`.
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
        with file.open("x") as opened:  # Never replaces an identifier: records may contain it.
            opened.write(f"{secrets.token_hex(16)}\n")
    except FileExistsError:
        pass
    except OSError:  # For example, a read-only disk.
        return _keyed(os.fsencode(path))
    if identifier := _read(file):
        return identifier
    raise UserError(
        f"The file {file}, which identifies these data in records, cannot be read or is damaged: "
        "restore it from a copy. If no run used these data, delete it."
    )


def _read(file):
    with contextlib.suppress(OSError):
        text = file.read_bytes().decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", text):
            return text
    return None


def _around(path):
    """Returns the identifiers of all folders that may share images with a folder.

    They are the folder itself, the folders that hold its images (if these are links, the folders of
    the linked files), and all parents of these folders.
    """
    images, other_files = folder.find(path)
    inside = {file.parent.resolve() for file in (*images, *other_files)} | {path}
    behind = {file.resolve().parent for file in (*images, *other_files) if file.is_symlink()}
    folders = (inside | behind).union(*(parent.parents for parent in inside | behind))
    identifiers = {_read(parent / FILE) for parent in folders} - {None}
    if _KEY.expanduser().exists():
        identifiers |= {_keyed(os.fsencode(parent)) for parent in folders}
    return identifiers


def _keyed(content):
    """Returns the hash of `content` with the owner's key, a string of 32 hexadecimal digits."""
    path = _KEY.expanduser()
    try:
        if not path.exists():
            files.make_folder(path.parent)
            files.write(path, secrets.token_bytes(32))
        return hashlib.blake2b(content, key=path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(
            f"The identifier of the data cannot be saved: {error}. Make the file {path} writable."
        ) from error
