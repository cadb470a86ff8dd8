"""The rule for the learning rate, and the rows that it was fitted to."""

import re

import pytest

import tfdpx
from experiments.settings import fit


def losses(optimizer, part):
    """Returns the accuracies that the rule loses on a part of the settings."""
    items = [
        (key, curve)
        for key, curve in fit.settings().items()
        if key[7] == optimizer and key[9] == "0" and key[8] == "0.1" and fit.part(key) == part
    ]
    return fit.losses(items, fit.NOISE[optimizer])


@pytest.mark.parametrize(
    ("row", "optimizer", "part"),
    [
        ("DP-SGD, as fitted", "sgd", "fitted"),
        ("DP-SGD, other networks and images", "sgd", "held out"),
        ("DP-SGD, gray images in [0, 1]", "sgd", "uncentred"),
        ("DP-Adam, as fitted", "adam", "fitted"),
        ("DP-Adam, other networks and images", "adam", "held out"),
    ],
)
def test_the_table_is_that_of_the_rows(row, optimizer, part):
    text = fit.ROWS.with_name("README.md").read_text("utf-8")
    cells = re.search(rf"\| {re.escape(row)} \|(.*)\|", text).group(1).replace("*", "").split("|")
    lost = losses(optimizer, part)
    assert cells[0].strip() == f"{sum(v <= 0.02 for v in lost)} of {len(lost)}"
    assert float(cells[2]) == pytest.approx(100 * lost[-1], abs=0.5)


def test_the_rule_moves_each_weight_by_its_noise_within_the_largest_rate():
    plan = tfdpx.PrivacyPlan(1000, batch_size=100, steps=400, noise_multiplier=2.0, delta=1e-5)
    assert fit.rate(plan, "sgd") * 2.0 / 100 * 20 == pytest.approx(0.1)
    assert fit.rate(plan, "adam") * 20 == pytest.approx(0.15)
    plan = tfdpx.PrivacyPlan(1000, batch_size=1000, steps=4, noise_multiplier=2.0, delta=1e-5)
    assert (fit.rate(plan, "sgd"), fit.rate(plan, "adam")) == (4.0, 0.02)


def test_accuracy_is_interpolated_between_logarithms():
    curve = [(0.1, 0.5), (0.4, 0.7)]
    assert fit.accuracy_at(curve, 0.2) == pytest.approx(0.6)
    assert (fit.accuracy_at(curve, 0.05), fit.accuracy_at(curve, 1.0)) == (0.5, 0.7)
