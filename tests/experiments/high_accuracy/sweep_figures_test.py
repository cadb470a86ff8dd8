"""The pictures of a sweep, against results made by hand."""

import json

import pytest

from experiments.high_accuracy import sweep_figures


def result(accuracy, seed, **point):
    """What `tfdpx.train.sweeps.runs.read` says of a run."""
    names = ("l2_norm_clip", "augmult", "ema_momentum", "optimizer", "validation")
    settings = {"seed": seed, **dict.fromkeys(names), **point}
    report = {"test_accuracy": None, "validation_accuracy": accuracy}
    return {"point": point, "settings": settings, "report": report}


RESULTS = [
    result(0.9, 1, learning_rate=4.0, batch_size=64),
    result(0.5, 0, learning_rate=4.0, batch_size=64),
    result(0.8, 2, learning_rate=4.0, batch_size=64),
    result(0.7, 0, learning_rate=1.0, batch_size=64),
    result(0.6, 0, learning_rate=1.0, batch_size=256),
]


def test_a_picture_for_each_swept_setting(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="has finished"):
        sweep_figures.main([f"--workdir={tmp_path}"])
    drawn = []
    original = sweep_figures.figure.Figure.subplots

    def spy(self, *args, **kwargs):
        drawn.append(original(self, *args, **kwargs))
        return drawn[-1]

    monkeypatch.setattr(sweep_figures.figure.Figure, "subplots", spy)
    for results, swept in ((RESULTS[3:4], ()), (RESULTS, ("learning_rate", "batch_size"))):
        monkeypatch.setattr(sweep_figures.runs, "read_all", lambda folder, kept=results: kept)
        sweep_figures.main([f"--workdir={tmp_path}"])
        paths = [tmp_path / f"accuracy_by_{name}.png" for name in swept]
        assert json.loads(capsys.readouterr().out) == {"figures": list(map(str, paths))}
        assert all(path.stat().st_size > 5000 for path in paths)
    left, right = drawn[0]  # By learning rate: a line for each batch size, and the best of all.
    assert [container.get_label() for container in left.containers] == ["64", "256", "best of all"]
    for line in (left.containers[0].lines[0], left.containers[2].lines[0]):
        assert list(line.get_xdata()) == [1.0, 4.0] and list(line.get_ydata()) == [70.0, 80.0]
    assert left.get_xscale() == "log"
    assert list(right.lines[0].get_ydata()) == [64, 64]  # The best at each learning rate.
