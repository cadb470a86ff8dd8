import json
import math
import os

import numpy as np
import pytest

from tfdpx.accounting import Ledger, epsilon
from tfdpx.accounting.ledger import Entry


@pytest.fixture
def ledger():
    return Ledger((Entry(1.5, 0.05, 10), Entry(2.0, 0.1, 3)))


def test_steps_of_one_run_count_once():
    earlier, later = Entry(1.5, 0.05, 7, run=1), Entry(1.5, 0.05, 10, run=1)
    other, unnamed = Entry(1.5, 0.05, 7, run=2), Entry(1.5, 0.05, 7)
    for first, second in [(earlier, later), (later, earlier), (later, later)]:
        assert Ledger((first,)) + Ledger((second, other)) == Ledger((later, other))
    assert (Ledger((unnamed,)) + Ledger((unnamed,))).steps == 14


def test_unknown_sampling_has_no_epsilon_until_it_is_said():
    ledger = Ledger((Entry(1.5, None, 7, poisson_sampled=False),))
    assert ledger.is_approximate
    with pytest.raises(ValueError, match="7 steps whose sampling probability is unknown"):
        ledger.epsilon(1e-5)
    assert ledger.assuming(0.05).epsilon(1e-5) == epsilon(1.5, 0.05, 7, 1e-5)


def test_ledgers_of_the_first_format_are_read():
    old = {"noise_multiplier": 1.5, "sampling_probability": 0.05, "steps": 10}
    text = json.dumps({"format": "tfdpx.Ledger/1", "entries": [old]})
    assert Ledger.from_json(text) == Ledger((Entry(1.5, 0.05, 10),))


def test_a_ledger_is_complete_if_all_of_its_parts_are(ledger, tmp_path):
    part = Ledger(ledger.entries, is_complete=False)
    assert Ledger().is_complete and (ledger + ledger).is_complete
    for joined in (part + ledger, ledger + part, part.assuming(0.1), part + part):
        assert not joined.is_complete
    assert part != ledger and part.epsilon(1e-5) == ledger.epsilon(1e-5)
    for each in (part, ledger):
        assert Ledger.from_json(each.to_json()) == each
        each.save(tmp_path / "ledger.json")
        assert Ledger.load(tmp_path / "ledger.json") == each
    for old in (1, 2, 3):  # Of which nobody knows.
        text = json.dumps({"format": f"tfdpx.Ledger/{old}", "entries": []})
        assert Ledger.from_json(text).is_complete
    with pytest.raises(TypeError, match="is_complete='no'"):
        Ledger((), "no")
    for wrong in ('"format": "tfdpx.Ledger/4", "entries": []',
                  '"format": "tfdpx.Ledger/4", "entries": [], "is_complete": "no"'):  # fmt: skip
        with pytest.raises(ValueError, match="not a whole ledger"):
            Ledger.from_json(f"{{{wrong}}}")


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon(ledger, accountant):
    assert Ledger().epsilon(1e-5, accountant) == 0.0
    single = Ledger((Entry(1.5, 0.05, 100),))
    assert single.epsilon(1e-5, accountant) == epsilon(1.5, 0.05, 100, 1e-5, accountant)
    parts = [Ledger((entry,)).epsilon(1e-5, accountant) for entry in ledger.entries]
    assert max(parts) < ledger.epsilon(1e-5, accountant) < sum(parts)
    noiseless = ledger + Ledger((Entry(0.0, 0.1, 1),))
    assert noiseless.epsilon(1e-5, accountant) == math.inf


def test_epsilon_of_unlike_full_batches_is_that_of_one_gaussian():
    # Inverse variances of Gaussians add up.
    ledger = Ledger((Entry(3.0, 1.0, 2), Entry(6.0, 1.0, 4)))
    noise_multiplier = 1 / math.sqrt(2 / 9 + 4 / 36)
    exact = epsilon(noise_multiplier, 1.0, 1, 1e-5, "pld")
    assert ledger.epsilon(1e-5) == pytest.approx(exact, rel=1e-3)


