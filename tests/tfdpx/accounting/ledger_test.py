import json
import math
import os

import numpy as np
import pytest

from tfdpx.accounting import Ledger, epsilon, group_epsilon
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
    # Others of the same run have that probability already, and none is lost when ledgers join.
    parts = (Entry(1.5, p, n, poisson_sampled=False, run=3) for p, n in ((0.05, 4), (None, 7)))
    said = Ledger(tuple(parts)).assuming(0.05)
    assert (said + said).steps == said.steps == 11


def test_a_ledger_is_complete_if_all_of_its_parts_are(ledger, tmp_path):
    part = Ledger(ledger.entries, is_complete=False)
    assert Ledger().is_complete and (ledger + ledger).is_complete
    for joined in (part + ledger, ledger + part, part.assuming(0.1), part + part):
        assert not joined.is_complete
    assert part != ledger and part.epsilon(1e-5) == ledger.epsilon(1e-5)
    for member in (part, ledger):
        assert Ledger.from_json(member.to_json()) == member
        member.save(tmp_path / "ledger.json")
        assert Ledger.load(tmp_path / "ledger.json") == member
    with pytest.raises(TypeError, match="is_complete='no'"):
        Ledger((), "no")
    for wrong in ('"format": "tfdpx.Ledger/8", "entries": []',
                  '"format": "tfdpx.Ledger/8", "entries": [], "is_complete": "no"'):  # fmt: skip
        with pytest.raises(ValueError, match="not a whole ledger"):
            Ledger.from_json(f"{{{wrong}}}")


def test_resumed_runs_cost_what_one_run_does():
    first, second, whole = (Ledger((Entry(1.5, 0.05, n, run=n),)) for n in (40, 60, 100))
    joined = first + second
    assert joined.steps == 100 and joined.epsilon(1e-5) == whole.epsilon(1e-5)
    assert (joined + Ledger((Entry(0.0, 0.1, 1),))).epsilon(1e-5) == math.inf


def test_entries_do_not_change(ledger):
    with pytest.raises(AttributeError):
        ledger.entries = ()
    with pytest.raises(AttributeError):
        ledger.entries[0].steps = 1
    with pytest.raises(TypeError, match="must hold ledger entries"):
        Ledger(((1.5, 0.05, 10),))
    with pytest.raises(TypeError):
        ledger + 3


def test_files_give_back_what_was_saved(ledger, tmp_path):
    path = tmp_path / "ledger.json"
    of_numpy = Ledger((Entry(np.float32(1.5), np.float64(0.05), np.int64(10)),))
    for saved in (Ledger(), of_numpy, ledger):
        saved.save(path)
        assert Ledger.load(path) == Ledger.load(str(path)) == saved
    with_delta = Ledger(ledger.entries, delta=1e-5, num_examples=60)
    with_delta.save(path)
    assert Ledger.load(path).statement() == with_delta.statement()
    assert os.listdir(tmp_path) == ["ledger.json"]
    with pytest.raises(FileNotFoundError):
        Ledger.load(tmp_path / "none.json")


def damages():
    whole = Ledger((Entry(1.5, 0.05, 10),)).to_json()
    content = json.loads(whole)
    yield "not text", b"\xff\xfe\x00"
    for length in (0, len(whole) - 1):
        yield f"cut at {length}", whole[:length]
    yield "no entries", json.dumps({"format": content["format"]})
    yield "no format", json.dumps({"entries": content["entries"]})
    yield "a later format", json.dumps(content | {"format": "tfdpx.Ledger/9"})
    yield "a list", "[]"
    yield "negative steps", whole.replace("10", "-10")
    yield "not a number", whole.replace("1.5", "NaN")
    yield "infinite steps", whole.replace("10", "1E999")
    yield "deep", "[" * 100_000
    yield "entries as a dict", json.dumps(content | {"entries": {}})
    wrong = {"is_complete": 1.0, "delta": "x", "num_examples": math.nan}
    for name, value in wrong.items():
        yield name, json.dumps(content | {name: value})
    [entry] = content["entries"]
    wrong = [("poisson_sampled", "false"), ("seeded", 0), ("run", 1.5), ("delta", "x")]
    wrong += [("mean_runs", []), ("steps", 10**400), ("noise_multiplier", 1e308)]
    for name, value in wrong:
        entries = [entry | {name: value}]
        yield f"{name} of {str(value)[:6]}", json.dumps(content | {"entries": entries})


@pytest.mark.parametrize("damage, content", list(damages()))
def test_a_damaged_file_is_an_error_that_names_it(damage, content, tmp_path):
    path = tmp_path / "spent.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"Cannot read ledger file .*spent\.json"):
        Ledger.load(path)


