"""The table of a sweep and its pictures, against results made by hand."""

import csv
import pathlib

import pytest
from PIL import Image

from experiments.high_accuracy import sweep_figures
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


@pytest.mark.parametrize("name", SWEPT)
def test_a_picture_for_each_swept_setting(tmp_path, name):
    rows = table.rows(RESULTS)
    paths = sweep_figures.draw(rows, SWEPT, tmp_path)
    assert tmp_path / f"accuracy_by_{name}.png" in paths and len(paths) == 2
    with Image.open(tmp_path / f"accuracy_by_{name}.png") as picture:
        assert min(picture.size) > 300 and len(picture.convert("RGB").getcolors(10**6)) > 20


def test_lines_and_bars_are_what_was_found(monkeypatch):
    drawn = []
    original = sweep_figures.figure.Figure.subplots

    def spy(self, *args, **kwargs):
        panels = original(self, *args, **kwargs)
        drawn.append(panels)
        return panels

    monkeypatch.setattr(sweep_figures.figure.Figure, "subplots", spy)
    monkeypatch.setattr(sweep_figures.figure.Figure, "savefig", lambda *a, **k: None)
    sweep_figures.draw(table.rows(RESULTS), SWEPT, pathlib.Path("nowhere"))
    left = drawn[0][0]  # By learning rate: a line for each batch size, and the best of all.
    assert [container.get_label() for container in left.containers] == ["64", "256", "best of all"]
    assert list(left.containers[0].lines[0].get_xdata()) == [1.0, 4.0]
    assert list(left.containers[0].lines[0].get_ydata()) == [70.0, 80.0]
    assert list(left.containers[2].lines[0].get_ydata()) == [70.0, 80.0]
    assert left.get_xscale() == "log"
    beside = drawn[0][1]  # The batch size that was best at each learning rate.
    assert list(beside.lines[0].get_ydata()) == [64, 64]


def test_a_single_value_needs_no_picture(tmp_path):
    rows = table.rows([result(0.5, 0, learning_rate=1.0)])
    assert sweep_figures.draw(rows, ["learning_rate"], tmp_path) == []
