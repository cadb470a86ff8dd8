"""`classify --individual`: its private folder, and the released statistics."""

import json
import stat

import numpy as np
import pytest

from tfdpx.train import classify, individual
from tfdpx.train.data import images
from tfdpx.train.errors import UserError


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
    assert "PRIVATE DATA" in readme and "of the training alone" in readme
    arrays = np.load(folder / "arrays.npz")
    assert "PRIVATE DATA" in str(arrays["notice"]) and arrays["steps"].tolist() == [2, 4]
    epsilons = arrays["epsilons"]
    assert epsilons.shape == arrays["labels"].shape == (1437,)
    assert arrays["norms"].shape == arrays["losses"].shape == (2, 1437)
    of_training = json.loads((tmp_path / "curve.jsonl").read_text().splitlines()[-1])["epsilon"]
    # An image of the full clip has the epsilon of the training, by another sum.
    assert 0 < epsilons.min() < epsilons.max() <= of_training * (1 + 1e-6) < report["epsilon"]
    assert report["individual_mean"] == pytest.approx(epsilons.mean(), abs=0.02)
    assert set(report["individual_quantiles"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert 0 < report["individual_release_epsilon"] < report["epsilon"]
    for title, classes in json.loads((folder / "groups.json").read_text()).items():
        assert title in ("loss at the end", "loss on average") and len(classes["groups"]) == 10
        total = sum(group["count"] * group["mean_epsilon"] for group in classes["groups"])
        assert total == pytest.approx(epsilons.sum())
    assert {path.name for path in folder.glob("*.png")} == {"histogram.png", "groups.png"}
    elsewhere = {path.name for path in tmp_path.rglob("*") if folder not in path.parents}
    assert not {"arrays.npz", "groups.json", "histogram.png", "checkpoint"} & elsewhere


def test_groups_have_means_correlations_and_an_attack_each():
    epsilons = np.array([1.0, 2.0, 3.0, 5.0, 7.0, 4.0])
    losses = np.array([0.1, 0.2, 0.3, 0.9, 1.1, 1.0])
    names = np.array(["b", "b", "b", "a", "a", "c"])
    report = individual.group_report(epsilons, losses, names, losses + 1, names)
    groups = report["groups"]
    assert [(group["name"], group["count"]) for group in groups] == [("b", 3), ("a", 2), ("c", 1)]
    assert groups[0]["mean_epsilon"] == 2 and groups[0]["correlation"] == pytest.approx(1)
    assert report["correlation"] == pytest.approx(np.corrcoef(epsilons, losses)[0, 1])
    assert groups[0]["attack_success"] > 0.9 and groups[2]["attack_success"] is None
    # Normal losses one deviation apart: the best threshold of the attack is right in 69%.
    rng = np.random.default_rng(0)
    members, nonmembers = rng.normal(size=20_000), 1 + rng.normal(size=20_000)
    success = individual.membership_success
    assert success(members, nonmembers, splits=5) == pytest.approx(0.6915, abs=0.01)
    # This attack does not find members of higher loss.
    assert success(nonmembers, members, splits=5) == pytest.approx(0.5, abs=0.01)


def test_groups_come_from_a_file_by_the_names_of_images(tmp_path):
    data = images.load("digits")
    names = [*data.names_of("train"), *data.names_of("eval")]
    assert names[:2] == ["train/0", "train/1"] and names[-1] == "test/359"
    path = tmp_path / "groups.csv"
    rows = [f"{name},{'odd' if number % 2 else 'even'}" for number, name in enumerate(names)]
    path.write_text("image,group\n" + "\n".join(rows))
    train, held_out = individual.read_groups(path, data)
    assert train[:3].tolist() == ["even", "odd", "even"] and held_out.shape == (360,)
    path.write_text("\n".join(rows[:-1]))
    with pytest.raises(UserError, match="1 images are missing, for example test/359"):
        individual.read_groups(path, data)
    assert individual.read_groups(None, data) is None
