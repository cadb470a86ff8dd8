"""The statement in words agrees with the accountant in numbers."""

import re

import pytest

import tfdpx
from tfdpx.train.report import privacy_statement


def make_plan(**changes):
    arguments = dict(num_examples=1437, batch_size=256, steps=300, delta=1e-5, noise_multiplier=3.0)
    return tfdpx.PrivacyPlan(**{**arguments, **changes})


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("steps", [1, 300])
def test_tensorflow_privacy_and_the_plan_agree(accountant, steps):
    plan = make_plan(accountant=accountant)
    text = privacy_statement.statement(plan, steps)
    poisson = re.search(r"Epsilon assuming Poisson sampling \(\*\):\s+([\d.]+)", text).group(1)
    # Three decimals are printed: a step too many, or averages clipped, would differ by more.
    assert float(poisson) == pytest.approx(plan.epsilon_at(steps), abs=6e-4)
    assert f"({plan.epsilon_at(steps):.4g}, 1e-05)-differential privacy" in text
    assert f"after {steps} updates" in text


def test_shuffling_is_called_an_approximation():
    assert "approximation" in privacy_statement.statement(make_plan(sampling="shuffle"), 300)
    assert "approximation" not in privacy_statement.statement(make_plan(), 300)


def test_a_known_seed_is_a_caveat():
    assert "seed 17" in privacy_statement.statement(make_plan(), 300, seed=17)
    assert "seed" not in privacy_statement.statement(make_plan(), 300)


def test_no_noise_is_no_privacy():
    text = privacy_statement.statement(make_plan(noise_multiplier=0.0), 300)
    assert "epsilon is infinite" in text


def test_without_tensorflow_privacy_it_says_so(monkeypatch):
    monkeypatch.setattr(privacy_statement, "compute_dp_sgd_privacy_lib", None)
    text = privacy_statement.statement(make_plan(), 300)
    assert "tensorflow-privacy is not installed" in text
    assert "-differential privacy" in text
