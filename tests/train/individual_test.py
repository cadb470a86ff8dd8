"""`classify --individual`: its private folder, and the released statistics."""

import json
import stat

import numpy as np
import pytest

from tfdpx.train import classify, individual


@pytest.mark.slow
def test_files_pictures_and_released_statistics_are_of_the_training_alone(
    run, tmp_path, monkeypatch
):
    settings = dict(seed=0, steps=4, report_every=2, accountant="rdp", learning_rate=5.0)
    settings |= dict(l2_norm_clip=1.0, individual_refreshes=1, individual_release=2.0)
    report, _ = run(classify, workdir=tmp_path, individual=True, **settings)
    folder = tmp_path / individual.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    readme = (folder / "README.txt").read_text()
    assert "PRIVATE DATA" in readme and "cover only the training" in readme
    arrays = np.load(folder / "arrays.npz")
    assert "PRIVATE DATA" in str(arrays["notice"])
    epsilons = arrays["epsilons"]
    assert epsilons.shape == arrays["labels"].shape == (1437,)
    assert arrays["norms"].shape == arrays["losses"].shape == (1437,)
    assert arrays["names"][:2].tolist() == ["train/0", "train/1"]
    assert arrays["held_out_names"][-1] == "test/359" and arrays["held_out_losses"].size == 360
    of_training = json.loads((tmp_path / "curve.jsonl").read_text().splitlines()[-1])["epsilon"]
    # An image of the full clip has the epsilon of the training, by another sum.
    assert 0 < epsilons.min() < epsilons.max() <= of_training * (1 + 1e-6) < report["epsilon"]
    assert report["individual_mean"] == pytest.approx(epsilons.mean(), abs=0.02)
    assert set(report["individual_quantiles"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert 0 < report["individual_release_epsilon"] < report["epsilon"]
    assert {path.name for path in folder.glob("*.png")} == {"histogram.png", "groups.png"}
    elsewhere = {path.name for path in tmp_path.rglob("*") if folder not in path.parents}
    assert not {"arrays.npz", "histogram.png", "checkpoint"} & elsewhere
