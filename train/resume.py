"""The folder of a run: made for it, left behind by Ctrl-C, and resumed.

An unfinished run leaves `<workdir>/checkpoint`, which says what was asked for and what the data
were, so that `--workdir=PATH --resume` alone goes on with it.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import secrets
import shlex
import shutil
import signal
import sys
import threading

import keras
import numpy as np
from absl import flags

from tfdpx import _resumable as resumable
from tfdpx.accounting import record as records
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.run_flags import RESUME, WORKDIR

# Fields of a run that may change on a resume: they touch neither the weights nor the guarantee.
FREE = ("report_every", "seed", "public_test", "threshold")
# Flags that are no settings, and that a resume takes from the run unless they are given.
_FLAGS = ("data_dir", "log_private_metrics", "strategy", "tpu", "cpu_devices")
# As shells have it: 128 and the number of the signal.
_STATUS = 130


@contextlib.contextmanager
def working_folder(program, path, is_chief=True):
    """Makes the folder of a run; within it, Ctrl-C ends the program with a line on how to resume.

    Where the block fails, folders that were made and that hold nothing are removed.

    Args:
        program: String, such as "classify".
        path: String.
        is_chief: Bool, whether this process is the one that writes.

    Yields:
        `pathlib.Path`.

    Raises:
        UserError: If the folder cannot be written, or holds a finished run.
    """
    workdir = pathlib.Path(path)
    # With those above it, as `runs` is made for a first run.
    missing = [folder for folder in (workdir, *workdir.parents) if not folder.exists()]
    try:
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
        yield workdir
    except BaseException as error:
        with contextlib.suppress(OSError):  # It holds something, or was never made.
            for folder in missing:
                folder.rmdir()
        if isinstance(error, KeyboardInterrupt):
            _end(program, workdir, error)
        raise


def _end(program, workdir, error):
    command = f"python -m tfdpx.train.{program} --workdir={shlex.quote(str(workdir))} --resume"
    if not begun(workdir):
        text = "interrupted before the first update; start it again with the same command."
    elif isinstance(error, Interrupted):
        text = f"interrupted at update {error.updates}; nothing is lost. Go on: {command}"
    else:
        text = (
            "interrupted; what was saved is whole, and updates after it are made again. "
            f"Go on: {command}"
        )
    print("\n" * sys.stdout.isatty(), end="", flush=True)
    print(f"tfdpx.train.{program}: {text}", file=sys.stderr, flush=True)
    sys.exit(_STATUS)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, after `updates` updates that a save holds."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates


class SavingInterruption(keras.callbacks.Callback):
    """Has Ctrl-C wait for the update under way and save it; a second Ctrl-C ends at once.

    So does the first before an update was made, where nothing is to be saved.

    Args:
        save: Function without arguments, called between two updates.
    """

    def __init__(self, save):
        super().__init__()
        self._save, self._asked, self._trained = save, False, False

    @contextlib.contextmanager
    def waiting(self):
        """Around `fit`; raises `Interrupted`."""
        in_main = threading.current_thread() is threading.main_thread()
        if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield  # Another program decides what Ctrl-C does, such as `nohup`.
            return
        signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._asked:  # In the last epoch, which was saved as it ended.
            raise Interrupted(int(self.model.optimizer.iterations))

    def _ask(self, number, frame):
        del number, frame
        if self._asked or not self._trained:
            raise KeyboardInterrupt
        self._asked = True

    def on_train_batch_begin(self, batch, logs=None):
        """Ends the training between two updates, if that was asked for."""
        del batch, logs
        if self._asked:
            self._save()
            raise Interrupted(int(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch, logs=None):
        """From here on there is something to save."""
        del batch, logs
        self._trained = True


def resumed(kind, base, given):
    """The settings of the unfinished run that --resume names; None without one.

    Flags that were not given, such as --data_dir, become what the run had.

    Args:
        kind: The dataclass of the settings.
        base: Pair of the flag of the preset or recipe and its value, None where it is not given.
        given: Dict of the settings that the flags give; None for all others.

    Returns:
        Settings of class `kind`, or None.

    Raises:
        UserError: If a flag contradicts the run, or there is none and nothing else is asked for.
    """
    path = WORKDIR.value
    if not RESUME.value or path is None:
        return None
    run = begun(path)
    given = {name: value for name, value in {**dict([base]), **given}.items() if value is not None}
    if run is None and not given:
        raise UserError(
            f"There is no unfinished run in --workdir={path}. Name the folder of one, or give the "
            "flags of a new run."
        )
    if run is None:
        return None
    if run["kind"] != kind.__name__:
        raise UserError(
            f"The unfinished run in --workdir={path} is of another program: it has {run['kind']}."
        )
    began, chosen = {base[0]: run["base"], **run["settings"]}, run["chosen"]
    for name, value in given.items():
        same = json.loads(json.dumps(value)) in (began.get(name), chosen.get(name))
        if name not in FREE and not same:
            raise UserError(
                f"Cannot resume the run in --workdir={path} with other settings: it began with "
                f"{name}={began.get(name)}. Received: {name}={value}. Leave the flag out, or "
                "choose another --workdir."
            )
    for name, value in run["flags"].items():
        if flags.FLAGS[name].using_default_value:
            flags.FLAGS[name].value = value
    free = {name: value for name, value in given.items() if name in FREE}
    return kind(**{**run["settings"], **free})


def begun(workdir):
    """A dict of what an unfinished run wrote down as it began; None where there is none.

    Args:
        workdir: Folder of the run.

    Raises:
        UserError: If it is damaged.
    """
    with checking_flags():
        kept = resumable.begun(_file(workdir))
    if kept and "run" not in kept:
        raise UserError(
            f"The folder {workdir} holds an unfinished run of an older version, which alone goes "
            "on with it. Choose another --workdir."
        )
    return kept and kept["run"] | {"facts": kept["settings"]}


def facts(data, identity, paths):
    """A dict of JSON values of the data and the files that a run starts from.

    Args:
        data: `images.ImageData`.
        identity: `DatasetId` of the account.
        paths: Paths of files.
    """
    return {
        "data": identity.identifier or identity.name,  # A folder may be renamed.
        "num_examples": data.num_train,
        "class_names": list(data.class_names),
        "image_shape": list(data.image_shape),
        **{f"file {path} (a hash)": digest(path) for path in paths},
    }


def digest(path):
    """A hash of a file, as hexadecimal digits."""
    return hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8).hexdigest()


class RunFolder:
    """The folder `<workdir>/checkpoint`, which an unfinished run leaves behind.

    It holds no seed of noise or draws. With individual accounting the norms of examples are in it:
    its owner alone may read it, and `remove` deletes it when the run ends.

    Args:
        workdir: Folder of the run.
        base: String, the preset or recipe, or None.
        settings: Dataclass of the settings that were asked for.
        chosen: The same, with nothing left open.
        facts: Dict of JSON values that determine the run besides these. A resume with others is
            refused: its epsilon would be wrong.
        entropy: Int from which seeds are drawn if `settings` has none; the same on every host.
            None asks the operating system.

    Attributes:
        path: `pathlib.Path`.
        seeds: Dict of two ints, the same after a resume: of the initial weights, and of the batches
            of a pre-training, which is not private.

    Raises:
        UserError: If the folder holds an unfinished run without --resume, or one of other data.
    """

    def __init__(self, workdir, base, settings, chosen, facts, entropy=None):
        self._file = _file(workdir)
        self.path = self._file.parent
        run = begun(workdir)
        if run is None:
            self.seeds = _draw_seeds(entropy if settings.seed is None else settings.seed)
        elif not RESUME.value:
            raise UserError(
                f"The folder {workdir} holds an unfinished run. Add --resume to continue with it, "
                "or choose another --workdir."
            )
        else:
            holder = f"Cannot resume the run in {workdir} with other settings or data: it began"
            remedy = "Its epsilon holds for what it began with; use that, or another --workdir."
            with checking_flags():
                resumable.check_same(run["facts"], facts, holder, remedy)
            self.seeds = run["seeds"]
        given = {name: flags.FLAGS[name].value for name in _FLAGS if name in flags.FLAGS}
        self._facts = facts
        self._run = {
            "kind": type(settings).__name__,
            "base": base,
            "settings": _without_seed(settings),
            "chosen": _without_seed(chosen),
            "flags": given,
            "seeds": self.seeds,
        }

    def begin(self):
        """Writes down what has begun; nothing is on disk before."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        resumable.save(self._file, self._facts, run=self._run)

    def remove(self):
        """Deletes the folder."""
        shutil.rmtree(self.path)


def _file(workdir):
    return pathlib.Path(workdir) / "checkpoint" / "settings.json"


def _without_seed(settings):
    """Settings for a file: with the seed the noise could be taken away."""
    return {name: v for name, v in dataclasses.asdict(settings).items() if name != "seed"}


def _draw_seeds(seed):
    """Returns unrelated seeds for each use, from the operating system if `seed` is None."""
    root = np.random.SeedSequence(secrets.randbits(128) if seed is None else seed)
    initial, sampling = root.spawn(2)
    # Python ints for JSON; Keras's seed has 32 bits.
    return {
        "initial_weights": int(initial.generate_state(1)[0]),
        "sampling": int.from_bytes(sampling.generate_state(4).astype("<u4").tobytes(), "little"),
    }
