"""Lets an interrupted run go on exactly where it was, with the same result and the same epsilon.

Files of Keras hold no secrets, so a run that goes on from one of them has other draws and noise.
The checkpoint of this module holds all of it. Two runs that go on from one checkpoint add the same
noise to the same sums, or else their difference would show the sums without noise: so whatever
would change the sums is refused.
"""

import contextlib
import hashlib
import io
import os
import pathlib
import secrets

import keras
import numpy as np
import tensorflow as tf

from tfdpx import augmult, keras_internals
from tfdpx._arguments import is_integer, require
from tfdpx.run import files, identity

_FORMAT = "tfdpx.Checkpoint/2"
_FILES = ("tfdpx-*.weights.h5", "tfdpx-*.norms.npz")
# What the fit of a head leaves: `tfdpx.heads.journal`.
_FILES_OF_HEADS = ("fit.json", "fit.json.new", "tfdpx-*.release", "tfdpx-*.release.new")


class Checkpoint(keras.callbacks.Callback):
    """Saves the whole run as it trains, and goes on with it when `fit` is called again.

    Like `keras.callbacks.BackupAndRestore`: with the same callback and the same arguments, `fit`
    restores what the folder holds before its first step, and begins at the epoch after it. The
    resumed run ends with the weights, bit by bit, and the ledger of one that was not interrupted.
    The data must be `plan.batches(x, y, optimizer=model.optimizer)`. Heads take one too, as
    `head.fit(..., checkpoint=Checkpoint(...))`: see there what theirs holds.

    The folder holds the weights, the optimizer's state and its ledger, the norms of individual
    accounting if there is any, and the seeds of noise and
    draws, on whose secrecy the guarantee rests: who can read them can subtract the noise. Its owner
    alone may read it. Never release it; `remove()` deletes what was saved. Training on without the
    callback, or on other data, leaves the run: noise and draws are fresh from there on.

    Args:
        directory: Path of a folder of its own, made if needed.
        save_freq: `"epoch"`, or an int: a save after every so many updates too. A run that is
            resumed begins with a whole epoch.
        write: Bool. On several hosts, all restore and one alone may write.

    Raises:
        ValueError: By `fit`, if the folder holds a run of another plan, optimizer, model, loss or
            data set, or a damaged one; each by name.
    """

    def __init__(self, directory, save_freq="epoch", write=True):
        super().__init__()
        fits = save_freq == "epoch" or is_integer(save_freq, 1)
        require(fits, "save_freq", save_freq, 'be "epoch" or an int >= 1')
        self.directory = pathlib.Path(directory)
        self.save_freq = save_freq
        self._write = write
        self._identity = None
        self._epoch = self._saved = 0

    @property
    def exists(self):
        """Bool: whether the folder holds a run."""
        return self._record.exists()

    @property
    def saved_updates(self):
        """Int: the updates of the run that the folder holds; 0 if it holds none."""
        return self._read()["run"]["updates"] if self.exists else 0

    def prepare(self, model, data):
        """Called by `fit` before its first step: restores what the folder holds, if anything.

        Args:
            model: The compiled model.
            data: What `fit` trains on.
        """
        optimizer = keras_internals.innermost(model.optimizer)
        augmult.build(model, *identity.example_of(data))
        optimizer.build(model.trainable_variables)
        self._identity = identity.identity(model, data)
        self._epoch = 0
        if self._write:
            files.make_folder(self.directory)
        if not self.exists:
            optimizer.leave_shared_run()
            return
        record = self._read()
        run, saved = optimizer.run, record["run"]
        if run.number == saved["number"] and run.updates >= saved["updates"]:
            self._epoch = record["epoch"]
            keras_internals.set_initial_epoch(model, self._epoch)
            # The run that wrote it goes on: with the same noise only if another one would, too.
            if self._identity != record["identity"] or _digest(model) != record["state"]:
                optimizer.take_over(None)
            return
        identity.check_same(record["identity"], self._identity, self.directory)
        with _unchanged_on_error(model):
            self._load(model, optimizer, record)
        self._epoch = record["epoch"]
        keras_internals.set_initial_epoch(model, self._epoch)
        optimizer.take_over(saved)

    def _load(self, model, optimizer, record):
        model.load_weights(self.directory / record["weights"])
        for state, value in zip(keras_internals.seed_states(model), record["random"], strict=True):
            state.assign(value)
        if optimizer.estimates is not None:
            with np.load(self.directory / record["norms"], allow_pickle=False) as saved_norms:
                optimizer.estimates.restore(dict(saved_norms))
        if _digest(model) != record["state"]:
            raise ValueError(
                f"The checkpoint in {os.fspath(self.directory)!r} does not hold all of this "
                "model's state. A layer keeps some that Keras does not save."
            )

    def on_train_begin(self, logs=None):
        """Refuses other optimizers; from here on the folder may hold what is in memory."""
        if self._identity is None:
            raise ValueError(
                "`tfdpx.callbacks.Checkpoint` works with a tfdpx optimizer only. Received: an "
                f"optimizer of type {type(self.model.optimizer).__name__}. Use "
                "keras.callbacks.BackupAndRestore."
            )
        self._run.is_shared = True
        self._saved = self._run.updates

    def on_train_batch_end(self, batch, logs=None):
        """Saves, where `save_freq` is a number and it is time."""
        if self.save_freq != "epoch" and self._run.updates - self._saved >= self.save_freq:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        """Saves. Not later: at the end of `fit` Keras may put averages in place of the weights."""
        self._epoch = epoch + 1
        self._save()

    def remove(self):
        """Deletes what was saved, and the folder if there is nothing else in it."""
        of_heads = [path for name in _FILES_OF_HEADS for path in self.directory.glob(name)]
        for path in [self._record, files.beside(self._record), *self._files(), *of_heads]:
            path.unlink(missing_ok=True)
        if self.directory.exists() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    @property
    def _record(self):
        return self.directory / "run.json"

    @property
    def _run(self):
        return keras_internals.innermost(self.model.optimizer).run

    def _files(self):
        """What was saved beside the record: weights, and norms of individual accounting."""
        return [path for pattern in _FILES for path in self.directory.glob(pattern)]

    def _save(self):
        """Writes the weights, then the record that names them: a whole save always exists."""
        self._saved, self._run.is_shared = self._run.updates, True
        if not self._write:
            return
        # A name of its own each time: the last save stays whole until the record names this one.
        name = f"tfdpx-{self._saved:09d}-{secrets.token_hex(4)}"
        weights = self.directory / f"{name}.weights.h5"
        norms = self.directory / f"{name}.norms.npz"
        try:
            with files.removed_on_error(weights, norms):
                self._write_all(weights, norms)
        except OSError as error:
            raise OSError(
                error.errno,
                f"The run could not be saved in {os.fspath(self.directory)!r}: {error}. The save "
                "before is whole: make room, and call `fit` again to go on from it",
            ) from error
        for old in self._files():
            if old not in (weights, norms):
                old.unlink()

    def _write_all(self, weights, norms):
        optimizer = keras_internals.innermost(self.model.optimizer)
        files.make_folder(self.directory)
        _write(weights, keras_internals.weights_file(self.model))
        saved = [weights]
        if optimizer.estimates is not None:
            content = io.BytesIO()
            np.savez(content, **optimizer.estimates.state())
            _write(norms, content.getvalue())
            saved.append(norms)
        record = {
            "format": _FORMAT,
            "identity": self._identity,
            "epoch": self._epoch,
            "weights": weights.name,
            "norms": norms.name if norms in saved else None,
            "digests": {path.name: files.digest_of_file(path) for path in saved},
            "state": _digest(self.model),
            "random": [
                keras.ops.convert_to_numpy(state).tolist()
                for state in keras_internals.seed_states(self.model)
            ],
            "run": self._run.state(),
        }
        files.write(self._record, files.sealed(record))

    def _read(self):
        where = os.fspath(self.directory)
        try:
            record = files.opened(self._record.read_bytes(), _FORMAT)
            for name, digest in record["digests"].items():
                if files.digest_of_file(self.directory / name) != digest:
                    raise ValueError(f"{name} is not the file that was saved")
        except (OSError, ValueError) as error:
            raise ValueError(
                f"The checkpoint in {where!r} is damaged: {error}. Restore the folder from a copy, "
                "or remove it to begin anew: what its run spent on the data was still spent."
            ) from error
        return record