def test_resumed_runs_cost_what_one_run_does():
    first, second, whole = (Ledger((Entry(1.5, 0.05, n, run=n),)) for n in (40, 60, 100))
    joined = first + second
    assert joined.entries == (*first.entries, *second.entries)
    assert joined.steps == 100
    assert joined.epsilon(1e-5) == whole.epsilon(1e-5)
    # Neither the larger of the two, nor their sum.
    assert first.epsilon(1e-5) < second.epsilon(1e-5) < joined.epsilon(1e-5)
    assert joined.epsilon(1e-5) < first.epsilon(1e-5) + second.epsilon(1e-5)


def test_order_of_runs_does_not_matter(ledger):
    assert Ledger(ledger.entries[::-1]).epsilon(1e-5) == ledger.epsilon(1e-5)


def test_entries_do_not_change(ledger):
    with pytest.raises(AttributeError):
        ledger.entries = ()
    with pytest.raises(AttributeError):
        ledger.entries[0].steps = 1
    with pytest.raises(TypeError, match="must hold ledger entries"):
        Ledger(((1.5, 0.05, 10),))
    with pytest.raises(TypeError):
        ledger + 3


@pytest.mark.parametrize(
    "entry, name",
    [
        ((-1.0, 0.1, 1), "noise_multiplier"),
        ((1.0, 0.0, 1), "sampling_probability"),
        ((1.0, 1.5, 1), "sampling_probability"),
        ((1.0, 0.1, 0), "steps"),
        ((1.0, 0.1, 2.5), "steps"),
    ],
)
def test_entries_are_checked(entry, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        Entry(*entry)


def test_json_round_trip(ledger):
    assert Ledger.from_json(ledger.to_json()) == ledger
    assert Ledger.from_json(Ledger().to_json()) == Ledger()
    numpy_entry = Ledger((Entry(np.float32(1.5), np.float64(0.05), np.int64(10)),))
    assert Ledger.from_json(numpy_entry.to_json()) == numpy_entry


def test_save_and_load(ledger, tmp_path):
    path = tmp_path / "ledger.json"
    Ledger().save(path)
    ledger.save(path)
    assert Ledger.load(path) == Ledger.load(str(path)) == ledger
    assert os.listdir(tmp_path) == ["ledger.json"]


def damages():
    whole = Ledger((Entry(1.5, 0.05, 10),)).to_json()
    content = json.loads(whole)
    yield "empty", ""
    yield "not text", b"\xff\xfe\x00"
    for length in range(1, len(whole), 7):
        yield f"cut at {length}", whole[:length]
    yield "no entries", json.dumps({"format": content["format"]})
    yield "no format", json.dumps({"entries": content["entries"]})
    yield "other format", json.dumps(content | {"format": "tfdpx.Ledger/9"})
    yield "a list", "[]"
    yield "unknown field", whole.replace('"steps"', '"epochs"')
    yield "negative steps", whole.replace("10", "-10")
    yield "steps as text", whole.replace("10", '"10"')
    yield "not a number", whole.replace("1.5", "NaN")


@pytest.mark.parametrize("damage, content", list(damages()))
def test_a_damaged_file_is_an_error_that_names_it(damage, content, tmp_path):
    path = tmp_path / "spent.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"Damaged ledger file .*spent\.json"):
        Ledger.load(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Ledger.load(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["[" * 100_000, "run: 1E999", "steps: 1E999", "sigma: nan"])
def test_json_that_python_stumbles_over_is_no_ledger(text):
    """Found by `tools/fuzz.py`."""
    entry = {"noise_multiplier": 1.0, "sampling_probability": 0.5, "steps": 3, "run": 7}
    if ":" in text:
        name, value = text.replace("sigma", "noise_multiplier").split(": ")
        entry[name] = float(value)
        text = json.dumps({"format": "tfdpx.Ledger/2", "entries": [entry]})
    with pytest.raises(ValueError, match="is not a whole ledger"):
        Ledger.from_json(text)
