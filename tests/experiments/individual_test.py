"""Groups of examples are compared in privacy, in loss and in the success of an attack."""

import numpy as np
import pytest

from experiments.individual import groups as individual


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
