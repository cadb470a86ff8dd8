"""The flags that say where a run reads and writes, of every binary that trains."""

import contextlib
import pathlib

from absl import flags

from tfdpx.accounting import record as records
from tfdpx.train.errors import UserError

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything written. Default: runs/<preset>-<date>-<time>."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with TensorFlow Datasets. Default: that library's own."
)
DOWNLOAD = flags.DEFINE_bool("download", False, "Fetch the data set if --data_dir has it not.")
RESUME = flags.DEFINE_bool("resume", False, "Go on with the unfinished run in --workdir, if any.")


@contextlib.contextmanager
def leaving_no_empty_folder(workdir):
    """Where its block fails, folders that it made and that hold nothing are removed.

    They are `workdir`, and those above it, as `runs` is made for a first run.

    Args:
        workdir: `pathlib.Path`, before it is made.
    """
    missing = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in missing:
            try:
                folder.rmdir()
            except OSError:  # It holds something, or was never made.
                break
        raise


def make_workdir(path, is_chief=True):
    """The folder of the run, made if need be.

    Args:
        path: String.
        is_chief: Bool, whether this process is the one that writes.

    Raises:
        UserError: If it cannot be written, or holds a finished run.
    """
    workdir = pathlib.Path(path)
    try:
        if is_chief:
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / ".writable").touch()
            (workdir / ".writable").unlink()
    except OSError as error:
        raise UserError(f"Cannot write to --workdir={path}: {error}.") from error
    if (workdir / records.FILE).exists():
        raise UserError(
            f"The folder --workdir={path} holds a finished run. Choose another, or delete it."
        )
    return workdir
