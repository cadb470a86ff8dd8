"""`account`: the joint privacy loss of runs, and refusals."""

import dataclasses
import io
import json
import pathlib
import re
import shutil
import zipfile

import dp_accounting
import h5py
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant

from tfdpx import _resumable as resumable
from tfdpx.accounting import Ledger
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record, UpstreamTraining
from tfdpx.report import words
from tfdpx.train import account

PHOTOS = DatasetId("folder:photos", 500, "01")


@pytest.fixture
def ask(run):
    """A function from flags to the last line, and all text without line breaks."""

    def asked(**arguments):
        record, text = run(account, **arguments)
        return record, " ".join(text.split())

    return asked


def test_releases_of_other_libraries_are_lines_that_a_person_can_write(ask, tmp_path, refusal):
    release = dict(epsilon=0.5, delta=0, unit="example", neighbours="add_or_remove", name="counts")
    path = tmp_path / "releases.jsonl"
    path.write_text(f"{json.dumps(release)}\n{json.dumps(release | {'delta': 1e-6})}\n")
    gaussians = Ledger((Entry(4.0, 1.0, 20),), delta=1e-5)
    gaussians.save(tmp_path / "ledger.json")
    record, text = ask(workdir=f"{path},{tmp_path / 'ledger.json'}", delta=1e-5)
    assert record["epsilon"] == pytest.approx(gaussians.epsilon(1e-5) + 1.0)
    assert record["delta"] == pytest.approx(1.1e-5)
    assert "of another mechanism, counts: epsilon = 0.5, delta = 1e-06" in text
    path.write_text(json.dumps(release | {"neighbours": "replace_one"}))
    assert 'must be "add_or_remove"' in refusal(account, workdir=path)


def composed(*runs):
    """Returns dp_accounting's epsilon of runs, each of a noise and a number of updates."""
    judge = pld_privacy_accountant.PLDAccountant()
    for noise, steps in runs:
        event = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(noise))
        judge.compose(event, steps)
    return judge.get_epsilon(1e-5)


def leave(folder, noise=4.0, steps=60, run=1, data=PHOTOS, **changes):
    """Writes the record of a run to a folder."""
    ledger = Ledger((Entry(noise, 0.1, steps, run=run),))
    defaults = dict(program="classify", data=data, ledger=ledger, delta=1e-5)
    folder.mkdir(parents=True, exist_ok=True)
    Record(**{**defaults, **changes}).save(folder / "record.json")
    return folder


def save_model(path, ledger):
    """Saves a `.keras` file as Keras saves a model with a private optimizer."""
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["optimizer/vars/ledger"] = np.frombuffer(ledger.to_json().encode(), "uint8")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", weights.getvalue())


def test_one_statement_for_a_folder_of_runs_and_ledgers(ask, tmp_path):
    first, copy = leave(tmp_path / "runs" / "a"), tmp_path / "copy"
    second = leave(first / "checkpoint" / "b", noise=6.0, steps=30, run=2)
    shutil.copytree(first, copy)  # It counts once.
    shutil.copy(second / "record.json", copy / "alice.json")
    third, fourth = (Ledger((Entry(20.0, 0.1, 10, run=run),)) for run in (3, 4))
    third.save(copy / "ledger")
    save_model(copy / "tfdpx-checkpoint.zip", fourth)
    answer, text = ask(workdir=[first, copy])
    assert ask(workdir=tmp_path)[0] == answer
    expected = composed((4.0, 60), (6.0, 30), (20.0, 20))
    assert answer["epsilon_pld"] == pytest.approx(expected, rel=2e-3)
    assert (answer["steps"], answer["num_examples"]) == (110, 500)
    assert "adding or removing one example" in text and answer["releasable"] is True
    both = Ledger((Entry(4.0, 0.1, 120),)).attack_bounds(1e-5)
    leave(tmp_path / "same" / "a"), leave(tmp_path / "same" / "b", run=2)
    answer, text = ask(workdir=tmp_path / "same")
    assert answer["attack_bounds"]["mu"] == pytest.approx(both.mu, rel=1e-6)
    assert words.say("guesses", both, "example") in text
    people = Ledger((Entry(4.0, 0.1, 60, run=1, unit="user"),))
    assert "whether one person" in ask(workdir=leave(tmp_path / "c", ledger=people))[1]


