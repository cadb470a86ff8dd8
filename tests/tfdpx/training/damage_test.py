"""A torn, foreign or changed checkpoint is refused with the reason, and nothing is loaded.

`damage` changes any byte.
"""

import io
import resource
import shutil
import zipfile
from unittest import mock

import damage
import h5py
import individual_replay as replay
import numpy as np
import pytest
from damage import CHECKPOINT, check_checkpoint, parts
from hypothesis import given
from hypothesis import strategies as st

from tfdpx import _files as files
from tfdpx.accounting import IndividualAccountant
from tfdpx.callbacks import Checkpoint

PLAN = replay.make_plan()
MEMBERS = ("record.json", "model.weights.h5", "norms.npz")


def make():
    return replay.make_model(PLAN, IndividualAccountant(PLAN))


def fit(folder, epochs=1, model=None):
    model = model or make()
    saved = [] if folder is None else [Checkpoint(folder)]
    model.fit(
        PLAN.batches(*replay.data()), epochs=epochs, steps_per_epoch=2, verbose=0, callbacks=saved
    )
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    fit(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, part in members.items():
            archive.writestr(name, part)
    return buffer.getvalue()


@given(data=st.data())
def test_any_damage_is_refused_or_does_no_harm(whole, tmp_path_factory, data):
    how = data.draw(damage.damage((whole / CHECKPOINT).stat().st_size))
    check_checkpoint(whole, tmp_path_factory.mktemp("damaged"), how)


@pytest.mark.planted("a checkpoint is read without its digest")
def test_the_check_of_damage_rejects_a_reader_that_looks_at_nothing(whole, folder, monkeypatch):
    with zipfile.ZipFile(whole / CHECKPOINT) as archive:
        place = archive.getinfo("model.weights.h5").header_offset + 500
    monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda self, data: None)
    check_checkpoint(whole, folder, ("flip", place, b"x"))  # Only the digest detects it.
    monkeypatch.setattr(files, "digest_of", lambda part: mock.ANY)
    with pytest.raises(AssertionError):
        check_checkpoint(whole, folder, ("flip", place, b"x"))


FOREIGN = {
    "no archive": bytes(range(256)),
    "no record": zipped({"other": b""}),
    "deep": zipped({"record.json": b"[" * 200_000}),
    "number": zipped({"record.json": b"3"}),
    "another format": zipped({"record.json": b'{"format": "tfdpx.Checkpoint/2"}'}),
    "no digest": zipped({"record.json": b'{"format": "tfdpx.Checkpoint/3", "updates": 3}'}),
}


def test_a_foreign_file_is_refused(tmp_path):
    for content in FOREIGN.values():
        (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(ValueError, match="is damaged: .+Restore the folder"):
            Checkpoint(tmp_path).saved_updates  # noqa: B018


def state(model):
    return [np.array(v) for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(
    "rounding, cut, reason", [(0.01, 9, "is damaged"), (0.02, 0, "Go on with the accountant")]
)
def test_a_refused_file_leaves_the_model_as_it_was(folder, rounding, cut, reason):
    """The second file is whole, and all of it fits except the norms."""
    content = (folder / CHECKPOINT).read_bytes()
    (folder / CHECKPOINT).write_bytes(content[: len(content) - cut])
    model = replay.make_model(PLAN, IndividualAccountant(PLAN, rounding=rounding))
    model.weights[0].assign(model.weights[0] + 1)
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    with pytest.raises(ValueError, match=reason):
        fit(folder, epochs=2, model=model)
    for a, b in zip(before, state(model), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.state.updates == 0


def test_it_holds_nothing_but_the_state_of_the_run(whole):
    """Every entry is named here, so there are no gradients, seeds or sums before the noise."""
    model, members, items = fit(None), parts((whole / CHECKPOINT).read_bytes()), {}
    assert set(members) == set(MEMBERS)
    with h5py.File(io.BytesIO(members["model.weights.h5"])) as file:
        file.visititems(lambda name, item: items.update({name: getattr(item, "shape", None)}))
    arrays = {name: shape for name, shape in items.items() if shape is not None}
    ledger = {n for n in arrays if n.endswith(("vars/ledger", "vars/adapted"))}
    shapes = sorted(arrays[name] for name in arrays.keys() - ledger)
    assert len(ledger) == 2
    assert shapes == sorted(tuple(v.shape) for v in (*model.weights, *model.optimizer.variables))
    with np.load(io.BytesIO(members["norms.npz"])) as norms:
        assert set(norms.files) == {"examples", "levels", "since", "counts", "steps", "refreshes"}
        assert np.array_equal(norms["levels"], np.round(norms["levels"]))  # Rounded up, not raw.
    record = files.opened(members["record.json"], "tfdpx.Checkpoint/3")
    facts = {"plan", "number of examples", "optimizer", "individual accounting"}
    facts.add("number of the optimizer's variables, which model, momentum and schedule decide")
    assert set(record) == facts | {"format", "epoch", "updates", "run", "digests"}


@pytest.mark.parametrize("folder", ["/proc/nothing/here", "file/below"])
def test_a_folder_that_cannot_be_written_to_is_found_before_the_first_step(tmp_path, folder):
    (tmp_path / "file").write_text("a file, and no folder")
    model = make()
    with pytest.raises(OSError, match="Nothing can be saved in"):
        fit(tmp_path / folder, model=model)
    assert model.optimizer.ledger.steps == 0


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_the_last_save_whole(tmp_path):
    """The kernel limits every file to a number of bytes."""
    model = fit(tmp_path)
    saved = (tmp_path / CHECKPOINT).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 512, len(saved) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(OSError, match="(?s)could not be saved .*The save before is whole"):
                fit(tmp_path, epochs=2, model=model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path.read_bytes() for path in tmp_path.iterdir()] == [saved]
    assert fit(tmp_path, epochs=2).optimizer.ledger.steps == 4
