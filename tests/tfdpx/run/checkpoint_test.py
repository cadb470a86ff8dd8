"""An interrupted run goes on bit by bit, and into nothing else."""

import contextlib
import json
import os

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from killing import KillAfter, Killed

import tfdpx
from tfdpx.callbacks import Checkpoint
from tfdpx.run import files

N, B, STEPS = 60, 20, 12
PLAN = tfdpx.PrivacyPlan(N, batch_size=B, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
X, Y = small.data(N)


def make(plan=PLAN, optimizer=None, layers=None, loss=None, rate=0.1, **arguments):
    optimizer = optimizer or tfdpx.DPSGD(rate, plan=plan, momentum=0.9, use_ema=True, **arguments)
    return small.model(optimizer, layers=layers, loss=loss)


def train(model, callbacks=(), epochs=4, plan=PLAN, x=X, y=Y, **arguments):
    batches = plan.batches(x, y, optimizer=model.optimizer, **arguments)
    return model.fit(
        batches, epochs=epochs, steps_per_epoch=3, callbacks=list(callbacks), verbose=0
    )


def raw(model):
    """Weights, slots and averages."""
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


def start_like(model, other):
    """Gives `model` the seeds of `other`, which has made no update."""
    model.optimizer.run.restore(other.optimizer.run.state())


@pytest.mark.parametrize("after, kept", [(4, 3), (5, 3), (6, 3), (7, 6), (11, 9)])
def test_a_killed_run_ends_as_the_unbroken_one(tmp_path, after, kept):
    broken, whole = make(), make()
    start_like(whole, broken)
    train(whole)
    with pytest.raises(Killed):
        train(broken, [KillAfter(after), Checkpoint(tmp_path), tfdpx.PrivacyBudget(PLAN)])
    assert Checkpoint(tmp_path).saved_updates == kept
    resumed = make()
    train(resumed, [Checkpoint(tmp_path), tfdpx.PrivacyBudget(PLAN)])
    for a, b in zip(raw(whole), raw(resumed), strict=True):
        np.testing.assert_array_equal(a, b)
    assert resumed.optimizer.ledger == whole.optimizer.ledger


def test_saves_within_an_epoch(tmp_path):
    broken, whole = make(), make()
    start_like(whole, broken)
    for model, callbacks in ((whole, []), (broken, [Checkpoint(tmp_path, 2), KillAfter(5)])):
        with pytest.raises(Killed) if callbacks else contextlib.nullcontext():
            model.fit(PLAN.batches(X, Y, optimizer=model.optimizer), callbacks=callbacks, verbose=0)
    assert Checkpoint(tmp_path).saved_updates == 4
    resumed = make()
    batches = PLAN.batches(X, Y, optimizer=resumed.optimizer)
    resumed.fit(batches, callbacks=[Checkpoint(tmp_path, 2), tfdpx.PrivacyBudget(PLAN)], verbose=0)
    for a, b in zip(raw(whole), raw(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_in_pieces_is_the_unbroken_one(tmp_path):
    whole, first = make(), make()
    start_like(whole, first)
    train(whole)
    train(first, [Checkpoint(tmp_path)], epochs=1)
    for epochs in (2, 3, 4):
        model = make()
        train(model, [Checkpoint(tmp_path), tfdpx.PrivacyBudget(PLAN)], epochs=epochs)
    for a, b in zip(raw(whole), raw(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.ledger == whole.optimizer.ledger
    # Resumed once more, there is nothing left to do.
    done = make()
    train(done, [Checkpoint(tmp_path), tfdpx.PrivacyBudget(PLAN)])
    np.testing.assert_array_equal(small.weights(done), small.weights(model))


def test_the_same_run_goes_on_without_going_back(tmp_path):
    model, saved = make(), Checkpoint(tmp_path)
    train(model, [saved], epochs=1)
    train(model, [saved], epochs=3)
    assert model.optimizer.ledger.steps == 9


def test_steps_taken_again_after_a_restore_cost_nothing(tmp_path):
    model = make()
    train(model, [Checkpoint(tmp_path)], epochs=1)
    again = make()
    train(again, [Checkpoint(tmp_path)], epochs=3)
    state = again.optimizer.run.state()
    assert state["updates"] == again.optimizer.ledger.steps == 9
    again.optimizer.take_over({**state, "updates": 3})
    train(again, epochs=1)
    assert again.optimizer.ledger.steps == 9
    train(again, epochs=3)
    assert again.optimizer.ledger.steps == again.optimizer.run.updates == 12


class Other:
    plan = tfdpx.PrivacyPlan(N, batch_size=B, steps=STEPS, noise_multiplier=1.5, delta=1e-3)
    longer = tfdpx.PrivacyPlan(N, batch_size=B, steps=20, noise_multiplier=1.0, delta=1e-3)
    fewer = tfdpx.PrivacyPlan(50, batch_size=B, steps=STEPS, noise_multiplier=1.0, delta=1e-3)


def half_loss(y_true, y_pred):
    return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True) / 2


def scaled_loss(scale):
    def loss(y_true, y_pred):
        each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return scale * each

    return loss


def compiled(model, loss=None, **arguments):
    model.compile(model.optimizer, loss=loss or model.loss, **arguments)
    return model


CHANGES = {
    "plan": lambda: (make(Other.plan), dict(plan=Other.plan)),
    "plan: batches: steps": lambda: (make(), dict(plan=Other.longer)),
    "number of examples": lambda: (
        make(tfdpx.PrivacyPlan(50, batch_size=B, steps=STEPS, noise_multiplier=1.0, delta=1e-3)),
        dict(plan=Other.fewer, x=X[:50], y=Y[:50]),
    ),
    "data set": lambda: (make(), dict(x=X + 1)),
    "optimizer: .*learning_rate": lambda: (make(rate=0.2), {}),
    "optimizer: .*l2_norm_clip": lambda: (make(l2_norm_clip=0.5), {}),
    "optimizer: class": lambda: (make(optimizer=tfdpx.DPAdam(0.1, plan=PLAN)), {}),
    "model": lambda: (make(layers=lambda: [keras.layers.Dense(7), keras.layers.Dense(3)]), {}),
    "model.*relu": lambda: (
        make(layers=lambda: [keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)]), {},
    ),
    "loss": lambda: (make(loss=half_loss), {}),
    "seed of the draws": lambda: (make(), dict(seed=3)),
    "execution": lambda: (compiled(make(), run_eagerly=True), {}),
    "loss: weights": lambda: (compiled(make(), loss_weights=0.1), {}),
    "loss: closure": lambda: (compiled(make(), loss=scaled_loss(0.5)), {}),
}  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_run_is_refused_by_name(tmp_path, what):
    begun = compiled(make(), loss=scaled_loss(1.0)) if "closure" in what else make()
    train(begun, [Checkpoint(tmp_path)], epochs=1)
    model, arguments = CHANGES[what]()
    name = what.split(":")[0].split(".")[0]
    with pytest.raises(ValueError, match=f"(?s)another ({name}|plan|number of examples|behav)"):
        train(model, [Checkpoint(tmp_path)], **arguments)
    assert model.optimizer.run.updates == 0


def test_batches_that_are_not_of_the_run_are_refused(tmp_path):
    """Restored noise on draws that are new: two continuations would subtract to the sums."""
    model = make()
    for data in (PLAN.batches(X, Y), PLAN.batches(X, Y, seed=3)):
        with pytest.raises(ValueError, match="optimizer=model.optimizer"):
            model.fit(data, callbacks=[Checkpoint(tmp_path)], verbose=0)
    with pytest.raises(ValueError, match="tfdpx optimizer only"):
        plain = small.model(keras.optimizers.SGD())
        plain.fit(X, Y, callbacks=[Checkpoint(tmp_path)], verbose=0)
    assert not list(tmp_path.iterdir())


def test_weights_loaded_after_a_restore_have_fresh_noise(tmp_path):
    model = make()
    train(model, [Checkpoint(tmp_path)], epochs=1)
    model.save_weights(tmp_path / "later.weights.h5")
    resumed = make()
    resumed.build((None, 6))
    train(resumed, [Checkpoint(tmp_path)], epochs=1)
    assert resumed.optimizer.run.state() == model.optimizer.run.state()
    resumed.load_weights(tmp_path / "later.weights.h5")
    assert resumed.optimizer.run.state()["noise_seed"] != model.optimizer.run.state()["noise_seed"]


DAMAGES = {
    "torn weights": lambda folder: next(folder.glob("*.h5")).write_bytes(b"half"),
    "no weights": lambda folder: next(folder.glob("*.h5")).unlink(),
    "torn record": lambda folder: (folder / "run.json").write_text("{"),
    "foreign record": lambda folder: (folder / "run.json").write_text('{"format": "x"}'),
    "foreign weights": lambda folder: make_foreign(folder),
}


def make_foreign(folder):
    model = make()
    model.build((None, 6))
    model.save_weights(next(folder.glob("*.h5")))


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_checkpoint_is_refused(tmp_path, what):
    train(make(), [Checkpoint(tmp_path)], epochs=1)
    DAMAGES[what](tmp_path)
    model = make()
    with pytest.raises(ValueError, match="is damaged"):
        train(model, [Checkpoint(tmp_path)])
    assert model.optimizer.run.updates == 0


def test_a_save_that_fails_leaves_the_last_one_whole(tmp_path, monkeypatch):
    model = make()
    train(model, [Checkpoint(tmp_path)], epochs=1)
    kept = [np.array(v) for v in model.trainable_variables]

    def fail(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(files, "flush", fail)
        train(model, [Checkpoint(tmp_path)], epochs=2)
    resumed = make()
    resumed.build((None, 6))
    train(resumed, [Checkpoint(tmp_path)], epochs=1)
    assert resumed.optimizer.run.updates == 3
    assert len(kept) == len(resumed.trainable_variables)


def test_others_cannot_read_the_folder_and_remove_deletes_it(tmp_path):
    saved = Checkpoint(tmp_path / "secret")
    train(make(), [saved], epochs=2)
    folder = tmp_path / "secret"
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "run.json").stat().st_mode & 0o077 == 0
    assert len(list(folder.glob("*.h5"))) == 1
    (folder / "other.weights.h5").write_bytes(b"not its own")
    assert json.loads((folder / "run.json").read_text())["run"]["updates"] == saved.saved_updates
    saved.remove()
    assert [path.name for path in folder.iterdir()] == ["other.weights.h5"]
    (folder / "other.weights.h5").unlink()
    saved.remove()
    assert not folder.exists() and saved.saved_updates == 0


def test_only_the_writer_writes(tmp_path):
    train(make(), [Checkpoint(tmp_path, write=False)], epochs=1)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("save_freq", [0, "batch", 1.5])
def test_unfit_save_freq(tmp_path, save_freq):
    with pytest.raises(ValueError, match="save_freq"):
        Checkpoint(tmp_path, save_freq)


def noise_of_one_update(model):
    """The change of the weights by an update without examples: noise alone."""
    before = small.weights(model)
    model.train_on_batch(X[:B], Y[:B], sample_weight=np.zeros(B, "float32"))
    return small.weights(model) - before


def resumed(folder):
    model = make()
    train(model, [Checkpoint(folder)], epochs=1)
    return model


LEAVES = {
    "fit on other draws": lambda m: m.fit(PLAN.batches(X, Y), steps_per_epoch=1, verbose=0),
    "fit on the run's": lambda m: train(m, epochs=1),
    "train_on_batch": noise_of_one_update,
    "compile again": lambda m: compiled(m, loss=half_loss),
    "another folder": lambda m: train(m, [Checkpoint(f"{m.name}-other")], epochs=1),
}


@pytest.mark.parametrize("how", LEAVES)
def test_updates_outside_of_the_checkpoint_have_fresh_noise(tmp_path, monkeypatch, how):
    """The attack: two processes restore, then train on what the checkpoint does not compare."""
    monkeypatch.chdir(tmp_path)
    train(make(), [Checkpoint(tmp_path / "c")], epochs=1)
    numbers = []
    for _ in range(2):
        model = resumed(tmp_path / "c")
        LEAVES[how](model)
        state = model.optimizer.run.state()
        numbers.append((state["number"], tuple(state["noise_seed"])))
    assert numbers[0] != numbers[1]
    assert numbers[0][1] != numbers[1][1]


def test_random_layers_go_on_as_they_would(tmp_path):
    def layers():
        return [keras.layers.Dense(5), keras.layers.Dropout(0.5), keras.layers.Dense(3)]

    whole, first = make(layers=layers), make(layers=layers)
    start_like(whole, first)
    for mine, other in zip(whole.layers[1:2], first.layers[1:2], strict=True):
        mine.seed_generator.state.assign(other.seed_generator.state)
    train(whole, epochs=2)
    train(first, [Checkpoint(tmp_path)], epochs=1)
    again = make(layers=layers)
    train(again, [Checkpoint(tmp_path)], epochs=2)
    for a, b in zip(raw(whole), raw(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_later_state_restored_by_tensorflow_counts_and_has_fresh_noise(tmp_path):
    model = make()
    train(model, [Checkpoint(tmp_path / "c")], epochs=1)
    train(model, [Checkpoint(tmp_path / "c")], epochs=3)
    later = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = later.save(str(tmp_path / "tf"))
    steps = model.optimizer.ledger.steps
    other = make()
    train(other, epochs=0)
    other.build((None, 6))
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    assert other.optimizer.ledger.steps == steps == 9


def test_what_else_is_in_the_folder_stays(tmp_path):
    (tmp_path / "mine.weights.h5").write_bytes(b"mine")
    train(make(), [Checkpoint(tmp_path)], epochs=2)
    assert (tmp_path / "mine.weights.h5").read_bytes() == b"mine"


def test_an_interrupted_fit_leaves_no_epoch_behind(tmp_path):
    model = make()
    with pytest.raises(Killed):
        train(model, [Checkpoint(tmp_path), KillAfter(7)])
    resumed_model = make()
    with pytest.raises(Killed):
        train(resumed_model, [Checkpoint(tmp_path), KillAfter(8)])
    before = resumed_model.optimizer.ledger.steps
    resumed_model.fit(PLAN.batches(X, Y), epochs=1, steps_per_epoch=1, verbose=0)
    assert resumed_model.optimizer.ledger.steps == before + 1


def test_two_checkpoints_in_one_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="takes one"):
        train(make(), [Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")])
