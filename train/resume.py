"""Creates the folder of a run, and resumes a run after Ctrl-C.

An unfinished run leaves a folder `<workdir>/checkpoint`, with its settings and the identity of the
data. From this folder, `--workdir=PATH --resume` continues the run without other flags.
"""

import contextlib
import dataclasses
import pathlib
import shlex
import shutil
import signal
import sys

import keras
import numpy as np
from absl import flags

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx.accounting import record as records
from tfdpx.train.command import typed
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.settings import RESUME, WORKDIR, Settings

# Settings that may change on a resume, because they affect neither weights nor guarantee.
FREE = ("report_every", "seed", "public_test", "threshold")
# Flags that are not fields of `Settings`. If the user does not set them, a resumed run uses the
# values from its start.
_FLAGS = ("data_dir", "strategy", "tpu", "cpu_devices")


@contextlib.contextmanager
def working_folder(path, is_chief):
    """Context manager that creates the folder of a run. In its block, Ctrl-C ends the program.

    After Ctrl-C, the program prints how to resume the run. If the block fails, new empty folders
    are removed.

    Args:
        path: String, the path of the folder.
        is_chief: Bool, whether this process writes the files.

    Yields:
        `pathlib.Path`.

    Raises:
        UserError: If the folder cannot be written, or has a finished run.
    """
    workdir = pathlib.Path(path)
    try:
        with locked_folder(workdir) if is_chief else contextlib.nullcontext():
            # A run that ended while it wrote its page has a record, and a checkpoint to resume.
            if (workdir / records.FILE).exists() and not (RESUME.value and begun(workdir)):
                raise UserError(
                    f"The folder --workdir={path} holds a finished run. Choose another, or delete "
                    "it."
                )
            yield workdir
    except KeyboardInterrupt as error:
        _end(workdir, error)


@contextlib.contextmanager
def locked_folder(workdir):
    """Context manager that creates a folder and locks it for this process and its children.

    If the block fails, new empty folders are removed.

    Args:
        workdir: `pathlib.Path`.

    Yields:
        File descriptor that holds the lock, or None, see `_files.locked`.

    Raises:
        UserError: If the folder cannot be written, or another process has locked it.
    """
    # Missing parents are created, too, for example `runs` for a first run.
    missing = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    try:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / ".writable").touch()
            (workdir / ".writable").unlink()
            locking = contextlib.ExitStack()
            lock = locking.enter_context(files.locked(workdir, "Another run writes to the folder"))
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"Cannot write to --workdir={workdir}; name another folder. {error}"
            ) from error
        with locking:
            yield lock
    except BaseException:
        with contextlib.suppress(OSError):  # The folder is not empty, or was never created.
            for folder in missing:
                folder.rmdir()
        raise


def _end(workdir, error):
    command = f"{typed('classify')} --workdir={shlex.quote(str(workdir))} --resume"
    text = "interrupted; the last save is intact, and later updates are made again."
    if error.args:
        text = f"interrupted at update {error.args[0]}; nothing is lost."
    text += f" Go on: {command}"
    if not begun(workdir):
        text = "interrupted before the first update; start it again with the same command."
    print("\n" * sys.stdout.isatty(), end="", flush=True)
    print(f"tfdpx.train.classify: {text}", file=sys.stderr, flush=True)
    sys.exit(128 + signal.SIGINT)  # The usual exit status after Ctrl-C.


