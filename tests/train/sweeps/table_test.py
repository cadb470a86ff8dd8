"""The table of a sweep, against results made by hand."""

import csv

from tfdpx.train.config import preset_lookup
from tfdpx.train.sweeps import table


def result(accuracy, seed, on_test=False, **point):
    settings = {
        "seed": seed, "learning_rate": 2.0, "l2_norm_clip": 1.0, "augmult": 0, "ema_momentum": 0.0,
        "optimizer": "dpsgd", "validation": 0.0,
    }  # fmt: skip
    report = {"epsilon": 8.0, "workdir": "w", "steps": 5, "test_accuracy": None}
    report["validation_accuracy"] = None
    report["test_accuracy" if on_test else "validation_accuracy"] = accuracy
    return {"point": point, "settings": {**settings, **point}, "report": report}


RESULTS = [
    result(0.9, 1, learning_rate=4.0, batch_size=64),
    result(0.5, 0, learning_rate=4.0, batch_size=64),
    result(0.8, 2, learning_rate=4.0, batch_size=64),
    result(0.7, 0, learning_rate=1.0, batch_size=64),
    result(0.6, 0, learning_rate=1.0, batch_size=256),
]
SWEPT = ["learning_rate", "batch_size"]


def test_a_row_a_run_in_order():
    rows = table.rows(RESULTS)
    assert table.names(RESULTS) == SWEPT
    assert [(r["learning_rate"], r["batch_size"], r["seed"], r["accuracy"]) for r in rows] == [
        (1.0, 64, 0, 0.7), (1.0, 256, 0, 0.6),
        (4.0, 64, 0, 0.5), (4.0, 64, 1, 0.9), (4.0, 64, 2, 0.8),
    ]  # fmt: skip
    assert {r["measured_on"] for r in rows} == {"validation"}
    assert list(rows[0])[:4] == ["learning_rate", "batch_size", "seed", "accuracy"]
    assert table.rows([result(0.4, 0, on_test=True)])[0]["measured_on"] == "test"


def test_points_are_medians_and_ranges():
    points = table.summaries(table.rows(RESULTS), SWEPT)
    best = table.best(points)
    assert best == {
        "learning_rate": 4.0, "batch_size": 64, "median": 0.8, "lowest": 0.5, "highest": 0.9,
        "runs": 3,
    }  # fmt: skip
    tie = [dict(best, median=0.8, lowest=0.7), dict(best, median=0.8, lowest=0.6)]
    assert table.best(tie) == tie[0] and table.best(tie[::-1]) == tie[0]


def test_presets_stand_as_in_their_table():
    names = [name for name in preset_lookup.names() if name.startswith("table2/")]
    rows = table.rows([result(0.5, 0, preset=name) for name in sorted(names)])
    assert [row["preset"] for row in rows] == names != sorted(names)


def test_the_file_can_be_read_again(tmp_path):
    rows = table.rows(RESULTS)
    table.write(rows, tmp_path / "table.csv")
    with (tmp_path / "table.csv").open() as file:
        again = list(csv.DictReader(file))
    assert [float(row["accuracy"]) for row in again] == [row["accuracy"] for row in rows]
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]
