"""An interrupted run makes the remaining updates, with a seed exactly to the last bit."""

import contextlib
import os

import keras
import numpy as np
import pytest
import small
from cases import slow_but
from tensorflow.python.summary.summary_iterator import summary_iterator

import tfdpx
from tfdpx.callbacks import Checkpoint

N, B, STEPS = 60, 20, 12
X, Y = small.data(N)


def make_plan(num_examples=N, **arguments):
    defaults = {"batch_size": B, "steps": STEPS, "noise_multiplier": 1.0, "delta": 1e-3}
    return tfdpx.PrivacyPlan(num_examples, **{**defaults, **arguments})


PLAN = make_plan()


def layers(units=5):
    return [keras.layers.Dense(units), keras.layers.Dropout(0.5), keras.layers.Dense(3)]


def make(plan=PLAN, optimizer=tfdpx.DPAdam, layers=layers, loss=None, rate=0.1, **arguments):
    optimizer = optimizer(rate, plan=plan, use_ema=True, **arguments)
    return small.model(optimizer, layers=layers, loss=loss)


def train(model, callbacks=(), epochs=4, plan=PLAN, x=X, y=Y, **arguments):
    arguments = {"steps_per_epoch": 3, "verbose": 0, **arguments}
    return model.fit(plan.batches(x, y), epochs=epochs, callbacks=list(callbacks), **arguments)


class Killed(Exception):
    pass


def killed_in(epoch):
    if epoch == 1:
        raise Killed


class KillAfter(keras.callbacks.Callback):
    """Ends the run in the middle, after so many updates of the weights."""

    def __init__(self, updates):
        super().__init__()
        self.updates = updates

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.ledger.steps == self.updates:
            raise Killed


def raw(model):
    """Returns weights, slots and averages, of a model that may not be built yet."""
    return [np.array(v) for v in [*model.trainable_variables, *model.optimizer.variables]]


def assert_same(model, other):
    for a, b in zip(raw(model), raw(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def whole():
    """An unbroken run with a seed."""
    model = make(seed=4)
    train(model)
    return model


@pytest.mark.slow
def test_a_run_with_a_seed_that_is_killed_or_ended_goes_on_to_the_last_bit(tmp_path, whole, capsys):
    with pytest.raises(Killed):
        train(make(seed=4), [KillAfter(5), Checkpoint(tmp_path)])
    assert Checkpoint(tmp_path).saved_updates == 3
    for epochs in (4, 4):  # The last one meets a run that has ended.
        model = make(seed=4)
        train(model, [Checkpoint(tmp_path), tfdpx.callbacks.PrivacyBudget(PLAN)], epochs=epochs)
        assert model.optimizer.ledger.steps == 3 * epochs
    output = capsys.readouterr().out
    assert all(f"Resumed at update {update}." in output for update in (3, 12))
    assert_same(model, whole)


@pytest.mark.slow
def test_a_killed_run_without_a_seed_makes_the_updates_that_are_left(tmp_path, capsys, whole):
    """The last update of an epoch is killed before the epoch is saved."""
    with pytest.raises(Killed):
        train(make(), [KillAfter(6), Checkpoint(tmp_path)])
    assert Checkpoint(tmp_path).saved_updates == 3
    resumed = make()
    history = train(resumed, [Checkpoint(tmp_path), tfdpx.callbacks.PrivacyBudget(PLAN)]).history
    assert "Resumed at update 3." in capsys.readouterr().out
    ledger = resumed.optimizer.ledger
    assert [entry.steps for entry in ledger.entries] == [3, STEPS - 3]
    assert ledger.epsilon(PLAN.delta) == history["epsilon"][-1] == PLAN.epsilon
    assert not ledger.is_seeded
    assert np.abs(small.weights(resumed) - small.weights(whole)).max() > 1e-2


@pytest.mark.slow
def test_records_of_an_update_wait_for_the_save(tmp_path):
    """A kill after an epoch's writers ran, but before its save, leaves none of it on the disk."""
    board = tfdpx.callbacks.TensorBoard(tmp_path / "board")
    kill = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: killed_in(epoch))
    with pytest.raises(Killed):
        train(make(), [board, kill, Checkpoint(tmp_path / "run")])
    board.on_train_end()  # Whatever it has written is on the disk now.
    files = map(str, tmp_path.rglob("*tfevents*"))
    events = [event for file in files for event in summary_iterator(file) if event.summary.value]
    assert max(event.step for event in events) == Checkpoint(tmp_path / "run").saved_updates == 3


@pytest.mark.slow
def test_saves_within_an_epoch(tmp_path, whole):
    arguments = dict(epochs=1, steps_per_epoch=None)
    with pytest.raises(Killed):
        train(make(seed=4), [Checkpoint(tmp_path, 2), KillAfter(5)], **arguments)
    assert Checkpoint(tmp_path).saved_updates == 4
    resumed = make(seed=4)
    train(resumed, [Checkpoint(tmp_path, 2)], **arguments)
    assert_same(resumed, whole)


@pytest.mark.slow
def test_the_state_of_callbacks_is_restored(tmp_path):
    """The state of other callbacks is restored if `Checkpoint` comes before or after them."""

    def run(folder, killed_after=None, first=True):
        model = make(seed=1, public_validation=True)
        stop = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
        slow = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.5)
        saved = Checkpoint(tmp_path / folder)
        callbacks = [saved, stop, slow] if first else [stop, slow, saved]
        if killed_after:
            callbacks.append(KillAfter(killed_after))
        with pytest.raises(Killed) if killed_after else contextlib.nullcontext():
            train(model, callbacks, validation_data=(X + 9, Y))
        return model, stop

    wanted, stop = run("whole")
    assert stop.stopped_epoch == 2 < 3 and stop.best_epoch == 0
    for first in (True, False):
        run(str(first), 8, first)
        resumed, resumed_stop = run(str(first), None, first)
        for name in ("best", "best_epoch", "wait", "stopped_epoch"):
            assert getattr(resumed_stop, name) == getattr(stop, name)
        assert_same(resumed, wanted)
        # The best weights come from the file, and their ledger is known.
        assert resumed.optimizer.ledger.is_complete
        assert resumed.optimizer.ledger.steps == wanted.optimizer.ledger.steps == 9


