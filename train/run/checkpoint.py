"""The folder of an unfinished run: what it was asked for, and for pre-training its last state."""

import dataclasses
import hashlib
import json
import pathlib
import secrets
import shutil

import keras
import numpy as np
from absl import flags

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx._keras import saving_internals
from tfdpx.train.config import run_flags
from tfdpx.train.errors import UserError, checking_flags

# Fields of a run that may change on a resume: they neither touch what is learned nor the guarantee.
FREE = ("report_every", "seed", "public_test")
# Flags that are no settings, and that a resume takes from the run unless they are given.
_FLAGS = ("data_dir", "log_private_metrics", "strategy", "tpu", "cpu_devices")


def facts(data, paths):
    """What a run has found, besides its settings: a dict of JSON values by what they are called.

    Args:
        data: `images.ImageData`.
        paths: Paths of the files that the run starts from.
    """
    found = {
        "num_examples": data.num_train,
        "class_names": list(data.class_names),
        "image_shape": list(data.image_shape),
    }
    for path in paths:
        digest = hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8)
        found[f"file {path} (a hash)"] = digest.hexdigest()
    return found


def asked(base, settings):
    """What a run is asked for, JSON values to write down as it begins. No seed is in it.

    Args:
        base: String, the preset or recipe.
        settings: Dataclass of the settings, before anything is chosen for the user.
    """
    given = {name: flags.FLAGS[name].value for name in _FLAGS if name in flags.FLAGS}
    return {"base": base, "settings": _without_seed(dataclasses.asdict(settings)), "flags": given}


def resumed(kind, base, given):
    """The settings of the unfinished run that --resume names; None without one.

    Flags that were not given, such as --data_dir, become what the run had.

    Args:
        kind: The dataclass of the settings.
        base: Pair of the flag of the preset or recipe and its value, None where it is not given.
        given: Dict of the settings that the flags give; None for all others.

    Raises:
        UserError: If a flag contradicts the run, or there is none and nothing else is asked for.
    """
    path = run_flags.WORKDIR.value
    if not run_flags.RESUME.value or path is None:
        return None
    run = begun(path)
    named = {name: value for name, value in {**dict([base]), **given}.items() if value is not None}
    if run is None and not named:
        raise UserError(
            f"There is no unfinished run in --workdir={path}. Name the folder of one, or give the "
            "flags of a new run."
        )
    if run is None or not run["asked"]:
        return None
    run, chosen = run["asked"], run["settings"]
    recorded = {base[0]: run["base"], **run["settings"]}
    for name, value in named.items():
        known = (recorded.get(name), chosen.get(name))
        if name not in FREE and json.loads(json.dumps(value)) not in known:
            raise UserError(
                f"Cannot resume the run in --workdir={path} with other settings: it began with "
                f"{name}={recorded.get(name)}. Received: {name}={value}. Leave the flag out, "
                "or choose another --workdir."
            )
    for name, value in run["flags"].items():
        if flags.FLAGS[name].using_default_value:
            flags.FLAGS[name].value = value
    free = {name: value for name, value in named.items() if name in FREE}
    return kind(**{**run["settings"], **free})


def begun(workdir):
    """What an unfinished run wrote down as it began, a dict; None where there is none.

    Args:
        workdir: Folder of the run.

    Raises:
        UserError: If it is damaged.
    """
    with checking_flags():
        return resumable.begun(_file(workdir))


class RunFolder:
    """The folder `<workdir>/checkpoint`, which an unfinished run leaves behind.

    It holds no seed of noise or draws. With individual accounting the norms of examples are in it:
    its owner alone may read it, and `remove` deletes it when the run ends.

    Args:
        workdir: Folder of the run.
        settings: Dict of JSON values that determine the run, its data among them. A resume with
            others is refused: its epsilon would be wrong.
        resume: Whether to resume what the folder holds.
        entropy: Int from which seeds are drawn that `settings` does not give; the same on every
            host. None asks the operating system.
        asked: Dict of JSON values that was asked for, or None; a resumed run keeps its own.

    Attributes:
        path: `pathlib.Path`.
        seeds: Dict of two ints, the same after a resume: of the initial weights, and of the batches
            of a pre-training, which is not private.

    Raises:
        UserError: If the folder holds an unfinished run and `resume` is False, or one with other
            settings.
    """

    def __init__(self, workdir, settings, resume, entropy=None, asked=None):
        self._file = _file(workdir)
        self.path = self._file.parent
        self._settings, self._asked = _without_seed(settings), asked
        run = begun(workdir)
        if run is None:
            self.seeds = _draw_seeds(entropy if settings["seed"] is None else settings["seed"])
            return
        if not resume:
            raise UserError(
                f"The folder {self.path.parent} holds an unfinished run. Add --resume to continue "
                "with it, or choose another --workdir."
            )
        holder = f"Cannot resume the run in {workdir} with other settings or data: it began"
        remedy = "Its epsilon holds for what it began with; use that, or another --workdir."
        with checking_flags():
            resumable.check_same(run["settings"], self._settings, holder, remedy, FREE)
        self.seeds, self._asked = run["seeds"], run["asked"] or asked

    def begin(self):
        """Writes down what has begun; nothing is on disk before."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        resumable.save(self._file, self._settings, seeds=self.seeds, asked=self._asked)

    def remove(self):
        """Deletes the folder."""
        shutil.rmtree(self.path)


class LastState(keras.callbacks.Callback):
    """Saves model and optimizer of a pre-training after every Keras epoch.

    Args:
        folder: The `RunFolder`.
        steps: Updates of the whole run. The state after the last one is not saved: a run that is
            cut off between its end and its report takes its last epoch again, and reports that.
    """

    def __init__(self, folder, steps):
        super().__init__()
        self._folder, self._steps = folder, steps
        self._weights = folder.path / "latest.weights.h5"

    def restore(self, model):
        """Loads the last save, if there is one, into a compiled model.

        Args:
            model: The compiled model of the run.
        """
        if self._weights.exists():
            model.optimizer.build(model.trainable_variables)
            model.load_weights(self._weights)

    def on_train_begin(self, logs=None):
        """Begins the folder."""
        del logs
        self._folder.begin()

    def on_epoch_end(self, epoch, logs=None):
        """Saves, but for the end of the run."""
        del epoch, logs
        if int(self.model.optimizer.iterations) < self._steps:
            self.save()

    def save(self):
        """Saves the state between two updates."""
        files.write(self._weights, saving_internals.weights_file(self.model))


def _file(workdir):
    return pathlib.Path(workdir) / "checkpoint" / "settings.json"


def _without_seed(settings):
    """Settings for a file: who knows the seed can take the noise away."""
    return {name: value for name, value in settings.items() if name != "seed"}


def _draw_seeds(seed):
    """Returns unrelated seeds for each use, from the operating system unless `seed` is given."""
    root = np.random.SeedSequence(secrets.randbits(128) if seed is None else seed)
    initial, sampling = root.spawn(2)
    # Python ints for JSON; Keras's seed has 32 bits.
    return {
        "initial_weights": int(initial.generate_state(1)[0]),
        "sampling": int.from_bytes(sampling.generate_state(4).astype("<u4").tobytes(), "little"),
    }
