"""Each cell of the tables of docs/support.md: supported trainings run, the others are refused."""

import functools
import itertools
import json
import pathlib
import re

import processes
import pytest
import support_matrix

import tfdpx

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "support.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""


def table(heading):
    """Returns `{(row, column): cell}` of the first table of a section, without empty cells."""
    section = TEXT.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    return {
        (name, column): cell
        for name, *cells in rows
        for column, cell in zip(head[1:], cells, strict=True)
        if cell
    }


WAYS, PAIRS, ACCOUNTANTS = table("Ways to train"), table("Pairs"), table("Accountants")
ERRORS = dict(re.findall(r"^(\d+) (.+)$", TEXT.partition("## Errors\n")[2], re.MULTILINE))
ON_REPLICAS = sorted(column for column in {c for _, c in WAYS} if "replicas" in column)
WITH_COLUMN = {column for _, column in PAIRS}
# A training has at most one of each group.
ALTERNATIVES = [
    {"arrays, Poisson sampling", "full batches", '`sampling="shuffle"`', '`unit="user"`',
     "your `tf.data.Dataset`", "`RandomAccess`"},
    {"`DPAdam`", "`make_private`"},
    {'`"automatic"` clip', "`AdaptiveClip`"},
]  # fmt: skip


def trains(cell):
    return not cell.startswith("no (")


def check(cell, outcome, *context):
    number = re.fullmatch(r"no \((\d+)\)", cell)
    if number:
        assert ERRORS[number[1]] in outcome, context
    else:
        assert outcome == cell, context


def paired(row, column):
    """Returns the arguments of `support_matrix.outcome` for a pair."""
    return ("`fit`", row, column) if row in support_matrix.FEATURES else (row, column)


@functools.cache
def together(one, other):
    """Returns the cell of two features, or None if they exclude each other or no table has them."""
    if any({one, other} <= alternatives for alternatives in ALTERNATIVES):
        return None
    if "arrays, Poisson sampling" in (one, other) or not WITH_COLUMN & {one, other}:
        cells = [WAYS[one, "`fit`"], WAYS[other, "`fit`"]]
        return next(outcome for outcome in ("no limit", "approx.", "yes") if outcome in cells)
    cells = [PAIRS[pair] for pair in ((one, other), (other, one)) if pair in PAIRS]
    return cells[0] if cells and all(map(trains, cells)) else None


def trainings():
    """Returns a small set of trainings that covers each supported cell, and one for each refusal.

    The cells are every feature with every way, and on one device every pair of features. A cell
    counts only in trainings of the same expected outcome: an exact epsilon would not show
    in a training that is approximate.

    Returns:
        List of a way, the names of features, and the expected outcome.
    """
    names = sorted(support_matrix.FEATURES)
    ways = {cell: outcome for cell, outcome in WAYS.items() if trains(outcome)}
    pairs = {(a, b): together(a, b) for a in names for b in names if a < b and together(a, b)}
    cases = [(way, [name], cell) for (name, way), cell in WAYS.items() if not trains(cell)]
    left = {**ways, **pairs}

    def covered(way, chosen, outcome):
        cells = [(name, way) for name in chosen]
        if way not in ON_REPLICAS:
            cells += itertools.combinations(sorted(chosen), 2)
        # "mapped" is a row and a column, so a cell may come twice.
        return [cell for cell in dict.fromkeys(cells) if left.get(cell) == outcome]

    while left:
        cell, outcome = next(iter(left.items()))
        way, chosen = (cell[1], cell[:1]) if cell in ways else ("`fit`", cell)
        gain = 1
        while gain:
            more = [
                (*chosen, name)
                for name in names
                if WAYS[name, way] in ("yes", outcome)
                and all(name != other and together(name, other) for other in chosen)
            ]
            best = max([chosen, *more], key=lambda candidate: len(covered(way, candidate, outcome)))
            gain, chosen = len(best) - len(chosen), best
        for cell in covered(way, chosen, outcome):
            del left[cell]
        cases.append((way, list(chosen), outcome))
    return cases


def test_every_feature_has_its_row_and_every_error_is_in_a_table():
    assert {row for row, _ in WAYS} == set(support_matrix.FEATURES)
    cells = [*WAYS.values(), *PAIRS.values(), *ACCOUNTANTS.values()]
    assert set(re.findall(r"no \((\d+)\)", " ".join(cells))) == set(ERRORS)


@pytest.mark.parametrize("column", sorted(WITH_COLUMN))
def test_pairs_that_are_refused(column):
    for (row, other), cell in PAIRS.items():
        if other == column and not trains(cell):
            check(cell, support_matrix.outcome(*paired(row, column)), row, column)


@pytest.mark.parametrize("column", sorted({column for _, column in ACCOUNTANTS}))
def test_accountants(column):
    spent = tfdpx.PrivacyPlan(1000, batch_size=1000, steps=1, noise_multiplier=8.0, delta=1e-5)
    of_column = {
        "full batches": {"batch_size": 1000},
        '`sampling="shuffle"`': {"sampling": "shuffle"},
        '`unit="user"`': {"unit": "user"},
        "`spent=`": {"spent": spent.ledger_at(1)},
    }
    for (row, other), cell in ACCOUNTANTS.items():
        if other != column:
            continue
        arguments = {"batch_size": 100, "accountant": row.strip('`"'), **of_column.get(column, {})}
        try:
            plan = tfdpx.PrivacyPlan(1000, steps=20, epsilon=3.0, delta=1e-5, **arguments)
            outcome = f"{plan.noise_multiplier:.3f}" + ", approx." * plan.is_approximate
        except ValueError as error:
            outcome = str(error)
        check(cell, outcome, row, column)


@pytest.mark.slow
@pytest.mark.parametrize("way", sorted({column for _, column in WAYS} - set(ON_REPLICAS)))
def test_ways_on_one_device(way):
    for other, names, outcome in trainings():
        if other == way:
            check(outcome, support_matrix.outcome(way, *names), way, names)


@pytest.mark.slow
def test_ways_on_replicas(tmp_path, monkeypatch):
    tried = [training for training in trainings() if training[0] in ON_REPLICAS]
    path = tmp_path / "asked.json"
    path.write_text(json.dumps([[way, *names] for way, names, _ in tried]))
    monkeypatch.setenv("SUPPORT_MATRIX", str(path))
    processes.run_alone("support_matrix.tried")
    for (way, names, outcome), result in zip(tried, json.loads(path.read_text()), strict=True):
        check(outcome, result, way, names)


@pytest.mark.slow
def test_train_on_batch():
    for (row, column), cell in PAIRS.items():
        if row == "`train_on_batch`" and trains(cell):
            check(cell, support_matrix.outcome(row, column), column)