def test_a_ledger_with_an_entry_twice_is_refused(ledger):
    """JSON readers take the last of both, so people and programs would read different ledgers."""
    text = ledger.to_json()
    for name in ("steps", "noise_multiplier", "entries", "format", "is_complete"):
        at = text.index(f'"{name}"')
        value = "[]" if name == "entries" else "1"
        with pytest.raises(ValueError, match="entry twice"):
            Ledger.from_json(f'{text[:at]}"{name}": {value}, {text[at:]}')


def test_an_entry_of_a_later_version_is_refused_by_name(ledger):
    content = json.loads(ledger.to_json())
    for change in ({"kind": "another"}, {"order": 2}):
        entry = content["entries"][0] | change
        text = json.dumps(content | {"entries": [entry, *content["entries"]]})
        with pytest.raises(ValueError, match="does not know its entry .*Read it with the version"):
            Ledger.from_json(text)


def test_shuffled_entries_are_their_own_and_survive_files(ledger):
    drawn, shuffled = (Entry(1.5, 0.05, 9, False, run=4, shuffled=s) for s in (False, True))
    assert (Ledger((drawn,)) + Ledger((shuffled,))).steps == 18
    whole = Ledger((drawn, shuffled, *ledger.entries))
    assert Ledger.from_json(whole.to_json()) == whole


RELEASE = dict(epsilon=0.5, delta=1e-6, unit="example", neighbours="add_or_remove", name="OpenDP")


def test_a_release_of_another_library_adds_epsilon_delta_and_right_guesses(ledger):
    whole = ledger.with_release(**RELEASE)
    assert whole.epsilon(1e-5) == ledger.epsilon(1e-5) + 0.5
    assert whole.total_delta(1e-5) == pytest.approx(1.1e-5)
    assert whole.attack_bounds(1e-5).advantage > ledger.attack_bounds(1e-5).advantage
    alone = Ledger().with_release(**RELEASE)
    assert (alone.epsilon(None), alone.total_delta(1e-5)) == (0.5, 1e-6)
    # Randomised response of epsilon 0.5, which fails with probability delta.
    response = math.tanh(0.25) * (1 - 1e-6) + 1e-6
    assert alone.attack_bounds(1e-5).advantage == pytest.approx(response, abs=1e-8)
    for k in (2, 3):
        assert group_epsilon(whole, k, delta=1e-5) == math.inf
    text = " ".join(whole.statement(1e-5).split())
    assert "of another mechanism, OpenDP: epsilon = 0.5, delta = 1e-06" in text
    assert "delta = 1.10001e-05" in text and "Attack:" in text


def test_equal_releases_count_twice_and_files_of_one_count_once(ledger, tmp_path):
    once = ledger.with_release(**RELEASE)
    twice = once.with_release(**RELEASE)
    assert twice.epsilon(1e-5) == pytest.approx(ledger.epsilon(1e-5) + 1.0)
    twice.save(tmp_path / "ledger.json")
    assert Ledger.load(tmp_path / "ledger.json") == twice
    named = Ledger(once.entries[-1:])
    assert (named + named).epsilon(None) == 0.5
    # A line a person has written, and the same line again.
    line = json.dumps(RELEASE)
    (tmp_path / "releases.jsonl").write_text(f"{line}\n\n{line}\n")
    assert Ledger.load(tmp_path / "releases.jsonl").epsilon(None) == 1.0
    joined = Ledger.from_json(line) + Ledger.from_json(line)
    assert joined.assuming(0.1).epsilon(None) == 1.0
    people = dict(RELEASE, unit="user")
    assert once.with_release(**people).epsilon(1e-5) == math.inf  # Nothing protects both.


def test_laplace_noise_counts_by_its_l1_sensitivity():
    about = {name: RELEASE[name] for name in ("unit", "neighbours", "name")}
    assert Ledger().with_laplace(scale=4.0, l1_sensitivity=2.0, **about).epsilon(None) == 0.5
    with pytest.raises(ValueError, match="`scale` must be a positive"):
        Ledger().with_laplace(scale=0.0, l1_sensitivity=2.0, **about)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"neighbours": "replace_one"}, 'must be "add_or_remove".*Replacing one'),
        ({"epsilon": -1.0}, "`epsilon` must be"),
        ({"epsilon": math.inf}, "`epsilon` must be"),
        ({"delta": 1.0}, "`delta` must lie"),
        ({"unit": "row"}, "`unit` must be one of"),
        ({"name": ""}, "`name` must be a text"),
    ],
)
def test_a_release_is_refused_by_name(change, text):
    with pytest.raises(ValueError, match=text):
        Ledger().with_release(**RELEASE | change)
    with pytest.raises(ValueError, match="is not a whole ledger"):
        Ledger.from_json(json.dumps({"a": 1, **RELEASE}))
    for name in RELEASE:  # Nothing has a default.
        with pytest.raises(TypeError, match=name):
            Ledger().with_release(**{k: v for k, v in RELEASE.items() if k != name})
