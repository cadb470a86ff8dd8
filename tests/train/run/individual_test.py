"""`classify --individual`: what it writes, where, and what does not leave the private folder."""

import json
import stat

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx.accounting import record as records
from tfdpx.train import classify
from tfdpx.train.config.errors import UserError
from tfdpx.train.config.preset_lookup import resolve
from tfdpx.train.config.setting_flags import given
from tfdpx.train.run import individual


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])


def run(folder, **arguments):
    common = dict(seed=0, steps=4, report_every=2, individual=True, data_dir=str(folder / "data"))
    with flagsaver.flagsaver(workdir=str(folder / "run"), **{**common, **arguments}):
        classify.main(["classify"])
    return folder / "run"


def check_written(workdir, steps):
    folder = workdir / individual.FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "PRIVATE DATA" in (folder / "README.txt").read_text()
    arrays, report = (
        np.load(folder / "arrays.npz"),
        records.read(workdir / "record.json").view(),
    )
    assert "PRIVATE DATA" in str(arrays["notice"])
    epsilons = arrays["epsilons"]
    assert epsilons.shape == arrays["labels"].shape == (1437,)
    assert (epsilons > 0).all() and epsilons.max() <= report["epsilon"] * (1 + 1e-9)
    assert np.ptp(epsilons) > 0
    assert arrays["steps"].tolist() == steps
    assert arrays["norms"].shape == arrays["losses"].shape == (len(steps), 1437)
    reports = json.loads((folder / "groups.json").read_text())
    for name in ("loss at the end", "loss on average"):
        groups = reports[name]["groups"]
        assert len(groups) == 10 and sum(group["count"] for group in groups) == 1437
    for name in ("histogram", "norms", "loss", "groups", "attacks"):
        assert (folder / f"{name}.png").stat().st_size > 5000
    # No number of a single image, or of the classes, elsewhere.
    elsewhere = [p.name for p in workdir.rglob("*") if individual.FOLDER not in str(p)]
    assert not {"arrays.npz", "groups.json", "histogram.png"} & set(elsewhere)
    assert not (workdir / "checkpoint").exists()
    return report


@pytest.mark.slow
def test_a_head_on_features_and_its_released_statistics(tmp_path):
    given = dict(individual_release=2.0, l2_norm_clip=1.0, learning_rate=5.0)
    workdir = run(tmp_path, **given, accountant="rdp")
    report = check_written(workdir, steps=[2, 4])
    assert 0 < report["individual_mean"] <= report["epsilon"]
    assert set(report["individual_quantiles"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert 0 < report["individual_release_epsilon"] < report["epsilon"]


@pytest.mark.slow
def test_a_network_with_views_and_refreshes(tmp_path):
    workdir = run(
        tmp_path, model="small_cnn", batch_size=64, augmult=2, augment_padding=1,
        learning_rate=1.0, l2_norm_clip=20.0, accountant="rdp", ema_momentum=0.9,
        individual_refreshes=12,
    )  # fmt: skip
    report = check_written(workdir, steps=[2, 4])
    assert "individual_mean" not in report


UNFIT = [
    (dict(individual=True, private=False), "needs a private run"),
    (dict(individual=True, sampling="shuffle"), "Poisson sampling"),
    (dict(individual_release=3.0), "belong to --individual"),
    (dict(individual_refreshes=1), "belong to --individual"),
    (dict(individual=True, individual_rounding=0.0), "--individual_rounding must lie"),
]


def test_unfit_flags_are_refused():
    for arguments, message in UNFIT:
        with flagsaver.flagsaver(**arguments), pytest.raises(UserError, match=message):
            resolve("digits", given())
