"""Lets an interrupted run go on exactly where it was, with the same result and the same epsilon.

Files of Keras hold no secrets, so a run that goes on from one of them has other draws and noise.
The checkpoint of this module holds all of it. Two runs that go on from one checkpoint add the same
noise to the same sums, or else their difference would show the sums without noise: so whatever
would change the sums is refused.
"""

import hashlib
import json
import os
import pathlib
import shutil
import types

import keras
import tensorflow as tf

from tfdpx import keras_hook, views
from tfdpx.draws import draws_of

_FORMAT = "tfdpx.Checkpoint/1"


class Checkpoint(keras.callbacks.Callback):
    """Saves the whole run as it trains, and goes on with it when `fit` is called again.

    Like `keras.callbacks.BackupAndRestore`: with the same callback and the same arguments, `fit`
    restores what the folder holds before its first step, and begins at the epoch after it. The
    resumed run ends with the weights, bit by bit, and the ledger of one that was not interrupted.
    The data must be `plan.batches(x, y, optimizer=model.optimizer)`.

    The folder holds the weights, the optimizer's state and its ledger, and the seeds of noise and
    draws, on whose secrecy the guarantee rests: who can read them can subtract the noise. Its owner
    alone may read it. Never release it; `remove()` deletes it.

    Args:
        directory: Path of a folder of its own, made if needed.
        save_freq: `"epoch"`, or an int: a save after every so many updates. A run that is resumed
            begins with a whole epoch.
        write: Bool. On several hosts, all restore and one alone may write.

    Raises:
        ValueError: By `fit`, if the folder holds a run of another plan, optimizer, model, loss or
            data set, or a damaged one; each by name.
    """

    def __init__(self, directory, save_freq="epoch", write=True):
        super().__init__()
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise ValueError(
                'Argument `save_freq` must be "epoch" or an int >= 1. Received: '
                f"save_freq={save_freq!r}."
            )
        self.directory = pathlib.Path(directory)
        self.save_freq = save_freq
        self._write = write
        self._identity = None
        self._epoch = 0
        self._batches = 0

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
        views.build(model, *_example(data))
        model.optimizer.build(model.trainable_variables)
        self._identity = identity(model, data)
        self._epoch = 0
        if not self.exists:
            return
        record = self._read()
        state, run = record["run"], model.optimizer.run
        if run.number == state["number"] and run.updates >= state["updates"]:
            self._epoch = record["epoch"]
            return  # The run that wrote it goes on.
        for name, value in self._identity.items():
            if record["identity"].get(name) != value:
                raise ValueError(
                    f"The checkpoint in {os.fspath(self.directory)!r} is of a run with another "
                    f"{name}: {_difference(record['identity'].get(name), value)}. Noise must not "
                    "be used twice on different sums. Go on with what that run had, or give the "
                    "new run another folder."
                )
        self._epoch = record["epoch"]
        model.load_weights(self.directory / record["weights"])
        model.optimizer.take_over(state)

    def on_train_begin(self, logs=None):
        """Tells Keras which epoch is the next."""
        if self._identity is None:
            raise ValueError(
                "`tfdpx.callbacks.Checkpoint` works with a tfdpx optimizer only. Received: an "
                f"optimizer of type {type(self.model.optimizer).__name__}. Use "
                "keras.callbacks.BackupAndRestore."
            )
        self._batches = 0
        keras_hook.set_initial_epoch(self.model, self._epoch)

    def on_train_batch_end(self, batch, logs=None):
        """Saves, where `save_freq` is a number and it is time."""
        self._batches += 1
        if self.save_freq != "epoch" and self._batches % self.save_freq == 0:
            self._save()

    def on_epoch_end(self, epoch, logs=None):
        """Saves, unless `save_freq` is a number."""
        self._epoch = epoch + 1
        if self.save_freq == "epoch":
            self._save()

    def on_train_end(self, logs=None):
        """Saves what came after the last save."""
        keras_hook.set_initial_epoch(self.model, None)
        if self.save_freq != "epoch":
            self._save()

    def remove(self):
        """Deletes the folder with its secrets."""
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def _record(self):
        return self.directory / "run.json"

    def _save(self):
        """Writes the weights, then the record that names them: a whole save always exists."""
        if not self._write:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        run = self.model.optimizer.run
        weights = self.directory / f"{run.updates:09d}.weights.h5"
        fresh = self.directory / "next.weights.h5"
        self.model.save_weights(fresh, overwrite=True)
        os.replace(fresh, weights)
        record = {
            "format": _FORMAT,
            "identity": self._identity,
            "epoch": self._epoch,
            "weights": weights.name,
            "digest": _digest_of_file(weights),
            "run": run.state(),
        }
        text = json.dumps(record)
        fresh = self.directory / "next.json"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._record)
        for old in self.directory.glob("*.weights.h5"):
            if old != weights:
                old.unlink()

    def _read(self):
        where = os.fspath(self.directory)
        try:
            record = json.loads(self._record.read_text())
            if record["format"] != _FORMAT:
                raise ValueError(f"its format is {record['format']!r}, not {_FORMAT!r}")
            if _digest_of_file(self.directory / record["weights"]) != record["digest"]:
                raise ValueError(f"{record['weights']} is not the file that was saved")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"The checkpoint in {where!r} is damaged: {error}. Restore the folder from a copy, "
                "or remove it to begin anew: what its run spent on the data was still spent."
            ) from error
        return record


