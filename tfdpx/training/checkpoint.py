"""Resumes an interrupted run from its last save, at the epsilon of an uninterrupted run.

A resumed run restores weights, the optimizer's state, moving averages, ledger and epoch. It
continues with fresh draws and fresh noise, so its weights have the same distribution as after an
uninterrupted run. The file holds no secret. It may be resumed by any program and any number of
times. In the ledger, each resume counts as a new run.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import tempfile
import zipfile
from typing import Any

import keras
import numpy as np

from tfdpx import _files as files
from tfdpx._arguments import is_integer, require
from tfdpx._keras import lora, model_internals, saving_internals

_FORMAT = "tfdpx.Checkpoint/3"
_RECORD, _WEIGHTS, _NORMS = "record.json", "model.weights.h5", "norms.npz"
_CALLBACKS, _FACTORS = "callbacks.npz", "lora.npz"
# Keras would go on without the optimizer's state if their number differs.
_VARIABLES = "number of the optimizer's variables, which model, momentum and schedule decide"
# Attributes that hold the state of Keras's callbacks. Keras resets them in every `fit`.
_NUMBERS = ("best", "best_epoch", "wait", "stopped_epoch", "cooldown_counter")
_ARRAYS = "best_weights"
# Callbacks that change their state in `on_epoch_end`, and write no file.
_COUNTING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


class Checkpoint(keras.callbacks.Callback):
    """Saves the run as it trains, and resumes it when `fit` is called again.

    This callback is like `keras.callbacks.BackupAndRestore`, but the saved run survives a kill or a
    full disk. With the same callback and the same plan, `fit` restores the saved run before its
    first step, prints at which update it continues, and makes the remaining updates. The remaining
    updates use fresh draws and noise, so epsilon is the same as without the interruption. With an
    optimizer's `seed`, a resumed run equals the uninterrupted one bit by bit on the same machine.

    The folder holds one file: weights, the optimizer's state and its ledger, and the state of
    Keras's `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint`. With individual accounting,
    the file also holds the norms of examples, which reveal private data. Only the owner of the file
    may read it. Logs of an update (TensorBoard, curves) are written only when a save contains that
    update. A second training on the same folder is refused while the first one runs.

    Args:
        directory: Path of a folder for only this run, created if needed.
        save_freq: `"epoch"` saves after each epoch. An int n saves also after every n updates. A
            resumed run begins with a whole epoch. With `steps_per_epoch`, the run may therefore
            have more updates than `fit` was asked for, by up to one epoch. The ledger counts these
            updates, and the plan still ends the run.
        write: Bool, whether to save. On several hosts, every host restores, but only one may save.

    Raises:
        ValueError: By `fit`, if the saved run is damaged, or has another plan, number of examples,
            optimizer or model. The message names the difference.
        RuntimeError: By `fit`, if another training uses the folder.
    """

    def __init__(
        self, directory: str | os.PathLike, save_freq: int | str = "epoch", write: bool = True
    ) -> None:
        super().__init__()
        is_valid = save_freq == "epoch" or is_integer(save_freq, 1)
        require(is_valid, "save_freq", save_freq, 'be "epoch" or an int >= 1')
        self.directory = pathlib.Path(directory)
        self.save_freq = save_freq
        self._write = write
        self._session: Any = None
        self._facts: dict[str, Any] | None = None
        self._states = None
        self._callbacks = []
        self._epoch = self._saved = 0

    @property
    def exists(self) -> bool:
        """Bool: whether the folder holds a run."""
        return self._path.exists()

    @property
    def saved_updates(self) -> int:
        """Int: the number of updates of the saved weights; 0 if the folder holds no run."""
        return self._read()[0]["updates"] if self.exists else 0

    @contextlib.contextmanager
    def within(
        self, model: keras.Model, session: Any, num_examples: int | None, callbacks: Any
    ) -> Any:
        """Context manager around a `fit`. It restores a saved run, and lets the callback save.

        Args:
            model: The compiled, built model.
            session: The `tfdpx.training.session.Session` of the `fit`.
            num_examples: Int, the number of training examples, or None if unknown.
            callbacks: List of the callbacks of the `fit`.

        Raises:
            ValueError: If the saved run has another plan, optimizer or model.
        """
        optimizer = model_internals.innermost(model.optimizer)
        plan = optimizer.plan or (session.draws and session.draws.plan)
        self._session, self._callbacks, self._states = session, callbacks, None
        self._facts = {
            "plan": plan and plan.get_config(),
            "number of examples": num_examples,
            "optimizer": type(optimizer).__name__,
            "individual accounting": optimizer.individual is not None,
        }
        self._epoch, self._saved = 0, session.updates
        with contextlib.ExitStack() as stack:
            if self._write:
                files.make_folder(self.directory)
                if stack.enter_context(files.locked(self.directory)):
                    for path in files.leftovers(self.directory):
                        path.unlink(missing_ok=True)
            if self.exists:
                self._restore(model, optimizer)
            elif (self.directory / "run.json").exists():
                raise ValueError(
                    f"The checkpoint in {os.fspath(self.directory)!r} is of a version of tfdpx "
                    "before 0.2, whose resumes repeat noise. Give this run another folder: what "
                    "that run spent on the data was still spent."
                )
            session.call_after_save()
            try:
                yield
            finally:
                self._session, self._callbacks = None, []

    def _restore(self, model, optimizer):
        record, content = self._read()
        facts = self._facts | {_VARIABLES: len(optimizer.variables)}
        for name, value in json.loads(json.dumps(facts)).items():
            if record.get(name, value) != value:
                raise ValueError(
                    f"The checkpoint in {os.fspath(self.directory)!r} is of a run with another "
                    f"{name}: saved {record[name]}, received {value}. Go on with what that run "
                    "had, or give the new run another folder."
                )
        self._epoch, self._states = record["epoch"], content.get(_CALLBACKS)
        model_internals.set_initial_epoch(model, self._epoch)
        # The run that wrote the file may still be in memory. Then the model is at the saved update
        # or a later one, and nothing is restored.
        if optimizer.account.has_made(record["run"]):
            return
        with _unchanged_on_error(model):
            self._load(model, optimizer, content)
        self._saved = self._session.updates
        print(f"Resumed at update {record['updates']}.")

    def _load(self, model, optimizer, content):
        with tempfile.TemporaryDirectory() as folder:
            weights = os.path.join(folder, _WEIGHTS)
            pathlib.Path(weights).write_bytes(content[_WEIGHTS])
            try:
                model.load_weights(weights)
            except (ValueError, KeyError) as error:
                raise ValueError(
                    f"The checkpoint in {os.fspath(self.directory)!r} is of a run with another "
                    f"model: {error} Go on with that model, or give the new run another folder."
                ) from error
        if _FACTORS in content:
            arrays = _arrays(content[_FACTORS])
            for variable, name in zip(lora.factors_of(model), arrays, strict=True):
                variable.assign(arrays[name])
        if _NORMS in content:
            optimizer.clip_policy.restore(_arrays(content[_NORMS]))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses optimizers that are not tfdpx's."""
        if self._session is None:
            raise ValueError(
                "`tfdpx.callbacks.Checkpoint` works with a tfdpx optimizer only. Received: an "
                f"optimizer of type {type(self.model.optimizer).__name__}. Use "
                "keras.callbacks.BackupAndRestore."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Restores the state of the callbacks, after Keras has reset it."""
        if self._states is not None:
            restore_states(self._callbacks, self._states)
            self._states = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if `save_freq` is an int, and at least so many updates followed the last save."""
        if self.save_freq != "epoch" and self._session.updates - self._saved >= self.save_freq:
            self.save()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves now, because at the end of `fit` Keras may replace weights by their averages."""
        self._epoch = epoch + 1
        self.save()

    def remove(self) -> None:
        """Deletes the save, and the folder if nothing else is in it."""
        for path in [self._path, *files.leftovers(self.directory)]:
            path.unlink(missing_ok=True)
        if self.directory.exists() and not any(self.directory.iterdir()):
            self.directory.rmdir()

    @property
    def _path(self):
        return self.directory / "tfdpx-checkpoint.zip"

    def save(self) -> None:
        """Saves the run as it is. Call it from a callback, between two updates of a `fit`.

        Raises:
            OSError: If the file cannot be written, for example if the disk is full.
        """
        self._saved = self._session.updates
        if self._write:
            try:
                files.make_folder(self.directory)
                files.write(self._path, self._content())
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"The run could not be saved in {os.fspath(self.directory)!r}: {error}. The "
                    "save before is whole: make room, and call `fit` again to resume from it",
                ) from error
        self._session.call_after_save()

    def _content(self):
        """Returns the bytes of the file, a zip archive.

        The archive holds one part for each kind of content, for example the weights, and a record
        with the settings of the run and the digests of the parts.
        """
        optimizer = model_internals.innermost(self.model.optimizer)
        with lora.unmerged(self.model):
            content = {_WEIGHTS: saving_internals.weights_file(self.model)}
        factors = [keras.ops.convert_to_numpy(v) for v in lora.factors_of(self.model)]
        if factors:
            content[_FACTORS] = _npz(*factors)
        states = serialize_states(self._callbacks)
        if states is not None:
            content[_CALLBACKS] = states
        if optimizer.individual is not None:
            content[_NORMS] = _npz(**optimizer.clip_policy.state())
        record = {
            "format": _FORMAT,
            **self._facts,
            _VARIABLES: len(optimizer.variables),
            "epoch": self._epoch,
            "updates": optimizer.ledger.steps,
            "run": optimizer.account.run,
            "digests": {name: files.digest_of(part) for name, part in content.items()},
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(_RECORD, files.sealed(record))
            for name, part in content.items():
                archive.writestr(name, part)
        return buffer.getvalue()

    def _read(self):
        """Returns the content of the file: the record, and a dict from names to the other parts."""
        try:
            with zipfile.ZipFile(self._path) as archive:
                record = files.opened(archive.read(_RECORD), _FORMAT)
                content = {name: archive.read(name) for name in record["digests"]}
            for name, digest in record["digests"].items():
                if files.digest_of(content[name]) != digest:
                    raise ValueError(f"{name} is not what was saved")
        except Exception as error:  # `zipfile` raises many kinds of errors for damaged bytes.
            raise ValueError(
                f"The checkpoint in {os.fspath(self.directory)!r} is damaged: {error}. Restore the "
                "folder from a copy, or remove it to begin again: what its run spent on the data "
                "was still spent."
            ) from error
        return record, content


def _npz(*arrays, **named_arrays):
    buffer = io.BytesIO()
    np.savez(buffer, *arrays, **named_arrays)
    return buffer.getvalue()


def _arrays(content):
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        return dict(file)


@contextlib.contextmanager
def checkpointing(model, callbacks, session, num_examples, build):
    """Context manager in which the `Checkpoint` among the callbacks of `fit` restores and saves.

    Args:
        model: The compiled model.
        callbacks: List of the callbacks.
        session: The `tfdpx.training.session.Session` of the `fit`.
        num_examples: Int, the number of training examples, or None if unknown.
        build: Function that builds model and optimizer.

    Raises:
        ValueError: If there are several checkpoints.
    """
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if len(checkpoints) > 1:
        raise ValueError(
            f"`fit` takes one `tfdpx.callbacks.Checkpoint`. Received: {len(checkpoints)}. Two "
            "folders would hold one run."
        )
    if not checkpoints:
        yield
        return
    if checkpoints[0].exists:
        build()
    with checkpoints[0].within(model, session, num_examples, callbacks):
        yield


def place_checkpoint(callbacks):
    """Returns the callbacks in an order in which their `Checkpoint` saves at the right time.

    Only the `Checkpoint` moves, and only if it must; see `place_of_save`.

    Args:
        callbacks: List of `keras.callbacks.Callback`.
    """
    checkpoints = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if not checkpoints:
        return callbacks
    other_callbacks = [callback for callback in callbacks if callback is not checkpoints[0]]
    least, last = place_of_save(other_callbacks)
    place = min(max(callbacks.index(checkpoints[0]), least), last)
    return [*other_callbacks[:place], checkpoints[0], *other_callbacks[place:]]


@contextlib.contextmanager
def _unchanged_on_error(model):
    """Context manager: after an error, restores weights and optimizer state, but not the ledger."""
    optimizer = model_internals.innermost(model.optimizer)
    variables = [*model.variables, *optimizer.variables]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    try:
        yield
    except BaseException:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        raise


def serialize_states(callbacks):
    """Returns the states of Keras's callbacks as the bytes of an npz file; None without states.

    Args:
        callbacks: List of `keras.callbacks.Callback`.
    """
    buffer, arrays = io.BytesIO(), {}
    for prefix, callback in _callbacks_by_name(callbacks).items():
        for name in _NUMBERS:
            value = getattr(callback, name, None)
            if value is not None:
                arrays[f"{prefix}/{name}"] = np.asarray(value)
        for place, array in enumerate(getattr(callback, _ARRAYS, None) or ()):
            arrays[f"{prefix}/{_ARRAYS}/{place}"] = array
    np.savez(buffer, **arrays)
    return buffer.getvalue() if arrays else None


def restore_states(callbacks, content):
    """Restores states from `serialize_states`; callbacks are matched by type and order.

    Args:
        callbacks: List of `keras.callbacks.Callback`, after their `on_train_begin`.
        content: Bytes, the result of `serialize_states`.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    for prefix, callback in _callbacks_by_name(callbacks).items():
        state = {
            k.removeprefix(f"{prefix}/"): v for k, v in arrays.items() if k.startswith(f"{prefix}/")
        }
        for name in _NUMBERS:
            if name in state:
                setattr(callback, name, state[name].item())
        count = sum(name.startswith(_ARRAYS) for name in state)
        if count:
            callback.best_weights = [state[f"{_ARRAYS}/{place}"] for place in range(count)]


def place_of_save(callbacks):
    """Returns the lowest and the highest index at which a callback that saves may be inserted.

    It must come after the callbacks with a state, to save their state after this epoch. It must
    come before callbacks that replace weights by averages.

    Args:
        callbacks: List of callbacks, without the callback that saves.
    """
    are_swaps = [isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks]
    end = are_swaps.index(True) if any(are_swaps) else len(callbacks)
    places = [i for i, callback in enumerate(callbacks[:end]) if isinstance(callback, _COUNTING)]
    return places[-1] + 1 if places else 0, end


def _callbacks_by_name(callbacks):
    """Returns a dict of the callbacks with a state, by names such as "EarlyStopping-0"."""
    by_name = {}
    for callback in callbacks:
        if isinstance(callback, (*_COUNTING, keras.callbacks.ModelCheckpoint)):
            name = type(callback).__name__
            by_name[f"{name}-{sum(key.startswith(f'{name}-') for key in by_name)}"] = callback
    return by_name
