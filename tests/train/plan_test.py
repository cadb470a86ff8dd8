"""`tfdpx plan`: a table of budgets before anything is spent."""

import dp_accounting
import pytest
from dp_accounting.pld import pld_privacy_accountant

import tfdpx
from tfdpx.accounting import PrivacyPlan, group_epsilon
from tfdpx.train import defaults, plan


@pytest.fixture
def ask(run, monkeypatch):
    """A function from flags to the last line and the text, of two budgets alone."""
    monkeypatch.setattr(plan, "EPSILONS", (0.5, 3.0))
    return lambda **given: run(plan, **given)


def test_each_row_is_a_plan_and_dp_accounting_agrees(ask):
    record, text = ask(num_examples=400, batch_size=400, steps=20)
    assert record["delta"] == 1e-5 and "1/num_examples = 0.0025" in " ".join(text.split())
    assert "No row promises an accuracy" in text and "docs/users.md" in text
    for row, epsilon in zip(record["plans"], (0.5, 3.0), strict=True):
        same = PrivacyPlan(400, batch_size=400, steps=20, epsilon=epsilon, delta=1e-5)
        assert row["epsilon"] == epsilon and row["steps"] == 20 and row["epochs"] == 20
        assert row["noise_multiplier"] == same.noise_multiplier
        suggested = tfdpx.suggest(same, defaults.WEIGHTS)
        assert row["learning_rate"] == suggested.learning_rate and row["outlook"] is None
        assert row["right_guesses"] == same.attack_bounds().right_guesses
        together = row["epsilon_of_examples_of_one_person"]
        assert together == {str(k): group_epsilon(same, k) for k in (2, 4)}
        judge = pld_privacy_accountant.PLDAccountant()
        event = dp_accounting.GaussianDpEvent(row["noise_multiplier"])
        judge.compose(dp_accounting.SelfComposedDpEvent(event, 20))
        assert judge.get_epsilon(1e-5) == pytest.approx(epsilon, rel=2e-3)


def test_steps_are_solved_for_a_noise_and_rows_without_a_plan_stay_empty(ask):
    record, text = ask(num_examples=400, batch_size=400, noise_multiplier=5.0, accountant="rdp")
    empty, row = record["plans"]
    assert empty["steps"] is None and empty["right_guesses"] is None
    same = PrivacyPlan(
        400, batch_size=400, noise_multiplier=5.0, epsilon=3.0, delta=1e-5, accountant="rdp"
    )
    assert row["steps"] == same.steps > 1
    assert "-" in next(line for line in text.splitlines() if " 0.5 " in line)


def test_choices_follow_the_rule_of_the_defaults(ask):
    record, _ = ask(num_examples=2_000_000, batch_size=2_000_000, steps=1, accountant="rdp")
    assert record["delta"] == pytest.approx(1e-8)
    record, _ = ask(num_examples=200, accountant="rdp", delta=0.01)
    values, _ = defaults.for_networks(200)
    row = record["plans"][1]
    assert (record["batch_size"], row["steps"]) == (values["batch_size"], values["steps"])
    assert record["delta"] == 0.01 and "exceeds 1/num_examples" in record["warnings"][0]


def test_weights_decide_rate_and_outlook(ask):
    record, text = ask(num_examples=4000, weights=5_000_000, accountant="rdp")
    assert [row["outlook"] for row in record["plans"]] == ["hopeless", "hopeless"]
    row = record["plans"][1]
    same = PrivacyPlan(4000, 1024, 200, epsilon=3.0, delta=1e-5, accountant="rdp")
    assert row["learning_rate"] == tfdpx.suggest(same, 5_000_000).learning_rate
    assert "outlook" in text and text.count("hopeless") >= 3


def test_bad_arguments_are_named_all_at_once(refusal):
    text = refusal(plan, num_examples=30, batch_size=50, steps=3, noise_multiplier=-1, delta=2)
    for part in ("--batch_size=50", "one of --steps", "--noise_multiplier must", "`delta` must"):
        assert part in text
    assert "--num_examples=None" in refusal(plan)
    assert "--weights must be at least 1" in refusal(plan, num_examples=50, weights=0)