def test_the_same_model_goes_on_without_going_back(tmp_path):
    model, saved = make(), Checkpoint(tmp_path)
    with pytest.raises(Killed):
        train(model, [saved, KillAfter(5)])
    train(model, [saved], epochs=3)
    assert model.optimizer.ledger.steps == 11
    assert len(model.optimizer.ledger.entries) == 1


@pytest.fixture(scope="module")
def first_epoch(tmp_path_factory):
    """The folder of a run that ended after its first epoch."""
    folder = tmp_path_factory.mktemp("first_epoch")
    train(make(), [Checkpoint(folder)], epochs=1)
    return folder


FEWER, LOUDER = make_plan(50), make_plan(noise_multiplier=0.5)
CHANGES = {
    "plan": lambda: (make(LOUDER), {"plan": LOUDER}),
    "number of examples": lambda: (make(FEWER), {"plan": FEWER, "x": X[:50], "y": Y[:50]}),
    "optimizer": lambda: (make(optimizer=tfdpx.DPSGD), {}),
    "number of the optimizer's variables, which": lambda: (make(amsgrad=True), {}),
    "model": lambda: (make(layers=lambda: layers(7)), {}),
}


@pytest.mark.parametrize("what", slow_but(CHANGES, "optimizer"))
def test_another_run_is_refused_by_name(first_epoch, what):
    model, arguments = CHANGES[what]()
    name = "plan|number of examples" if what == "number of examples" else what
    with pytest.raises(ValueError, match=f"is of a run with another ({name})"):
        train(model, [Checkpoint(first_epoch)], **arguments)
    assert model.optimizer.state.updates == 0


def test_unfit_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match="takes one"):
        train(make(), [Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")])
    with pytest.raises(ValueError, match="tfdpx optimizer only"):
        small.model(keras.optimizers.SGD()).fit(X, Y, callbacks=[Checkpoint(tmp_path)], verbose=0)
    for save_freq in (0, "batch", 1.5):
        with pytest.raises(ValueError, match="save_freq"):
            Checkpoint(tmp_path, save_freq)
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_the_folder_is_its_owners_and_what_else_is_in_it_stays(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "mine.weights.h5").write_bytes(b"mine")
    (folder / ".tfdpx-checkpoint.zip.12ab.new").write_bytes(b"half, of a kill")
    saved = Checkpoint(folder)
    model = make()
    train(model, [saved], epochs=2)
    assert sorted(os.listdir(folder)) == ["mine.weights.h5", "tfdpx-checkpoint.zip"]
    for path in (folder, folder / "tfdpx-checkpoint.zip"):
        assert path.stat().st_mode & 0o077 == 0
    saved.remove()
    assert [path.read_bytes() for path in folder.iterdir()] == [b"mine"]
    (folder / "mine.weights.h5").unlink()
    saved.remove()
    assert not folder.exists() and saved.saved_updates == 0
    train(model, [Checkpoint(tmp_path, write=False)], epochs=1)  # This run only reads.
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_run_that_keras_restores_keeps_to_the_budget(tmp_path):
    """`BackupAndRestore` keeps a true account, and never exceeds the plan's updates."""

    def fit(*extra, budget_first=True):
        model = make()
        model.build((None, 6))
        ordered = [
            tfdpx.callbacks.PrivacyBudget(PLAN),
            keras.callbacks.BackupAndRestore(tmp_path, save_freq=2),
        ]
        callbacks = [*extra, *ordered[:: 1 if budget_first else -1]]
        train(model, callbacks, epochs=1, steps_per_epoch=None)
        return model.optimizer.ledger

    with pytest.raises(Killed):
        fit(KillAfter(7))
    with pytest.raises(Killed):
        fit(KillAfter(11), budget_first=False)
    ledger = fit()
    assert [entry.steps for entry in ledger.entries] == [6, 4, 2]
    assert ledger.epsilon(PLAN.delta) == PLAN.epsilon
