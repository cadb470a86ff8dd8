"""Attacks on the seeds: no file or copy holds them, and no noise is used twice."""

import copy
import pickle

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx

PLAN = tfdpx.PrivacyPlan(60, batch_size=20, steps=30, noise_multiplier=1.0, delta=1e-3)
STILL = 1e-6  # A learning rate at which weights hardly move.


def make(seed=None, **arguments):
    model = small.model(tfdpx.DPSGD(1.0, plan=PLAN, seed=seed, use_ema=True), **arguments)
    model.build((None, 6))
    return model


def traces(model):
    """Every way to write the seeds down that would betray them."""
    run = model.optimizer.run
    found = set()
    for values in (run.state()["noise_seed"], run.draw_seed):
        for value in values:
            for order in ("little", "big"):
                found.add(value.to_bytes(8, order, signed=True))
            found.add(str(value).encode())
            found.add(f"{value & (2**64 - 1):016x}".encode())
    return found


def content(path):
    """All bytes of a file, or of the files of a folder, compressed members unpacked."""
    import zipfile

    if path.is_dir():
        return b"".join(content(inner) for inner in path.iterdir())
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return b"".join(archive.read(name) for name in archive.namelist())
    return path.read_bytes()


def write(model, kind, folder):
    folder.mkdir()
    if kind == "keras":
        model.save(folder / "m.keras")
    elif kind == "weights":
        model.save_weights(folder / "m.weights.h5")
    elif kind == "checkpoint":
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "c"))
    elif kind == "export":
        model.export(str(folder / "e"), verbose=False)
    elif kind == "json":
        (folder / "m.json").write_text(model.to_json())
    else:
        (folder / "m.pickle").write_bytes(pickle.dumps(model))


@pytest.mark.parametrize("seed", [None, 123_456_789_123])
@pytest.mark.parametrize("kind", ["keras", "weights", "checkpoint", "export", "json", "pickle"])
def test_no_file_holds_a_seed(kind, seed, tmp_path):
    model = make(seed)
    x, y = small.data(60)
    model.fit(PLAN.batches(x, y, optimizer=model.optimizer), steps_per_epoch=2, verbose=0)
    write(model, kind, tmp_path / kind)
    found = content(tmp_path / kind)
    assert len(found) > 100
    assert not [trace for trace in traces(model) if trace in found]
    assert str(seed).encode() not in found or seed is None


def test_the_search_finds_a_seed_that_is_there(tmp_path):
    model = make()
    (tmp_path / "f").write_bytes(np.array(model.optimizer.run.state()["noise_seed"]).tobytes())
    found = content(tmp_path / "f")
    assert [trace for trace in traces(model) if trace in found]


def test_no_file_holds_numbers_of_the_data_without_noise(tmp_path):
    """Two runs that differ in the data alone differ in nothing that is saved but noisy values."""
    import h5py

    names = []
    model = make()
    x, y = small.data(60)
    x[0] = np.nan
    model.fit(PLAN.batches(x, y), steps_per_epoch=3, verbose=0)
    model.save_weights(tmp_path / "m.weights.h5")
    with h5py.File(tmp_path / "m.weights.h5") as file:
        file.visititems(lambda name, item: names.append((name, getattr(item, "shape", None))))
    stored = [name for name, shape in names if shape is not None]
    assert not [name for name in stored if "metric" in name or "loss" in name]
    # Counted, but in no variable that is saved.
    assert not [v.path for v in model.optimizer.variables if "nonfinite" in v.path]


def noise_of_one_update(model):
    """The change of the weights by an update without examples: noise alone."""
    x, y = small.data(20)
    before = small.weights(model)
    model.train_on_batch(x, y, sample_weight=np.zeros(20, "float32"))
    return small.weights(model) - before


def reload(model, folder):
    model.save(folder / "m.keras")
    return keras.saving.load_model(folder / "m.keras")


def load_weights(model, folder):
    model.save_weights(folder / "m.weights.h5")
    other = make(seed=1)
    other.load_weights(folder / "m.weights.h5")
    return other


def load_into_itself(model, folder):
    model.save_weights(folder / "m.weights.h5")
    model.load_weights(folder / "m.weights.h5")
    return model


def restore(model, folder):
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "c"))
    other = make()
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    return other


def from_config(model, folder):
    other = make()
    config = keras.optimizers.serialize(model.optimizer)
    other.compile(keras.optimizers.deserialize(config), loss=other.loss)
    return other


DUPLICATES = {
    "deepcopy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "load_model": reload,
    "load_weights": load_weights,
    "load_into_itself": load_into_itself,
    "tf.train.Checkpoint": restore,
    "config": from_config,
}


@pytest.mark.parametrize("name", DUPLICATES)
def test_a_copy_has_noise_of_its_own(name, tmp_path):
    model = make(seed=1)
    noise_of_one_update(model)
    other = DUPLICATES[name](model, tmp_path)
    other.optimizer.iterations.assign(model.optimizer.iterations)
    twin = make(seed=1)
    noise_of_one_update(twin)
    wanted = noise_of_one_update(twin)  # What the run that was copied would add next.
    found = noise_of_one_update(other)
    assert np.abs(found).max() > 1e-3
    assert abs(np.corrcoef(found, wanted)[0, 1]) < 0.5
    if other is not model:
        np.testing.assert_array_equal(noise_of_one_update(model), wanted)


def test_assigned_iterations_repeat_no_noise():
    model = make(seed=1)
    seen = []
    for _ in range(3):
        model.optimizer.iterations.assign(0)
        seen.append(noise_of_one_update(model))
    assert np.abs(np.corrcoef(seen)[np.triu_indices(3, 1)]).max() < 0.5


def test_two_continuations_of_a_saved_model_have_independent_noise(tmp_path):
    """The attack: their difference would be that of the clipped sums, without noise."""
    model = make()
    model.save(tmp_path / "m.keras")
    x, y = small.data(60)
    updates = []
    for _ in range(2):
        loaded = keras.saving.load_model(tmp_path / "m.keras")
        before = small.weights(loaded)
        loaded.fit(PLAN.batches(x, y), steps_per_epoch=1, verbose=0)
        updates.append(small.weights(loaded) - before)
    assert np.abs(updates[0] - updates[1]).std() > 0.5 * np.sqrt(2) / 20


def test_a_changed_learning_rate_changes_the_noise_that_follows():
    runs = []
    for rate in (STILL, 2 * STILL):
        model, noise = make(seed=1), []
        for step in range(3):
            model.optimizer.learning_rate = rate if step == 1 else STILL
            noise.append(noise_of_one_update(model) / float(model.optimizer.learning_rate))
        runs.append(noise)
    same = [abs(np.corrcoef(a, b)[0, 1]) for a, b in zip(*runs, strict=True)]
    assert same[0] > 0.9 and same[1] > 0.9 and same[2] < 0.5


def test_seeds_keep_all_of_their_bits():
    run = make().optimizer.run
    state = {**run.state(), "noise_seed": [2**63 - 1, -(2**63) + 1], "draw_seed": [2**62 + 1, 3]}
    run.restore(state)
    assert run.state() == state