def _write(path, content):
    """Writes a file that no record names yet."""
    path.write_bytes(content)
    files.flush(path)


def restore_for_fit(model, callbacks, data):
    """Lets the `Checkpoint` among the callbacks of `fit` restore, before anything else begins.

    Args:
        model: The compiled model.
        callbacks: What `fit` was given: a callback, a list of them, a `CallbackList` or None.
        data: What `fit` trains on.

    Returns:
        Bool: whether there is one.

    Raises:
        ValueError: If there are several.
    """
    found = [
        callback
        for callback in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
        if isinstance(callback, Checkpoint)
    ]
    if len(found) > 1:
        raise ValueError(
            f"`fit` takes one `tfdpx.callbacks.Checkpoint`. Received: {len(found)}. Two folders "
            "would hold one run, which may go on once."
        )
    for callback in found:
        callback.prepare(model, data)
    return bool(found)


def _digest(model):
    """A hash of what training changes: weights, the optimizer's state, norms, random layers."""
    digest, optimizer = hashlib.blake2b(), keras_internals.innermost(model.optimizer)
    variables = (*model.weights, *optimizer.variables, *keras_internals.seed_states(model))
    arrays = [keras.ops.convert_to_numpy(variable) for variable in variables]
    if optimizer.estimates is not None:
        arrays += optimizer.estimates.state().values()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def _unchanged_on_error(model):
    """Within it an error leaves weights and the optimizer's state as they were, but the ledger."""
    optimizer = keras_internals.innermost(model.optimizer)
    variables = [*model.variables, *optimizer.variables, *keras_internals.seed_states(model)]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        raise