def test_the_best_of_several_runs_adds_up(ask, tmp_path):
    tuned = Ledger.selected([Entry(10.0, 0.1, 60), Entry(40.0, 1.0, 1)], 5.0, 1e-5)
    leave(tmp_path / "a")
    leave(tmp_path / "b", ledger=tuned, searched="5 runs")
    answer, text = ask(workdir=tmp_path)
    both = composed((4.0, 60)) + tuned.epsilon(None)
    assert answer["epsilon_pld"] == pytest.approx(both, rel=2e-3) and answer["releasable"] is True
    assert answer["delta"] == pytest.approx(2e-5) and "adds its own epsilon" in text


def test_trainings_behind_the_weights_count_where_the_data_are_the_same(ask, tmp_path):
    ledger = Ledger((Entry(4.0, 0.1, 60, run=3),))
    behind = UpstreamTraining(DatasetId("digits:0-4"), ledger, 1e-5)
    leave(tmp_path / "later", data=DatasetId("digits:5-9"), seen=(behind,))
    assert ask(workdir=tmp_path)[0]["epsilon"] == pytest.approx(composed((4.0, 60)), rel=2e-3)
    leave(tmp_path / "whole", data=DatasetId("digits"), run=2)
    assert ask(workdir=tmp_path)[0]["epsilon"] == pytest.approx(composed((4.0, 180)), rel=2e-3)


def test_different_data_or_deltas_do_not_compose_without_a_word(ask, refusal, tmp_path):
    leave(tmp_path / "a")
    leave(tmp_path / "b", run=2, data=DatasetId("folder:photos", 500, "02"))
    assert "different identifiers" in refusal(account, workdir=tmp_path)
    answer, _ = ask(workdir=tmp_path, same_data=True)
    assert answer["epsilon_pld"] == pytest.approx(composed((4.0, 120)), rel=2e-3)
    leave(tmp_path / "b", run=2, data=DatasetId("folder:photos", 499, "01"), delta=1e-6)
    assert "not share one delta. Found: 1e-06, 1e-05" in refusal(account, workdir=tmp_path)
    answer, _ = ask(workdir=tmp_path, delta=1e-5)
    assert (answer["delta"], answer["num_examples"]) == (1e-5, [499, 500])


DAMAGED = [
    ("ledger.json", '{"format": "tfdpx.Ledger/8"', "ledger.json.*not a whole ledger"),
    ("record.json", "{}", "no whole record"),
    ("m.keras", "weights", "Cannot read"),
    *(
        (name, text, f"{name} is neither .* for people: give record.json or model.keras of its run")
        for name, text in {"report.html": "<html>", "table.csv": "a,b", "card.md": "---"}.items()
    ),
    ("missing/notes.txt", None, "Nothing in .*notes.txt says what was spent"),
    ("run", None, "Nothing in .*/run says what was spent.*Finish it with --resume"),
]


def test_files_that_do_not_say_what_was_spent(refusal, tmp_path):
    begin(tmp_path / "run")
    for name, text, message in DAMAGED:
        if text is not None:
            (tmp_path / name).write_text(text)
        assert re.search(message, refusal(account, workdir=tmp_path / name)), name
    assert "`tfdpx plan`" in refusal(account)


def begin(run):
    """Writes the first file of a run that does not finish."""
    (run / "checkpoint").mkdir(parents=True)
    resumable.save(run / "checkpoint" / "settings.json", {})


