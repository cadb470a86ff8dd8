"""Each cell of the tables of docs/support.md: what trains there, trains; the rest is refused."""

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
    """`{(row, column): cell}` of the first table of a section, empty cells left out."""
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


def check(cell, found):
    number = re.fullmatch(r"no \((\d+)\)", cell)
    if number:
        assert ERRORS[number[1]] in found
    else:
        assert found == cell


def paired(row, column):
    """The arguments of `support_matrix.outcome` for a pair."""
    return ("`fit`", row, column) if row in support_matrix.FEATURES else (row, column)


def test_every_feature_has_its_row_and_every_error_is_in_a_table():
    assert {row for row, _ in WAYS} == set(support_matrix.FEATURES)
    cells = [*WAYS.values(), *PAIRS.values(), *ACCOUNTANTS.values()]
    assert set(re.findall(r"no \((\d+)\)", " ".join(cells))) == set(ERRORS)


@pytest.mark.parametrize("row, column", [at for at, cell in PAIRS.items() if cell[:2] == "no"])
def test_a_pair_that_is_refused(row, column):
    check(PAIRS[row, column], support_matrix.outcome(*paired(row, column)))


@pytest.mark.parametrize("row, column", list(ACCOUNTANTS))
def test_an_accountant(row, column):
    spent = tfdpx.PrivacyPlan(1000, batch_size=1000, steps=1, noise_multiplier=8.0, delta=1e-5)
    of_column = {
        "full batches": {"batch_size": 1000},
        '`sampling="shuffle"`': {"sampling": "shuffle"},
        '`unit="user"`': {"unit": "user"},
        "`spent=`": {"spent": spent.ledger_at(1)},
    }
    given = {"batch_size": 100, "accountant": row.strip('`"'), **of_column.get(column, {})}
    try:
        plan = tfdpx.PrivacyPlan(1000, steps=20, epsilon=3.0, delta=1e-5, **given)
        found = f"{plan.noise_multiplier:.3f}" + ", approx." * plan.is_approximate
    except ValueError as error:
        found = str(error)
    check(ACCOUNTANTS[row, column], found)


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(support_matrix.FEATURES))
def test_a_row_of_the_ways_on_one_device(row):
    for (name, column), cell in WAYS.items():
        if name == row and column not in ON_REPLICAS:
            check(cell, support_matrix.outcome(column, row))


@pytest.mark.slow
@pytest.mark.parametrize("column", ON_REPLICAS)
@pytest.mark.parametrize("part", range(3))
def test_a_column_of_the_ways_on_replicas(column, part, tmp_path, monkeypatch):
    rows = sorted(support_matrix.FEATURES)[part::3]
    path = tmp_path / "asked.json"
    path.write_text(json.dumps([[column, row] for row in rows]))
    monkeypatch.setenv("SUPPORT_MATRIX", str(path))
    processes.run_alone("support_matrix.tried")
    for row, found in zip(rows, json.loads(path.read_text()), strict=True):
        check(WAYS[row, column], found)


@pytest.mark.slow
@pytest.mark.parametrize("column", sorted({column for _, column in PAIRS}))
def test_pairs_that_work(column):
    for (row, other), cell in PAIRS.items():
        if other == column and cell[:2] != "no":
            check(cell, support_matrix.outcome(*paired(row, column)))


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_rows_without_a_column_go_together(swapped):
    # Every pair of a draw, an optimizer and a clip occurs, and each with views and bfloat16.
    draws = ["full batches", '`sampling="shuffle"`', "a `tf.data.Dataset` of your own"]
    clips = ['`"automatic"` clip', "`AdaptiveClip`"]
    for index, draw in enumerate([*draws, "`RandomAccess`"]):
        optimizer = ["`DPAdam`", "`make_private`"][swapped]
        others = [optimizer, clips[(index + swapped) % 2], "`augment`, `augmult`"]
        found = support_matrix.outcome("`fit`", draw, *others, "`mixed_bfloat16`")
        check(WAYS[draw, "`fit`"], found)