def restore_for_fit(model, callbacks, data):
    """Lets each `Checkpoint` among the callbacks of `fit` restore, before anything else begins.

    Args:
        model: The compiled model.
        callbacks: What `fit` was given: a callback, a list of them, a `CallbackList` or None.
        data: What `fit` trains on.
    """
    for callback in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks)):
        if isinstance(callback, Checkpoint):
            callback.prepare(model, data)


def identity(model, data):
    """What two runs must share to go on from one checkpoint: a dict of JSON values.

    Args:
        model: The compiled model.
        data: What `fit` trains on.

    Raises:
        ValueError: If `data` are not the batches of the optimizer's own run.
    """
    optimizer, draws = model.optimizer, draws_of(data)
    if draws is None or draws.plan is None or draws.run is not optimizer.run:
        raise ValueError(
            "`tfdpx.callbacks.Checkpoint` restores the draws together with the noise, so `fit` "
            "must be given `plan.batches(x, y, optimizer=model.optimizer)` as it is."
        )
    settings = optimizer.get_config()
    if optimizer.first_learning_rate is not None:
        settings["learning_rate"] = optimizer.first_learning_rate
    planned = settings.pop("plan")
    del settings["name"]  # Keras numbers them.
    found = {
        "plan": {"optimizer": planned, "batches": draws.plan.get_config()},
        "number of examples": draws.examples.count,
        "data set": draws.examples.fingerprint(),
        "seed of the draws": draws.seed_digest,
        "optimizer": {"class": type(optimizer).__name__, **settings},
        "model": [_layer(layer) for layer in keras_hook.flatten_layers(model)],
        "loss": _described(model.loss),
    }
    return json.loads(json.dumps(found, default=lambda value: type(value).__qualname__))


def _layer(layer):
    """A layer as JSON, without the name that Keras numbers."""
    weights = [[list(v.shape), v.dtype, v.trainable] for v in layer.variables]
    if len(keras_hook.flatten_layers(layer)) > 1:
        return [type(layer).__name__, weights]
    config = {k: v for k, v in layer.get_config().items() if k not in ("name", "batch_shape")}
    return [type(layer).__name__, config, weights]


def _described(loss):
    """A loss as JSON: its configuration, or for a function its name and code."""
    if isinstance(loss, dict):
        return {name: _described(each) for name, each in loss.items()}
    if isinstance(loss, (list, tuple)):
        return [_described(each) for each in loss]
    if isinstance(loss, types.FunctionType):
        code = loss.__code__
        text = repr((code.co_code, [c for c in code.co_consts if not hasattr(c, "co_code")]))
        return [loss.__qualname__, hashlib.blake2b(text.encode()).hexdigest()]
    if isinstance(loss, keras.losses.Loss):
        try:
            return keras.saving.serialize_keras_object(loss)
        except (TypeError, ValueError, NotImplementedError):
            return type(loss).__qualname__
    return loss if loss is None or isinstance(loss, str) else type(loss).__qualname__


def _difference(saved, given):
    """Where two JSON values differ, for people."""
    if isinstance(saved, dict) and isinstance(given, dict):
        names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
        return ", ".join(
            f"{name}: {_difference(saved.get(name), given.get(name))}" for name in names
        )
    return f"saved {_short(saved)}, received {_short(given)}"


def _short(value):
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _example(data):
    """One made-up example of a data set: `(x, y, sample_weight)`."""
    return tf.nest.map_structure(
        lambda spec: (
            tf.zeros([1, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else None
        ),
        data.element_spec,
    )


def _digest_of_file(path):
    digest = hashlib.blake2b()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
