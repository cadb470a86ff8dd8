"""The records of finished runs, wherever they lie: folders, model files, and files of ledgers."""

import dataclasses
import io
import os
import pathlib
import zipfile
import zlib

import h5py
import numpy as np

from tfdpx.accounting import record as records
from tfdpx.accounting import saved as saved_ledgers
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import steps
from tfdpx.train.errors import UserError

# Folders that a run and a tuning leave behind where they were cut off.
_UNFINISHED, _TUNING = "checkpoint", ".private_tuning-"


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """A record, and the file that it was read from.

    Args:
        path: `pathlib.Path`.
        record: `Record`.
    """

    path: pathlib.Path
    record: Record

    @property
    def about(self):
        """String, a line on it."""
        record = self.record
        data = record.data.name if record.data else "data that the file does not name"
        what = record.results.get("model") or record.results.get("method") or "weights"
        spent = steps(record.ledger).rstrip(".")
        searched = ""
        if not record.is_search_paid:
            searched = f"; searched by {record.searched}, which no epsilon covers"
        return f"{record.program}, {what} on {data}, {record.sampling} sampling: {spent}{searched}"


def read(path, flag="workdir", all_spent=True):
    """The runs of a working folder, of all folders in it, or of one file.

    Args:
        path: String: a folder, a `record.json`, a `.keras` file, or a file of `Ledger.save`.
        flag: String, the flag that names it.
        all_spent: Bool, whether nothing that was spent may be missing: of a folder all `.keras`
            files are read too, and an unfinished run is refused.

    Returns:
        List of `RecordedRun`.

    Raises:
        UserError: If nothing there says what was spent, or a run is not finished.
    """
    received = f"Received: --{flag}={path}."
    path = pathlib.Path(path).expanduser()
    try:
        if path.is_file():
            return [RecordedRun(path, _of_file(path))]
        files, unfinished = _below(path)
        if not all_spent:
            files = [file for file in files if file.name == records.FILE]
        found = [RecordedRun(file, _of_file(file)) for file in files]
    except (OSError, ValueError, KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise UserError(f"{received} {error}") from error
    for folder in unfinished if all_spent or not found else ():
        if folder.name != _UNFINISHED:
            raise UserError(
                f"The tuning in {folder.parent} was cut off, and no file says what its runs have "
                f"spent together: delete {folder}. {received}"
            )
        if folder.parent not in {file.parent for file in files if file.name == records.FILE}:
            raise UserError(
                f"The run in {folder.parent} is not finished, and only its checkpoint knows what it"
                " has spent: finish it with --resume, or restore its model and read "
                f"`model.optimizer.ledger`. {received}"
            )
    if not found:
        raise UserError(
            f"Nothing in {path} says what was spent: it holds no {records.FILE}, and is neither a "
            f".keras file nor one of a ledger. {received} Name the folder of a finished run."
        )
    return found


def _below(path):
    """Files of records in a folder, links followed, and folders of checkpoints: sorted."""
    files, unfinished, walked = [], [], set()
    for parent, folders, names in os.walk(path, onerror=_refuse, followlinks=True):
        folder, there = pathlib.Path(parent), os.path.realpath(parent)
        if there in walked:  # A link that leads back.
            folders.clear()
            continue
        walked.add(there)
        unfinished += [
            folder / name for name in folders if name == _UNFINISHED or name.startswith(_TUNING)
        ]
        folders[:] = [name for name in folders if name != _UNFINISHED]
        # The model of a run says what its record does.
        own = "model.keras" if records.FILE in names else None
        files += [
            folder / name
            for name in names
            if name == records.FILE or (name.endswith(".keras") and name != own)
        ]
    return sorted(files), sorted(unfinished)


def _refuse(error):
    if not isinstance(error, FileNotFoundError):
        raise error


def _of_file(path):
    if path.suffix == ".keras":
        record = records.read(path)
        if record is not None:
            return record
        ledger = _ledger_in(path)
    elif path.name == records.FILE or b'"tfdpx.Record/' in path.read_bytes()[:100]:
        return records.read(path)
    else:
        ledger = Ledger.load(path)
    return Record("a file of a ledger", None, ledger, None)


def _ledger_in(path):
    """The `Ledger` that Keras saved with a private optimizer, read without Keras."""
    with zipfile.ZipFile(path) as archive:
        weights = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(weights) as file:
        saved = file.get("optimizer/vars", {})
        ledger = saved_ledgers.read({name: np.array(saved[name]) for name in saved})
        if ledger is None:
            raise ValueError(
                "The file holds neither the record of a run nor a private optimizer, so nobody "
                "knows what its weights have spent. Save the compiled model, with its optimizer."
            )
    return ledger
