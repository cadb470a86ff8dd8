"""The pictures of a sweep, compared with results written by hand."""

import json

import pytest
from PIL import Image

from experiments.high_accuracy import sweep_figures


def row(accuracy, learning_rate, batch_size):
    """Returns a row of `sweep.read_table`."""
    point = {"learning_rate": learning_rate, "batch_size": batch_size}
    return {**point, "accuracy": accuracy, "measured_on": "validation"}


SWEPT = ["learning_rate", "batch_size"]
ROWS = [row(0.7, 1.0, 64), row(0.6, 1.0, 256), *(row(a, 4.0, 64) for a in (0.5, 0.8, 0.9))]


def test_a_picture_for_each_swept_setting(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_figures.sweep, "read_table", lambda folder: (ROWS, SWEPT))
    drawn = []
    original = sweep_figures.figure.Figure.subplots

    def spy(self, *args, **kwargs):
        drawn.append(original(self, *args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(sweep_figures.figure.Figure, "subplots", spy)
    sweep_figures.main([f"--workdir={tmp_path}"])
    paths = [tmp_path / f"accuracy_by_{name}.png" for name in ("learning_rate", "batch_size")]
    assert json.loads(capsys.readouterr().out) == {"figures": list(map(str, paths))}
    for path in paths:
        with Image.open(path) as picture:
            assert min(picture.size) > 300 and len(picture.convert("RGB").getcolors(10**6)) > 20
    left = drawn[0][0]  # By learning rate: a line for each batch size, and one for the best.
    assert [container.get_label() for container in left.containers] == ["64", "256", "best of all"]
    assert list(left.containers[0].lines[0].get_xdata()) == [1.0, 4.0]
    assert list(left.containers[0].lines[0].get_ydata()) == [70.0, 80.0]
    assert list(left.containers[2].lines[0].get_ydata()) == [70.0, 80.0]
    assert left.get_xscale() == "log"
    right = drawn[0][1]  # The best batch size at each learning rate.
    assert list(right.lines[0].get_ydata()) == [64, 64]


def test_a_single_value_needs_no_picture_and_no_run_is_an_error(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="has finished"):
        sweep_figures.main([f"--workdir={tmp_path}"])
    one = [row(0.5, 1.0, 64)], ["learning_rate"]
    monkeypatch.setattr(sweep_figures.sweep, "read_table", lambda folder: one)
    sweep_figures.main([f"--workdir={tmp_path}"])
    assert json.loads(capsys.readouterr().out) == {"figures": []}
