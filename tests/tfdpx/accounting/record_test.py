"""The record of a run: sums, entries that count once, and refusals."""

import json
import math
import zipfile

import numpy as np
import pytest

from tfdpx import _files as files
from tfdpx.accounting import Ledger, selection
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record, UpstreamTraining
from tfdpx.report import words

UPDATES = Ledger((Entry(4.0, 0.1, 60, run=7),))
RUN = [Entry(10.0, 0.1, 60), Entry(30.0, 1.0, 1)]
TUNED = Ledger.selected(RUN, 5.0, 1e-5)


def record(**changes):
    defaults = dict(
        program="classify",
        data=DatasetId("folder:photos", 500, "1f"),
        ledger=UPDATES + TUNED,
        delta=1e-5,
        seen=(UpstreamTraining(DatasetId("digits"), Ledger((Entry(0.0, 1.0, 3),))),),
        results={"steps": 60, "accuracy": np.float32(0.5), "lost": math.nan, "most": math.inf},
    )
    return Record(**{**defaults, **changes})


def test_a_file_gives_back_what_was_saved(tmp_path):
    record().save(tmp_path / "record.json")
    loaded = records.read(tmp_path / "record.json")
    assert (loaded.ledger, loaded.data, loaded.seen) == (
        record().ledger,
        record().data,
        record().seen,
    )
    assert [entry.kind for entry in loaded.ledger.entries] == ["update", "selection", "selection"]
    assert records.plain(loaded.view()) == records.plain(record().view())
    assert loaded.results == {"steps": 60, "accuracy": 0.5, "lost": None, "most": "inf"}
    assert json.loads((tmp_path / "record.json").read_text(), parse_constant=pytest.fail)
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_model_file_holds_it_and_nothing_else_changes(tmp_path):
    path = tmp_path / "m.keras"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
    assert records.read(path) is None
    record(program="pretrain").save(path)
    record().save(path)
    assert records.read(path).program == "classify"
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ["config.json", "tfdpx_record.json"]


def test_privacy_losses_add_up_by_the_accountants():
    tuned = selection.selection_epsilon(RUN, 1e-5, 5.0)
    assert record().epsilon == UPDATES.epsilon(1e-5) + tuned
    assert record().total_delta == 2e-5
    assert (TUNED.epsilon(1e-6), TUNED.total_delta(1e-6)) == (tuned, 1e-5)
    assert Ledger().epsilon(None) == 0 and Ledger().total_delta(None) is None
    assert Ledger((Entry(0.0, 1.0, 1),)).epsilon(None) == math.inf


def test_a_run_in_two_files_counts_once():
    once = record().ledger
    later = Ledger((Entry(4.0, 0.1, 90, run=7),))
    assert once + once == once
    assert (once + later).steps == 90 + TUNED.steps
    other = Ledger((Entry(4.0, 0.1, 60, run=8),)) + Ledger.selected(RUN, 5.0, 1e-5)
    assert (once + other).steps == 120 + 2 * TUNED.steps
    assert len((once + other).selections) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields["ledger"]["entries"][0].update(noise_multiplier=10**400),
        lambda fields: fields.pop("ledger"),
        lambda fields: fields["seen"][0]["data"].update(path="/data"),
        lambda fields: fields.update(format="tfdpx.Record/2"),
    ],
)
def test_an_edited_record_with_a_valid_digest_is_refused(change, tmp_path):
    fields = json.loads(record().to_json())
    change(fields)
    del fields["digest"]
    (tmp_path / "record.json").write_bytes(files.sealed(fields))
    with pytest.raises(ValueError, match=r"Cannot read .*record\.json.*restore it from a copy"):
        records.read(tmp_path / "record.json")


def test_every_flipped_byte_is_found_or_harmless():
    content, rng = record().to_json(), np.random.default_rng(0)
    whole = Record.from_json(content)
    for place in rng.integers(0, len(content), 200):
        flipped = bytearray(content)
        flipped[place] ^= 1 << int(rng.integers(0, 8))
        try:
            assert Record.from_json(bytes(flipped)) == whole
        except ValueError:
            pass


@pytest.mark.parametrize(
    ("changes", "is_releasable"),
    [
        ({}, True),
        ({"ledger": Ledger((Entry(4.0, 0.1, 60, seeded=True),))}, False),
        ({"ledger": Ledger((Entry(0.0, 0.1, 60),))}, False),
        ({"searched": "a grid"}, True),  # The ledger includes the search.
        ({"ledger": UPDATES, "searched": "a grid"}, False),
        ({"ledger": Ledger()}, False),  # Drawings, on weights that saw the digits without noise.
        (
            {"ledger": Ledger(), "seen": (UpstreamTraining(DatasetId("digits"), UPDATES, 1e-5),)},
            True,
        ),
    ],
)
def test_which_runs_may_be_released(changes, is_releasable):
    assert record(**changes).is_releasable is is_releasable


def test_shuffled_batches_are_not_amplified():
    epochs, updates = (
        Entry(4.0, 0.1, 60, poisson_sampled=False, shuffled=True, run=8),
        Ledger((Entry(4.0, 1.0, 7),)),  # The first update may be the last of an epoch.
    )
    shuffled = record(ledger=Ledger((epochs,)), sampling="shuffle")
    assert shuffled.is_approximate
    assert shuffled.ledger_as_drawn().epsilon(1e-5) == updates.epsilon(1e-5)
    # An earlier run on the same data is accounted by its own sampling, not by this run's.
    for sampling in ("poisson", "shuffle"):
        both = record(ledger=UPDATES + Ledger((epochs,)), sampling=sampling)
        drawn = both.ledger_as_drawn().epsilon(1e-5)
        assert drawn == pytest.approx((UPDATES + updates).epsilon(1e-5), rel=1e-3)


def test_a_search_is_not_paid_for_by_another_behind_the_weights():
    upstream = (UpstreamTraining(DatasetId("digits"), TUNED),)
    paid = record(searched="a grid", seen=())
    assert paid.is_releasable and "among a grid: epsilon covers" in _text(paid)
    unpaid = record(searched="a grid", seen=upstream)
    assert not unpaid.is_releasable and "epsilon covers the choice" not in _text(unpaid)
    assert "how the arguments were searched: a grid" in _text(unpaid)
    assert "chosen among" not in _text(record(seen=upstream))


def _text(record):
    return " ".join(words.statement(record).split())
