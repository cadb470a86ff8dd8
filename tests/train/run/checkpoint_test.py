"""Checkpoints: whole, secret, and no way to resume into a wrong epsilon."""

import dataclasses
import os

import keras
import numpy as np
import pytest
import seeds

from tfdpx.train.config.errors import UserError
from tfdpx.train.data import loading
from tfdpx.train.run import checkpoint
from tfdpx.train.run.checkpoint import LastState, RunFolder

STEPS = 100
SETTINGS = {"seed": None, "batch_size": 512, "report_every": 5}


def make_model():
    seeds.fix(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fit(model, callbacks, epochs):
    x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
    model.fit(
        x, x[:, :2], batch_size=10, shuffle=False, epochs=epochs, callbacks=callbacks, verbose=0
    )


def begin(workdir, settings=SETTINGS):
    folder = RunFolder(workdir, settings, resume=False)
    folder.begin()
    return folder


def last_state(workdir, steps=STEPS, resume=False):
    return LastState(RunFolder(workdir, SETTINGS, resume), steps)


def test_restores_weights_and_the_optimizers_state(tmp_path):
    class Remember(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.weights = [v.numpy() for v in self.model.weights]
            self.state = [v.numpy() for v in self.model.optimizer.variables]

    remember = Remember()
    fit(make_model(), [last_state(tmp_path), remember], epochs=2)
    restored = make_model()
    last_state(tmp_path, resume=True).restore(restored)
    assert int(restored.optimizer.iterations) == 4
    for variable, expected in zip(restored.weights, remember.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)
    for variable, expected in zip(restored.optimizer.variables, remember.state, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)


def test_resume_without_anything_saved_begins_anew(tmp_path):
    model = make_model()
    last_state(tmp_path, resume=True).restore(model)
    assert int(model.optimizer.iterations) == 0


def test_unfinished_run_is_not_overwritten_unasked(tmp_path):
    begin(tmp_path)
    with pytest.raises(UserError, match="--resume") as error:
        RunFolder(tmp_path, SETTINGS, resume=False)
    assert str(tmp_path) in str(error.value)


def test_resume_with_other_settings_is_refused(tmp_path):
    begin(tmp_path)
    with pytest.raises(UserError, match="began with batch_size=512.*batch_size=256"):
        RunFolder(tmp_path, {**SETTINGS, "batch_size": 256}, resume=True)
    RunFolder(tmp_path, {**SETTINGS, "report_every": 1}, resume=True)


def test_facts_tell_data_and_files_apart(tmp_path):
    images, labels = np.arange(32, dtype="uint8").reshape(8, 2, 2, 1), np.arange(8) % 2
    whole = loading.ImageData(
        "made up", images, labels, images, labels, 8, (2, 2, 1), "test", ("a", "b"), 127.5, 127.5
    )
    file = tmp_path / "model.keras"
    file.write_bytes(b"weights")
    before = checkpoint.facts(whole, [file])

    def changed(**fields):
        after = checkpoint.facts(dataclasses.replace(whole, **fields), [file])
        return {name for name in before if before[name] != after[name]}

    assert changed() == set()
    # Nothing of the private images is kept, not even a hash: it would test membership.
    assert changed(train_x=images[::-1]) == set()
    assert changed(train_x=images[1:], train_y=labels[1:], num_train=7) == {"num_examples"}
    assert changed(class_names=("a", "c")) == {"class_names"}
    assert changed(image_shape=(4, 4, 1)) == {"image_shape"}
    file.write_bytes(b"weight5")
    assert changed() == {f"file {file} (a hash)"}


def test_a_save_that_fails_leaves_the_last_one_whole(tmp_path, monkeypatch):
    saved = last_state(tmp_path)
    model = make_model()
    fit(model, [saved], epochs=1)

    def fail(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        fit(model, [saved], epochs=1)
    restored = make_model()
    last_state(tmp_path, resume=True).restore(restored)
    assert int(restored.optimizer.iterations) == 2


def test_the_end_of_the_run_is_not_saved_since_nothing_would_be_left_to_resume(tmp_path):
    fit(make_model(), [last_state(tmp_path, 6)], epochs=3)
    restored = make_model()
    last_state(tmp_path, 6, resume=True).restore(restored)
    assert int(restored.optimizer.iterations) == 4


def test_seeds_survive_a_resume_and_differ_between_runs_and_uses(tmp_path):
    first = begin(tmp_path).seeds
    assert RunFolder(tmp_path, SETTINGS, resume=True).seeds == first
    (tmp_path / "other").mkdir()
    other = RunFolder(tmp_path / "other", SETTINGS, resume=False).seeds
    assert len({*first.values(), *other.values()}) == 4
    assert first["initial_weights"] < 2**32


def test_no_file_holds_a_given_seed(tmp_path):
    folder = RunFolder(tmp_path, {**SETTINGS, "seed": 123_456_789}, resume=False)
    folder.begin()
    assert all(b"123456789" not in path.read_bytes() for path in folder.path.iterdir())


def test_given_seed_determines_all_seeds(tmp_path):
    seeds = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        seeds.append(RunFolder(tmp_path / name, {**SETTINGS, "seed": seed}, resume=False).seeds)
    assert seeds[0] == seeds[1]
    assert not set(seeds[0].values()) & set(seeds[2].values())


def test_others_cannot_read_the_folder_and_remove_deletes_it(tmp_path):
    saved = begin(tmp_path)
    folder = tmp_path / "checkpoint"
    assert folder.stat().st_mode & 0o077 == 0
    saved.remove()
    assert not folder.exists()
