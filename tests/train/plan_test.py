"""`tfdpx plan`: a table of budgets, and answers in numbers, before anything is spent."""

import math
import re

import dp_accounting
import pytest
from absl import flags
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from scipy import stats

import tfdpx
from tfdpx.accounting import Ledger, PrivacyPlan, group_epsilon
from tfdpx.accounting.ledger import Entry
from tfdpx.train import defaults, plan

SMALL = dict(noise_multiplier=4.0, batch_size=50, num_examples=500, steps=60, delta=1e-5)


@pytest.fixture
def ask(run, monkeypatch):
    """A function from flags to the last line and the text, of two budgets."""
    monkeypatch.setattr(plan, "EPSILONS", (0.5, 3.0))
    return lambda **given: run(plan, **given)


def test_each_row_is_a_plan_and_dp_accounting_agrees(ask):
    record, text = ask(num_examples=400, batch_size=400, steps=20)
    assert record["delta"] == 1e-5 and "1/num_examples = 0.0025" in " ".join(text.split())
    assert "No row promises an accuracy" in text and "docs/users.md" in text
    # The table begins with the right guesses of an attacker.
    rows = record["plans_by_right_guesses"]
    assert [row["at_most"] for row in rows] == [55, 60, 65, 70, 75, 80]
    for row in rows:
        assert row["right_guesses"] == pytest.approx(row["at_most"] / 100, abs=1e-6)
    assert round(rows[1]["epsilon"], 2) == 2.02
    assert text.index("60%") < text.index("80%") < text.index(" 0.5 ")
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


def test_right_guesses_in_place_of_epsilon_say_where_epsilon_binds(ask):
    arguments = {name: value for name, value in SMALL.items() if name != "steps"}
    answer, text = ask(**arguments, right_guesses=60)
    same = PrivacyPlan(500, 50, noise_multiplier=4.0, right_guesses=0.6, delta=1e-5)
    with pytest.raises(flags.IllegalFlagValueError, match="0.6 is not a number in .*50, 100"):
        ask(**arguments, right_guesses=0.6)
    assert answer["solved"] == "steps" and answer["steps"] == same.steps
    assert answer["epsilon"] == same.epsilon and "stricter limit: at most" in " ".join(text.split())


