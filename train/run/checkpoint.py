"""The folder of an unfinished run: its settings, and for pre-training its last state."""

import hashlib
import json
import os
import pathlib
import secrets
import shutil

import keras
import numpy as np

from tfdpx import _files as files
from tfdpx._keras import saving_internals
from tfdpx.train.config.errors import UserError

# Fields of a run that may change on a resume: they neither touch what is learned nor the guarantee.
FREE = ("report_every", "seed")


def facts(data, files):
    """What a run has found, besides its settings: a dict of JSON values by what they are called.

    Args:
        data: `loading.ImageData`.
        files: Paths of the files that the run starts from.
    """
    found = {
        "num_examples": data.num_train,
        "class_names": list(data.class_names),
        "image_shape": list(data.image_shape),
    }
    for path in files:
        digest = hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8)
        found[f"file {path} (a hash)"] = digest.hexdigest()
    return found


def begun(workdir):
    """What an unfinished run wrote down as it began, a dict; None where there is none.

    Args:
        workdir: Folder of the run.
    """
    file = _file(workdir)
    return json.loads(file.read_text()) if file.exists() else None


class RunFolder:
    """The folder `<workdir>/checkpoint`, which an unfinished run leaves behind.

    It holds no seed of noise or draws. With individual accounting the norms of examples are in it:
    its owner alone may read it, and `remove` deletes it when the run ends.

    Args:
        workdir: Folder of the run.
        settings: Dict of JSON values that determine the run, its data among them. A resume with
            others is refused: its epsilon would be wrong.
        resume: Whether to go on with what the folder holds.
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
        self._settings, self._asked = settings, asked
        if self._file.exists():
            self.seeds = self._read(resume)
        else:
            self.seeds = _draw_seeds(entropy if settings["seed"] is None else settings["seed"])

    def begin(self):
        """Writes down what has begun; nothing is on disk before."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        fresh = self.path / "next.settings.json"
        # Not the seed: whoever knows it can take the noise away.
        settings = {name: value for name, value in self._settings.items() if name != "seed"}
        run = {"settings": settings, "seeds": self.seeds, "asked": self._asked}
        fresh.write_text(json.dumps(run))
        os.replace(fresh, self._file)

    def remove(self):
        """Deletes the folder."""
        shutil.rmtree(self.path)

    def _read(self, resume):
        if not resume:
            raise UserError(
                f"The folder {self.path.parent} holds an unfinished run. Add --resume to go on "
                "with it, or choose another --workdir."
            )
        run = json.loads(self._file.read_text())
        self._asked = run.get("asked") or self._asked
        for name, value in self._settings.items():
            if name not in FREE and run["settings"].get(name) != value:
                raise UserError(
                    f"Cannot resume the run in {self.path.parent} with other settings or data: it "
                    f"began with {name}={run['settings'].get(name)}. Received: {name}={value}. Its "
                    "epsilon holds for what it began with; use that, or another --workdir."
                )
        return run["seeds"]


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
        """Saves beside the last save and then replaces it, so that a whole one always exists."""
        del epoch, logs
        if int(self.model.optimizer.iterations) < self._steps:
            self.save()

    def save(self):
        """Saves the state between two updates."""
        files.write(self._weights, saving_internals.weights_file(self.model))


def _file(workdir):
    return pathlib.Path(workdir) / "checkpoint" / "settings.json"


def _draw_seeds(seed):
    """Returns unrelated seeds for each use, from the operating system unless `seed` is given."""
    root = np.random.SeedSequence(secrets.randbits(128) if seed is None else seed)
    initial, sampling = root.spawn(2)
    # Python ints for JSON; Keras's seed has 32 bits.
    return {
        "initial_weights": int(initial.generate_state(1)[0]),
        "sampling": int.from_bytes(sampling.generate_state(4).astype("<u4").tobytes(), "little"),
    }
