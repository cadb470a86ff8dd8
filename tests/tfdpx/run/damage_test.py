"""A checkpoint that is torn, foreign or changed is refused with the reason, and nothing is loaded.

Damage to any byte: `fuzz_inputs`.
"""

import resource
import shutil

import fuzz_inputs
import h5py
import individual_replay as replay
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfdpx
from tfdpx.accounting import IndividualAccountant
from tfdpx.callbacks import Checkpoint
from tfdpx.run import files

PLAN = replay.make_plan()
FORMAT = "tfdpx.Checkpoint/2"


def fit(folder, epochs=1, model=None):
    model = model or replay.make_model(PLAN, IndividualAccountant(PLAN))
    batches = PLAN.batches(*replay.data(), optimizer=model.optimizer)
    saved = [] if folder is None else [Checkpoint(folder)]
    model.fit(batches, epochs=epochs, steps_per_epoch=2, verbose=0, callbacks=saved)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


NAMES = ("run.json", "*.weights.h5", "*.norms.npz")


@pytest.mark.parametrize("pattern", NAMES)
@given(data=st.data())
def test_any_damage_is_refused(whole, pattern, data):
    [path] = whole.glob(pattern)
    how = data.draw(fuzz_inputs.damage(path.stat().st_size))
    fuzz_inputs.check_file(whole, path.name, how, 2)


@pytest.mark.parametrize("pattern", NAMES)
def test_every_length_but_the_whole_is_refused(whole, pattern):
    [path] = whole.glob(pattern)
    size = path.stat().st_size
    for length in {0, 1, size // 2, size - 1, *range(0, size, max(size // 100, 1))}:
        fuzz_inputs.check_file(whole, path.name, ("cut", length, b"x"), 2)


def test_the_check_of_damage_rejects_a_reader_that_looks_at_nothing(whole, monkeypatch):
    record = files.opened((whole / "run.json").read_bytes(), FORMAT)
    monkeypatch.setattr(files, "digest_of_file", lambda path: record["digests"][path.name])
    [path] = whole.glob("*.weights.h5")
    with pytest.raises(AssertionError):
        fuzz_inputs.check_file(whole, path.name, ("cut", 10, b""), 2)


FOREIGN = {
    "empty": b"",
    "deep": b"[" * 200_000,
    "list": b"[]",
    "number": b"3",
    "another project": b'{"format": "orbax/1", "digest": "x"}',
    "first version": b'{"format": "tfdpx.Checkpoint/1"}',
    "no digest": b'{"format": "tfdpx.Checkpoint/2", "run": {"updates": 3}}',
    "bytes": bytes(range(256)),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_foreign_record_is_refused(folder, what):
    (folder / "run.json").write_bytes(FOREIGN[what])
    with pytest.raises(ValueError, match="is damaged: .+Restore the folder"):
        Checkpoint(folder).saved_updates  # noqa: B018
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()
    with pytest.raises(ValueError, match="is damaged"):
        Checkpoint(folder).saved_updates  # noqa: B018


def state(model):
    return [np.array(v) for v in (*model.variables, *model.optimizer.variables)]


def test_what_is_refused_leaves_the_model_as_it_was(folder):
    """Also where the files are whole, and what they hold is not the state that was."""
    content = (folder / "run.json").read_bytes()
    record = files.opened(content, FORMAT)
    changes = [
        ({**record, "state": "another"}, "does not hold all"),
        ({**record, "identity": {**record["identity"], "model": []}}, "another model"),
        (None, "is damaged"),
    ]
    for changed, reason in changes:
        (folder / "run.json").write_bytes(files.sealed(changed) if changed else content[:-9])
        model = replay.make_model(PLAN, IndividualAccountant(PLAN))
        model.weights[0].assign(model.weights[0] + 1)
        model.optimizer.build(model.trainable_variables)
        before = state(model)
        with pytest.raises(ValueError, match=reason):
            fit(folder, epochs=2, model=model)
        for a, b in zip(before, state(model), strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.optimizer.run.number != record["run"]["number"]
        assert model.optimizer.run.updates == 0


def test_it_holds_nothing_but_the_state_of_the_run(whole):
    """No gradients or sums before the noise: what there is has a name here."""
    model, found = fit(None), {}
    with h5py.File(next(whole.glob("*.h5"))) as file:
        file.visititems(lambda name, item: found.update({name: getattr(item, "shape", None)}))
    arrays = {name: shape for name, shape in found.items() if shape is not None}
    ledger = {n for n in arrays if n.endswith(("ledger_facts", "ledger_steps"))}
    kept = sorted(arrays[name] for name in arrays.keys() - ledger)
    assert len(ledger) == 2
    assert kept == sorted(tuple(v.shape) for v in (*model.weights, *model.optimizer.variables))
    with np.load(next(whole.glob("*.npz"))) as norms:
        assert set(norms.files) == {"examples", "levels", "since", "counts", "steps", "refreshes"}
        assert np.array_equal(norms["levels"], np.round(norms["levels"]))  # Rounded up, not raw.
    record = files.opened((whole / "run.json").read_bytes(), FORMAT)
    assert set(record) == set(
        "format identity epoch weights norms digests state random run".split()
    )
    assert set(record["run"]) == set(
        "number used noise_seed draw_seed branch rate updates nonfinite".split()
    )


@pytest.mark.parametrize("folder", ["/proc/nothing/here", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_found_before_the_first_step(tmp_path, folder):
    (tmp_path / "file").write_text("a file, and no folder")
    model = replay.make_model(PLAN, IndividualAccountant(PLAN))
    with pytest.raises(OSError, match="Nothing can be saved in"):
        fit(tmp_path / folder, model=model)
    assert model.optimizer.ledger.steps == 0


def test_a_full_disk_ends_the_run_and_leaves_the_last_save_whole(folder):
    """The kernel cuts off every file at so many bytes, of weights, norms and record alike."""
    before = {path.name for path in folder.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = replay.make_model(PLAN, IndividualAccountant(PLAN))
    for most in (0, 512, 18_000):  # The norms are the longest file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(OSError, match="(?s)could not be saved .*The save before is whole"):
                fit(folder, epochs=2, model=model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {path.name for path in folder.iterdir()} == before
        assert Checkpoint(folder).saved_updates == 2
    assert fit(folder, epochs=2).optimizer.ledger.steps == 4


def test_two_that_go_on_from_one_checkpoint_are_one_run(whole, tmp_path):
    """They share noise and sums: their difference is zero, and shows nothing."""
    models = [
        fit(shutil.copytree(whole, tmp_path / name), epochs=3) for name in ("first", "second")
    ]
    for a, b in zip(*map(state, models), strict=True):
        np.testing.assert_array_equal(a, b)
    one, other = (model.optimizer.ledger for model in models)
    assert one == other == one + other and one.steps == 6


def test_a_plan_that_has_ended_trains_no_further():
    model = fit(None, epochs=4)
    assert model.optimizer.ledger.steps == PLAN.steps == 8
    with pytest.raises(tfdpx.callbacks.BudgetExceeded, match="used up: 8 of 8 steps.*new plan"):
        fit(None, model=model)
    assert model.optimizer.ledger.steps == 8
