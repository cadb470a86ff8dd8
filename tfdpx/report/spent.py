"""Reads the privacy loss in records, models, ledgers and checkpoints, without Keras."""

import dataclasses
import io
import os
import pathlib
import re
import zipfile
import zlib

import h5py
import numpy as np

from tfdpx.accounting import record as records
from tfdpx.accounting import saved
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import Record

MODEL = "model.keras"  # The model of a run, next to its record.
RELEASES = "releases.jsonl"  # Releases of other mechanisms, one in each line.
# The folder in an unfinished run, the file of settings in it, and the prefix of the folders of an
# unfinished private tuning.
_UNFINISHED, _SETTINGS, _TUNING = "checkpoint", "settings.json", ".private_tuning-"
_OF_TENSORFLOW = re.compile(r".*\.data-\d{5}-of-\d{5}")  # A file of `tf.train.Checkpoint`.
_ARCHIVE, _HDF5, _WEIGHTS = b"PK\x03\x04", b"\x89HDF", "model.weights.h5"
UNREADABLE: tuple[type[Exception], ...] = (
    *(OSError, ValueError, KeyError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile),
)


def files_below(path):
    """Finds the ledgers, records and models of tfdpx in a folder and its subfolders.

    The files are recognised by their content. Some files are recognised by their names, too, even
    if they are damaged.

    Returns:
        Two sorted lists: the files, and the folders of unfinished runs.
    """
    files, unfinished, walked = [], [], set()
    for parent, folders, names in os.walk(path, onerror=_refuse, followlinks=True):
        folder, there = pathlib.Path(parent), os.path.realpath(parent)
        if there in walked:  # For example, a link to a folder above.
            folders.clear()
            continue
        walked.add(there)
        is_run = folder.name == _UNFINISHED and _is(folder / _SETTINGS, "Settings")
        if is_run or folder.name.startswith(_TUNING):
            unfinished.append(folder)
        files += [folder / name for name in names if says_what_was_spent(folder / name)]
    return sorted(files), sorted(unfinished)


def _refuse(error):
    if not isinstance(error, FileNotFoundError):
        raise error


def says_what_was_spent(path):
    """Returns whether a file, even a damaged one, is a record, a model or a ledger."""
    if path.name in (records.FILE, RELEASES) or path.name.endswith((".keras", ".weights.h5")):
        return True  # Broken links count, too: the missing file may hold a privacy loss.
    if not path.is_file():
        return False
    if _OF_TENSORFLOW.fullmatch(path.name):
        return b'"tfdpx.Ledger/' in path.read_bytes()
    if path.suffix == ".jsonl":  # Releases of other mechanisms, or the curve of a run.
        return b'"neighbours"' in path.read_bytes()
    return _is_model(path) or _is(path, "Ledger|Record")


def _is_model(path):
    """Returns whether a file holds a model or weights that Keras wrote."""
    start = _start(path)
    try:
        if start == _ARCHIVE:
            with zipfile.ZipFile(path) as archive:
                return _WEIGHTS in archive.namelist()
        if start == _HDF5:
            with h5py.File(path) as file:
                return "optimizer/vars" in file
    except UNREADABLE:
        pass
    return False


def _start(path):
    with path.open("rb") as file:
        return file.read(4)


def _is(path, kinds):
    """Returns whether a file holds JSON that tfdpx wrote for one of `kinds`, such as "Ledger".

    The file may be damaged.
    """
    if not path.is_file() or _start(path).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
        return False
    form = rf'"format"\s*:\s*"tfdpx\.({kinds})/'.encode()
    return re.search(form, path.read_bytes()) is not None


def record_in(path):
    """Returns the `Record` in a file. If the file has only a ledger, `record.data` is None."""
    if path.suffix == ".keras" or path.name == records.FILE or _is(path, "Record"):
        record = records.read(path)
        if record is not None:
            return record
    if path.name.endswith((".keras", ".weights.h5")) or _is_model(path):
        ledger = _ledger_in(path)
    elif _is(path, "Ledger") or path.suffix == ".jsonl":
        ledger = Ledger.load(path)
    elif _OF_TENSORFLOW.fullmatch(path.name):
        raise ValueError(
            f"The file {path} is of tf.train.Checkpoint, from which only TensorFlow reads the "
            "ledger: restore it into its model, and save this as a .keras file."
        )
    else:
        raise ValueError(
            f"The file {path} is neither a record, a model nor a ledger. Pages and texts are for "
            f"people: give {records.FILE} or {MODEL} of its run, or the folder {path.parent} if "
            "it holds them. Unpack an archive first."
        )
    return Record("a file of a ledger", None, ledger, None)


def _ledger_in(path):
    """Returns the `Ledger` in the file of a model that was saved with its private optimizer."""
    weights = path
    if _start(path) != _HDF5:
        with zipfile.ZipFile(path) as archive:
            weights = io.BytesIO(archive.read(_WEIGHTS))
    with h5py.File(weights) as file:
        arrays = file.get("optimizer/vars", {})
        ledger = saved.read({name: np.array(arrays[name]) for name in arrays})
    if ledger is None:
        raise ValueError(
            f"The file {path} holds neither the record of a run nor a private optimizer, so what "
            "its weights have spent is unknown. Save the compiled model, with its optimizer."
        )
    return ledger


def check_model(folder, records_by_file):
    """Compares the model of a run with the run's record, and makes each training count only once.

    If both state the same privacy loss, the model is removed from `records_by_file`. If the user
    trained the model further and saved it to the same file, the file has only a ledger. Then the
    model stays in the dict and counts as another training on the same data.

    Args:
        folder: `pathlib.Path` of the run.
        records_by_file: Dict from files to their `Record`s. The function may remove the model.

    Raises:
        ValueError: If the model is of another run.
    """
    about, path = records_by_file[folder / records.FILE], folder / MODEL
    record = records_by_file.pop(path, about)
    if record == about or record.ledger == about.ledger:
        return
    both = (about.ledger + record.ledger).entries
    if record.data is not None or not set(both) <= set(record.ledger.entries):
        raise ValueError(
            f"The files {path} and {folder / records.FILE} are not of one run: the model does not "
            "hold what the record says was spent. Put the run's own file back, or name each file "
            "alone, which adds up both."
        )
    records_by_file[path] = dataclasses.replace(
        about, program="trained on since", ledger=record.ledger, results={}
    )