class SavingInterruption(keras.callbacks.Callback):
    """Delays Ctrl-C until the current update is done and saved; a second Ctrl-C ends at once.

    Before the first update there is nothing to save, so Ctrl-C ends the program at once.

    Args:
        save: Function without arguments that saves the run. It is called between two updates.
    """

    def __init__(self, save):
        super().__init__()
        self._save, self._asked = save, False

    def _ask(self, number, frame):
        del number, frame
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._asked = True

    def on_train_batch_begin(self, batch, logs=None):
        """After Ctrl-C, saves the run and ends it before the next update."""
        del batch, logs
        if self._asked:
            self._save()
            raise KeyboardInterrupt(int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch, logs=None):
        """Installs the handler of Ctrl-C, except in background jobs, which ignore Ctrl-C."""
        del batch, logs
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler and not self._asked:
            signal.signal(signal.SIGINT, self._ask)

    def on_train_end(self, logs=None):
        """Ends the program if Ctrl-C came in the last update, or else restores the old handler."""
        del logs
        if self._asked:
            raise KeyboardInterrupt(int(self.model.optimizer.iterations))
        if signal.getsignal(signal.SIGINT) == self._ask:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def resumed(preset, flag_values):
    """Returns the settings of the unfinished run that --resume continues, or None.

    The function also sets flags that are not settings, for example --data_dir, to the values of
    that run, unless the user sets them.

    Args:
        preset: String, the value of --preset, or None.
        flag_values: Dict from the fields of `Settings` to the values of flags; None if not set.

    Returns:
        `Settings`, or None.

    Raises:
        UserError: If a flag contradicts the run, or if there is no unfinished run and no flag
            describes a new one.
    """
    path = WORKDIR.value
    if not RESUME.value or path is None:
        return None
    run = begun(path)
    flag_values = {"preset": preset, **flag_values}
    flag_values = {name: value for name, value in flag_values.items() if value is not None}
    if run is None and not flag_values:
        raise UserError(
            f"There is no unfinished run in --workdir={path}. Name the folder of one, or give the "
            "flags of a new run."
        )
    if run is None:
        return None
    holder = f"Cannot resume the run in --workdir={path} with other settings: it began"
    remedy = "Leave the flag out, or choose another --workdir."
    try:
        began = {"preset": run["base"], **run["settings"]}
        with checking_flags():
            resumable.check_same(began, began | flag_values, holder, remedy, FREE)
        free = {name: value for name, value in flag_values.items() if name in FREE}
        settings = Settings(**run["settings"] | free)
    except (KeyError, TypeError) as error:
        raise UserError(
            f"The folder {path} holds an unfinished run of another version of tfdpx, and only that "
            "version can continue it. Choose another --workdir."
        ) from error
    for name, value in run["flags"].items():
        if flags.FLAGS[name].using_default_value:
            flags.FLAGS[name].value = value
    return settings


def begun(workdir):
    """Returns the dict that an unfinished run wrote at its start; None if there is no such run.

    Args:
        workdir: Folder of the run.

    Raises:
        UserError: If the file is damaged.
    """
    with checking_flags():
        contents = resumable.begun(_file(workdir))
    return contents and {**contents.get("run", {}), "facts": contents["settings"]}


def facts(data, identity, paths):
    """Returns a dict of JSON values that describe a run's data and the files that it starts from.

    Args:
        data: `images.ImageData`.
        identity: `DatasetId` of the data.
        paths: Paths of the files with weights.
    """
    hashes = {f"file {p} (a hash)": files.digest_of(pathlib.Path(p).read_bytes()) for p in paths}
    return hashes | {
        "data": identity.identifier or identity.name,  # A folder may be renamed.
        "num_examples": data.num_train,
        "class_names": list(data.class_names),
        "image_shape": list(data.image_shape),
    }


class RunFolder:
    """The folder `<workdir>/checkpoint` of an unfinished run.

    With individual accounting the folder holds gradient norms of examples, which are private. So
    only its owner can read the folder, and `remove` deletes it when the run ends. The folder does
    not contain the seed of noise or sampling.

    Args:
        workdir: Folder of the run.
        preset: String, the name of the preset.
        settings: The `Settings` that the user asked for.
        facts: Dict of other JSON values that determine the run. The run cannot be resumed with
            other facts, because epsilon would be wrong.
        entropy: Int from which seeds are derived if `settings` has no seed. It must be the same on
            every host. With None, the operating system supplies random numbers.

    Attributes:
        path: `pathlib.Path`.
        seed: Int, the seed of the initial weights. A resume does not change it.

    Raises:
        UserError: If the folder holds an unfinished run and --resume is not set, or holds a run on
            other data.
    """

    def __init__(self, workdir, preset, settings, facts, entropy=None):
        self._file = _file(workdir)
        self.path = self._file.parent
        run = begun(workdir)
        if run is None:
            root = np.random.SeedSequence(entropy if settings.seed is None else settings.seed)
            self.seed = int(root.spawn(1)[0].generate_state(1)[0])  # Keras's seed has 32 bits.
        elif not RESUME.value:
            raise UserError(
                f"The folder {workdir} holds an unfinished run. Add --resume to continue with it, "
                "or choose another --workdir."
            )
        else:
            holder = f"Cannot resume the run in {workdir} with other settings or data: it began"
            remedy = (
                "Its epsilon holds only for these. Use them again, or choose another --workdir."
            )
            with checking_flags():
                resumable.check_same(run["facts"], facts, holder, remedy)
            self.seed, preset = run["seed"], run["base"]
        saved = dataclasses.asdict(settings)
        del saved["seed"]  # Anyone with the seed could remove the noise.
        flag_values = {name: flags.FLAGS[name].value for name in _FLAGS}
        self._facts = facts
        self._run = dict(base=preset, settings=saved, flags=flag_values, seed=self.seed)

    def begin(self):
        """Creates the folder and writes the settings of the run into it."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        resumable.save(self._file, self._facts, run=self._run)

    def remove(self):
        """Deletes the folder."""
        shutil.rmtree(self.path)


def _file(workdir):
    return pathlib.Path(workdir) / "checkpoint" / "settings.json"
