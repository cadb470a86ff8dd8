"""`classify --individual`: what it writes, where, and what does not leave the private folder."""

import json
import stat

import numpy as np
import pytest

from tfdpx.train import classify
from tfdpx.train.run import individual

RUNS = {
    "a head on features and its released statistics": dict(
        individual_release=2.0, l2_norm_clip=1.0, learning_rate=5.0
    ),
    "a network with views and refreshes": dict(
        model="small_cnn", batch_size=64, augmult=2, augment_padding=1, learning_rate=1.0,
        l2_norm_clip=20.0, ema_momentum=0.9, individual_refreshes=12,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_it_writes(run, tmp_path, name):
    given = dict(RUNS[name], seed=0, steps=4, report_every=2, accountant="rdp", individual=True)
    report, _ = run(classify, workdir=tmp_path, **given)
    folder = tmp_path / individual.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "PRIVATE DATA" in (folder / "README.txt").read_text()
    arrays = np.load(folder / "arrays.npz")
    assert "PRIVATE DATA" in str(arrays["notice"])
    epsilons = arrays["epsilons"]
    assert epsilons.shape == arrays["labels"].shape == (1437,)
    assert (epsilons > 0).all() and epsilons.max() <= report["epsilon"] * (1 + 1e-9)
    assert np.ptp(epsilons) > 0
    assert arrays["steps"].tolist() == [2, 4]
    assert arrays["norms"].shape == arrays["losses"].shape == (2, 1437)
    reports = json.loads((folder / "groups.json").read_text())
    for each in ("loss at the end", "loss on average"):
        groups = reports[each]["groups"]
        assert len(groups) == 10 and sum(group["count"] for group in groups) == 1437
    for each in ("histogram", "norms", "loss", "groups", "attacks"):
        assert (folder / f"{each}.png").stat().st_size > 5000
    # No number of a single image, or of the classes, elsewhere.
    elsewhere = {p.name for p in tmp_path.rglob("*") if individual.FOLDER not in str(p)}
    assert not {"arrays.npz", "groups.json", "histogram.png", "checkpoint"} & elsewhere
    released = {key for key in report if key.startswith("individual_")}
    if "individual_release" not in given:
        assert not released
        return
    assert 0 < report["individual_mean"] <= report["epsilon"]
    assert set(report["individual_quantiles"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert 0 < report["individual_release_epsilon"] < report["epsilon"]
