"""Which data set a name means, so that no file needs to hold where it lies or what is in it.

A folder of images is known by a random identifier in a hidden file in it, which moves with it, a
table by one in a hidden file next to it. A
digest of its images would tell whoever guesses them whether they were there. Where that file cannot
be written the identifier is a hash of where the folder lies, under a key that stays with its owner.
"""

import contextlib
import hashlib
import os
import pathlib
import re
import secrets

from tfdpx import _files as files
from tfdpx.accounting.record import Data
from tfdpx.train.data import datasets, image_files
from tfdpx.train.errors import UserError

FILE = ".tfdpx_identifier"
_KEY = pathlib.Path("~/.config/tfdpx/key")


def of(name, num_examples=None):
    """The `Data` that a name of `--dataset` means; what is the user's own gets its identifier.

    Args:
        name: String as of `--dataset`.
        num_examples: Optional int, of its training examples.

    Raises:
        UserError: If it is a folder that is not there.
    """
    parsed = datasets.Name.parse(name)
    if parsed.path is None:
        return Data(parsed.full, num_examples)
    is_table = parsed.entry.name in datasets.TABLES
    path = parsed.path.resolve() if is_table else _folder(parsed.path)
    return Data(called(name), num_examples, _identifier(path))


def called(name):
    """What records call the data that a name of `--dataset` means, a string without a path."""
    parsed = datasets.Name.parse(name)
    if parsed.path is None:
        return parsed.full
    return f"{parsed.entry.name}:{image_files.printable(parsed.path.resolve().name)}"


def overlap(one, name):
    """Whether a recorded data set may share examples with what a name of `--dataset` means.

    One folder may lie in the other; versions and sizes of a public data set are no other data.

    Args:
        one: `Data`.
        name: String as of `--dataset`.
    """
    parsed = datasets.Name.parse(name)
    if parsed.path is not None:
        return one.identifier is not None and one.identifier in _around(_folder(parsed.path))
    if one.identifier is not None:
        return False
    return _share(datasets.Name.parse(one.name), parsed)


def _share(one, other):
    if _images(one) != _images(other):
        return False
    if one.classes is None or other.classes is None:
        return True
    return one.classes.start < other.classes.stop and other.classes.start < one.classes.stop


def _images(name):
    source = name.entry.source.partition(":")[0].partition("/")[0]
    return "imagenet" if source.startswith("imagenet") else source


def _folder(path):
    folder = path.resolve()
    if not folder.is_dir():
        raise UserError(f"There is no folder {path}. Received: --dataset=folder:{path}.")
    return folder


def _identifier(data):
    """Of a folder, or of a file."""
    path = data / FILE if data.is_dir() else data.with_name(f".{data.name}{FILE}")
    if (found := _read(path)) is not None:
        return found
    try:
        with path.open("x") as file:  # Never in place of one that a record may name.
            file.write(f"{secrets.token_hex(16)}\n")
    except FileExistsError:
        pass
    except OSError:  # Of a read-only disk.
        return _keyed(data, _owners_key())
    if (found := _read(path)) is None:
        raise UserError(
            f"The file {path}, by which records know these data, cannot be read or is damaged: "
            "restore it from a copy. If no run was on these data, delete it."
        )
    return found


def _read(path):
    with contextlib.suppress(OSError):
        found = path.read_bytes().decode(errors="replace").strip()
        if re.fullmatch("[0-9a-f]{32}", found):
            return found
    return None


def _around(folder):
    """Identifiers of a folder, of those in it and behind its links, and of those above these."""
    within, behind, waiting = set(), set(), [folder]
    while waiting:
        for parent, names, others in os.walk(waiting.pop()):
            paths = [pathlib.Path(parent, name) for name in (*names, *others)]
            targets = {path.resolve() for path in paths if path.is_symlink()}
            names[:] = [] if pathlib.Path(parent) in within else names
            within.add(pathlib.Path(parent))
            behind |= {target.parent for target in targets if target.is_file()}
            waiting += [target for target in targets - within if target.is_dir()]
    folders = (within | behind).union(*(each.parents for each in within | behind))
    found = {_read(each / FILE) for each in folders}
    if _KEY.expanduser().exists():
        found |= {_keyed(each, _owners_key()) for each in folders}
    return found - {None}


def _keyed(folder, key):
    return hashlib.blake2b(os.fsencode(folder), key=key, digest_size=16).hexdigest()


def _owners_key():
    path = _KEY.expanduser()
    try:
        if not path.exists():
            files.make_folder(path.parent)
            files.write(path, secrets.token_bytes(32))
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"No identifier of the data can be kept, neither in their folder nor in {path}: "
            f"{error}. Make one of them writable."
        ) from error