def test_a_folder_is_known_by_its_content_and_what_cannot_be_read_is_listed(ask, tmp_path):
    leave(tmp_path / "run")
    third, fourth = (Ledger((Entry(20.0, 0.1, 10, run=run),)) for run in (3, 4))
    third.save(tmp_path / "weights.old")
    save_model(tmp_path / "a_copy", fourth)
    # As TensorFlow's package has it.
    package = tmp_path / "venv" / "checkpoint"
    package.mkdir(parents=True)
    (package / "settings.json").write_text('{"format": "another"}')
    np.savez(package / "arrays.npz", np.zeros(3))
    with h5py.File(package / "data.h5", "w") as file:
        file["x"] = np.zeros(3)
    (tmp_path / "curve.jsonl").write_text('{"step": 20, "epsilon": 3.0}')
    answer, text = ask(workdir=tmp_path)
    assert answer["steps"] == 80 and answer["releasable"] is True and answer["not_read"] == []
    assert "All together are" in text

    begin(tmp_path / "cut")
    (tmp_path / "damaged.keras").write_text("weights")
    answer, text = ask(workdir=tmp_path)
    assert answer["steps"] == 80 and answer["releasable"] is False
    assert answer["epsilon_is_lower_bound"] is True and answer["attack_bounds"] is None
    names = [pathlib.Path(path).name for path in answer["not_read"]]
    assert names == ["damaged.keras", "checkpoint"]
    assert "All together are" not in text and "could be counted" in text


def test_a_file_that_tells_of_losses_but_cannot_be_read_is_listed(ask, tmp_path):
    ledger = Ledger((Entry(4.0, 0.1, 60, run=7),), delta=1e-5)
    text = dataclasses.replace(ledger, entries=(Entry(4.0, 0.1, 60, run=8),)).to_json().encode()
    release = b'{"epsilon": 0.5, "delta": 0, "unit": "example", "neighbors": "add_or_remove"}'
    unreadable = {
        "releases.jsonl": release,
        "edited.json": b"\xef\xbb\xbf" + text,
        "weights-1.data-00000-of-00001": b"\x00\x01" + text,
    }
    for name, content in unreadable.items():
        folder = tmp_path / name
        folder.mkdir()
        ledger.save(folder / "ledger.json")
        (folder / name).write_bytes(content)
        record, _ = ask(workdir=folder, delta=1e-5)
        assert record["not_read"] == [str(folder / name)] and not record["releasable"]
    (tmp_path / "record.json").symlink_to(tmp_path / "nowhere")
    assert str(tmp_path / "record.json") in ask(workdir=tmp_path, delta=1e-5)[0]["not_read"]


def test_examples_and_people_have_no_common_statement(ask, tmp_path):
    leave(tmp_path / "a")
    leave(tmp_path / "b", ledger=Ledger((Entry(4.0, 0.1, 60, run=2, unit="user"),)))
    answer, text = ask(workdir=tmp_path)
    assert answer["epsilon"] is None and answer["releasable"] is False
    assert "No common statement is known" in text and "infinite" not in text


def test_the_model_of_another_run_is_refused(finished_runs, ask, refusal, tmp_path):
    run = finished_runs("private").workdir
    mixed = shutil.copytree(run, tmp_path / "mixed")
    assert ask(workdir=mixed)[0]["epsilon"] == ask(workdir=run / "model.keras")[0]["epsilon"]
    leave(mixed)
    message = f"{mixed / 'model.keras'} and {mixed / 'record.json'} are not of one run"
    assert message in refusal(account, workdir=mixed)


def test_a_model_that_was_trained_on_and_saved_in_place(ask, refusal, tmp_path):
    leave(tmp_path)
    ledger, more = Ledger((Entry(4.0, 0.1, 60, run=1),)), Ledger((Entry(1.0, 0.1, 30, run=2),))
    save_model(tmp_path / "model.keras", ledger + more)
    both = pytest.approx(composed((4.0, 60), (1.0, 30)), rel=2e-3)
    assert ask(workdir=tmp_path)[0]["epsilon"] == both
    # Keras loaded the file without its optimizer, so the ledger is lost and begins at zero.
    save_model(tmp_path / "model.keras", Ledger(more.entries, is_complete=False))
    assert "does not hold what the record says was spent" in refusal(account, workdir=tmp_path)
    answer, text = ask(workdir=[tmp_path / "record.json", tmp_path / "model.keras"])
    assert answer["epsilon"] == both and answer["epsilon_is_lower_bound"] is True
    assert "All together are" not in text and "No differential privacy can be stated" in text
    assert answer["releasable"] is False and "Not releasable: a part of what" in text
