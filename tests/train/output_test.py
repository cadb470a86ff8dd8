"""Texts from records and files of others: no control characters on a terminal, no formulas."""

import csv

import numpy as np

from tfdpx.accounting import Ledger
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import account, output, predict

ESCAPE = "\x1b[2J\x1b]0;owned\x07\x9b31m"
LEDGER = Ledger((Entry(4.0, 0.1, 60, run=1),))


def test_a_received_record_cannot_write_to_the_terminal(run, tmp_path):
    for number, name in enumerate((ESCAPE, f"ward {ESCAPE}")):
        data = DatasetId(name, 500, "01")
        changes = dict(results={"model": ESCAPE}, settings={ESCAPE: ESCAPE, "seen": number})
        folder = tmp_path / f"{number}{ESCAPE.replace('/', '')}"
        folder.mkdir()
        Record(ESCAPE, data, LEDGER, 1e-5, **changes).save(folder / "record.json")
    answer, text = run(account, workdir=[str(folder) for folder in tmp_path.iterdir()])
    assert "\\x1b[2J" in text and not set(text) & set("\x1b\x07\x9b") and answer


def test_nor_can_the_end_of_a_run_and_a_table_of_predictions(capsys, tmp_path):
    record = Record("classify", DatasetId(ESCAPE), LEDGER, 1e-5, results={"model": ESCAPE})
    output.print_record(record)
    predict.print_table([[ESCAPE, ESCAPE, "0.5"]], tmp_path)
    text = capsys.readouterr().out
    assert text.count("\\x1b[2J") > 3 and not set(text) & set("\x1b\x07\x9b")


FORMULAS = ["=1+1", "+1+1", "-1+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"]
PLAIN = ["-1", "+1", "1e-3", "a=b", "", "'", "Zürich", "five"]


def test_labels_that_begin_like_a_formula_are_quoted(tmp_path):
    names = [*FORMULAS, *PLAIN]
    assert [output.of_spreadsheet(n) for n in names] == [*(f"'{n}" for n in FORMULAS), *PLAIN]
    path = tmp_path / "predictions.csv"
    files = ["=2+3.png", *["a/=b.png"] * (len(names) - 1)]
    columns, lines = predict.classified(np.eye(len(names)) * 100, names, 0.5, True)
    rows = [[file, *line] for file, line in zip(files, lines, strict=True)]
    predict.write(path, ["file", "class", *columns], rows)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[3:] == [row[1] for row in rows] == [output.of_spreadsheet(n) for n in names]
    assert [row[0] for row in rows] == ["'=2+3.png", *["a/=b.png"] * (len(names) - 1)]
    assert {value for row in rows for value in row[2:]} == {"0.000000", "1.000000"}