REFUSED = [
    ({**SMALL, "right_guesses": 60, "epsilon": 1}, "takes the place of --epsilon"),
    ({"num_examples": 500, "right_guesses": 60, "sampling": "shuffle"}, "needs --sampling=poisson"),
    ({}, "--num_examples is the number"),
    ({**SMALL, "epsilon": 1}, "Exactly one of --.*Left out: none"),
    ({**SMALL, "epochs": 3}, "leave one of them out.*--steps=60 --epochs=3"),
    ({**SMALL, "batch_size": 501}, "`batch_size` must not exceed `num_examples`.*batch_size=501"),
    ({**SMALL, "delta": 2}, "`delta` must"),
    ({**SMALL, "sampling": "with_replacement"}, "but no accountant for it"),
    ({**SMALL, "sampling": "shuffle", "rows_per_user": 2}, "with --sampling=poisson"),
    ({**SMALL, "rows_per_user": 501}, "`rows_per_user` must be from 1 to --num_examples"),
    (
        dict(num_examples=500, noise_multiplier=1, epsilon=0.01, accountant="rdp"),
        "No `steps` meets",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_unanswerable_questions_are_refused_by_name(refusal, arguments, message):
    assert re.search(message, refusal(plan, **arguments))


def composed(noise, steps, rate=0.1, accountant="pld", delta=1e-5):
    """Returns dp_accounting's epsilon of a run."""
    kinds = pld_privacy_accountant.PLDAccountant, rdp_privacy_accountant.RdpAccountant
    judge = kinds[accountant == "rdp"]()
    gaussian = dp_accounting.GaussianDpEvent(noise)
    judge.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)
    return judge.get_epsilon(delta)


# Each quantity has a change that would overspend.
UNKNOWN = {"noise_multiplier": 0.999, "batch_size": 1, "steps": 1, "epsilon": None}


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_any_one_is_solved_from_the_others(ask, unknown):
    arguments = {**SMALL, "epsilon": 1.2}
    del arguments[unknown]
    answer, _ = ask(accountant="rdp", **arguments)
    value, change = answer[unknown], UNKNOWN[unknown]

    def spent(value):
        values = {**arguments, unknown: value}
        rate = values["batch_size"] / values["num_examples"]
        return composed(values["noise_multiplier"], values["steps"], rate, "rdp")

    assert answer["solved"] == unknown and answer["chosen"] == []
    assert answer["epsilon_rdp"] == pytest.approx(spent(value), rel=1e-4)
    if change is not None:
        assert spent(value) <= 1.2 < spent(value + change if change % 1 == 0 else value * change)


def test_the_usual_values_fill_in_where_more_is_left_out(ask):
    answer, _ = ask(num_examples=500, epsilon=3, accountant="rdp")
    usual, _ = defaults.for_networks(500)
    assert answer["solved"] == "noise_multiplier"
    assert answer["chosen"] == ["batch_size", "steps", "delta"]
    assert (answer["batch_size"], answer["steps"]) == (usual["batch_size"], usual["steps"])


def test_epochs_and_pld_and_what_is_said_of_both(ask, capsys, monkeypatch):
    arguments = {name: value for name, value in SMALL.items() if name != "steps"}
    answer, _ = ask(**arguments, epochs=6)
    assert (answer["steps"], answer["epochs"], answer["sampling_probability"]) == (60, 6.0, 0.1)
    assert answer["epsilon_pld"] == pytest.approx(composed(4.0, 60), rel=2e-3)
    assert answer["epsilon"] == answer["epsilon_pld"] < answer["epsilon_rdp"]
    # A weak guarantee, and no library to compare with.
    monkeypatch.setattr(plan, "compute_dp_sgd_privacy_lib", None)
    answer, text = ask(**{**SMALL, "delta": 0.01})
    assert "Warning: delta=0.01 exceeds 1/num_examples=0.002" in capsys.readouterr().err
    assert "tensorflow-privacy is not installed" in " ".join(text.split())
    assert answer["epsilon_tensorflow_privacy_poisson"] is None and answer["is_exact"] is True


def test_bounds_on_attacks_are_printed_rounded_up(ask):
    full = {**SMALL, "batch_size": 500}
    for arguments, steps, remark in [
        (full, 60, "whether one example"),
        ({**SMALL, "sampling": "shuffle"}, 6, "an empty example is in its place"),
        ({**full, "noise_multiplier": 2.0, "sampling": "shuffle"}, 60, "Absent means"),
    ]:
        answer, text = ask(**arguments)
        text = " ".join(text.split())
        mu = math.sqrt(steps) / arguments["noise_multiplier"]
        bounds, right = answer["attack_bounds"], stats.norm.cdf(mu / 2)
        true = stats.norm.cdf(mu + stats.norm.ppf(0.01))
        values = (bounds["right_guesses"], bounds["true_positive_rate"]["0.01"], bounds["mu"])
        assert values == pytest.approx((right, true, mu), abs=1e-4) and remark in text
        printed = re.findall(r"(?:if 1% of[^│]*|right guesses \([^│]*)│ ([\d.]+)%", text)
        true, right = (float(number) / 100 for number in printed)
        assert 0 <= true - values[1] < 1e-3 and 0 <= right - values[0] < 1e-3
        assert f"right at most {math.ceil(100 * values[0])} times out of 100" in text
    answer, text = ask(**SMALL, sampling="without_replacement")
    assert answer["attack_bounds"] is None and "No bound on attacks is known" in text


@pytest.mark.filterwarnings("ignore:The epsilon of k")
@pytest.mark.slow
def test_people_with_several_rows(ask):
    record, _ = ask(**{**SMALL, "batch_size": 500}, rows_per_user=3)
    together = group_epsilon(Ledger((Entry(4.0, 1.0, 60),)), 3, delta=1e-5)
    assert record["epsilon_of_examples_of_one_person"] == {"3": pytest.approx(together, rel=1e-3)}
    assert record["epsilon_pld"] == pytest.approx(record["epsilon_gdp"], rel=1e-4)


ORACLES = [
    ({}, "pld", "poisson"),
    ({"sampling": "shuffle"}, "pld", "once_per_epoch"),
    ({"noise_multiplier": 20.0, "batch_size": 500, "steps": 206}, "rdp", "poisson"),
]


@pytest.mark.skipif(plan.compute_dp_sgd_privacy_lib is None, reason="needs tensorflow-privacy")
@pytest.mark.parametrize(("arguments", "accountant", "name"), ORACLES)
def test_tensorflow_privacy_agrees_and_stands_beside(ask, arguments, accountant, name):
    answer, text = ask(**{**SMALL, **arguments}, accountant=accountant)
    theirs = answer[f"epsilon_tensorflow_privacy_{name}"]
    assert answer[f"epsilon_{accountant}"] == pytest.approx(theirs, rel=2e-4, abs=6e-4)
    assert re.search(rf"epsilon tensorflow privacy {name.replace('_', ' ')} *│ {theirs:.5g}", text)
    assert f"{theirs:12.3f}\n" in text and "Why these differ" in text
