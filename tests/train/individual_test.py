"""`classify --individual`: its private folder, and the released statistics."""

import json
import math
import stat

import numpy as np
import pytest
from matplotlib import figure

from tfdpx.train import classify, individual


@pytest.mark.slow
def test_files_pictures_and_released_statistics_are_of_the_training_alone(
    run, tmp_path, monkeypatch
):
    figures, save = {}, figure.Figure.savefig

    def spy(self, path):
        figures[path.name] = self
        save(self, path)

    monkeypatch.setattr(figure.Figure, "savefig", spy)
    settings = dict(seed=0, steps=4, report_every=2, accountant="rdp", learning_rate=5.0)
    settings |= dict(l2_norm_clip=1.0, individual_refreshes=1, individual_release=2.0)
    report, _ = run(classify, workdir=tmp_path, individual=True, **settings)
    folder = tmp_path / individual.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    readme = (folder / "README.txt").read_text()
    assert "PRIVATE DATA" in readme and "of the training alone" in readme
    arrays = np.load(folder / "arrays.npz")
    assert "PRIVATE DATA" in str(arrays["notice"]) and arrays["steps"].tolist() == [2, 4]
    epsilons = arrays["epsilons"]
    assert epsilons.shape == arrays["labels"].shape == (1437,)
    assert arrays["norms"].shape == arrays["losses"].shape == (2, 1437)
    assert 0 < epsilons.min() < epsilons.max() < report["epsilon"]
    assert report["individual_mean"] == pytest.approx(epsilons.mean(), abs=0.02)
    assert set(report["individual_quantiles"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert 0 < report["individual_release_epsilon"] < report["epsilon"]
    for title, classes in json.loads((folder / "groups.json").read_text()).items():
        assert title in ("loss at the end", "loss on average") and len(classes["groups"]) == 10
        total = sum(group["count"] * group["mean_epsilon"] for group in classes["groups"])
        assert total == pytest.approx(epsilons.sum())
    bars = figures["histogram.png"].axes[0].patches
    assert sum(bar.get_height() for bar in bars) == 1437
    for name in ("histogram", "norms", "loss", "groups", "attacks"):
        assert (folder / f"{name}.png").stat().st_size > 5000
    elsewhere = {path.name for path in tmp_path.rglob("*") if folder not in path.parents}
    assert not {"arrays.npz", "groups.json", "histogram.png", "checkpoint"} & elsewhere


def test_groups_have_means_correlations_and_an_attack_each():
    epsilons = np.array([1.0, 2.0, 3.0, 5.0, 7.0, 4.0])
    losses = np.array([0.1, 0.2, 0.3, 0.9, 1.1, 1.0])
    names = np.array(["b", "b", "b", "a", "a", "c"])
    report = individual.group_report(epsilons, losses, names, losses + 1, names)
    groups = report["groups"]
    assert [(group["name"], group["count"]) for group in groups] == [("b", 3), ("a", 2), ("c", 1)]
    assert groups[0]["mean_epsilon"] == 2 and groups[1]["mean_loss"] == pytest.approx(1)
    assert groups[0]["correlation"] == pytest.approx(1) and math.isnan(groups[2]["correlation"])
    assert report["correlation"] == pytest.approx(np.corrcoef(epsilons, losses)[0, 1])
    expected = np.corrcoef([2, 6, 4], [0.2, 1, 1])[0, 1]
    assert report["group_correlation"] == pytest.approx(expected)
    assert groups[0]["attack_success"] > 0.9 and groups[2]["attack_success"] is None


def test_the_attack_finds_members_of_low_loss():
    rng = np.random.default_rng(0)
    success = individual.membership_success
    assert success(rng.normal(size=400), rng.normal(size=300)) == pytest.approx(0.5, 0.1)
    assert success(np.arange(50), 100 + np.arange(80)) == 1
    # Normal losses one deviation apart: the best threshold is right in 69%.
    members, others = rng.normal(size=20_000), 1 + rng.normal(size=20_000)
    assert success(members, others, splits=5) == pytest.approx(0.6915, abs=0.01)
    # Members of higher loss are not found this way.
    assert success(others, members, splits=5) == pytest.approx(0.5, abs=0.01)
    assert success([1.0] * 30, [1.0] * 30) == 0.5
