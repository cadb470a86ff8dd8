"""The report of groups, and the attack by a threshold on the loss."""

import math

import numpy as np
import pytest

from tfdpx.train.report.groups import group_report, membership_success


def test_means_order_and_correlations():
    epsilons = np.array([1.0, 2.0, 3.0, 5.0, 7.0, 4.0])
    losses = np.array([0.1, 0.2, 0.3, 0.9, 1.1, 1.0])
    groups = np.array(["b", "b", "b", "a", "a", "c"])
    report = group_report(epsilons, losses, groups)
    assert [g.name for g in report.groups] == ["b", "a", "c"]
    assert [g.count for g in report.groups] == [3, 2, 1]
    assert report.groups[0].mean_epsilon == 2 and report.groups[1].mean_loss == pytest.approx(1)
    assert report.groups[0].correlation == pytest.approx(1)
    assert math.isnan(report.groups[2].correlation)
    assert report.correlation == pytest.approx(np.corrcoef(epsilons, losses)[0, 1])
    expected = np.corrcoef([2, 6, 4], [0.2, 1, 1])[0, 1]
    assert report.group_correlation == pytest.approx(expected)
    assert all(g.attack_success is None for g in report.groups)


def test_the_attack_knows_what_there_is_to_know():
    rng = np.random.default_rng(0)
    assert membership_success(rng.normal(size=400), rng.normal(size=300)) == pytest.approx(0.5, 0.1)
    assert membership_success(np.arange(50), 100 + np.arange(80)) == 1
    # Normal losses one deviation apart: the best threshold is right in 69%.
    members, others = rng.normal(size=20_000), 1 + rng.normal(size=20_000)
    assert membership_success(members, others, splits=5) == pytest.approx(0.6915, abs=0.01)
    # Members of higher loss are not to be found this way.
    assert membership_success(others, members, splits=5) == pytest.approx(0.5, abs=0.01)
    assert membership_success([1.0] * 30, [1.0] * 30) == 0.5


def test_the_attack_is_on_each_group_by_itself():
    losses, groups = np.array([0.0] * 20 + [1.0] * 20), np.array([0] * 20 + [1] * 20)
    held_out = np.array([1.0] * 20 + [1.0] * 20)
    report = group_report(
        losses + 1, losses, groups, held_out_losses=held_out, held_out_groups=groups
    )
    assert [g.attack_success for g in report.groups] == [1.0, 0.5]
