import json
import math
import warnings

import dp_accounting
import keras
import numpy as np
import pytest
import scipy.stats
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdpx
from tfdpx.accounting import PrivacyPlan, accountants, calibration, epsilon

GIVEN = {"num_examples": 1000, "batch_size": 50, "steps": 100, "delta": 1e-5}


FREE = {
    "noise_multiplier": st.floats(3.0, 20.0),
    "batch_size": st.integers(10, 4000),
    "steps": st.integers(1, 1000),
}


def check_solution(unknown, solution, plan):
    """Fails unless `solution` is the last that stays within the plan's epsilon."""

    def spent(value):
        noise, size, steps = (value if name == unknown else getattr(plan, name) for name in FREE)
        return epsilon(noise, size / plan.num_examples, steps, plan.delta, plan.accountant)

    assert spent(solution) <= plan.epsilon
    if unknown == "noise_multiplier":
        assert spent(solution * (1 - 2e-4)) > plan.epsilon
    elif not (unknown == "batch_size" and solution == plan.num_examples):
        assert isinstance(solution, int)
        assert spent(solution + 1) > plan.epsilon


def check_plan(unknown, **arguments):
    plan = PrivacyPlan(**arguments)
    assert plan.epsilon == arguments["epsilon"]
    assert plan.epsilon_at(plan.steps) <= plan.epsilon
    check_solution(unknown, getattr(plan, unknown), plan)
    return plan


@settings(max_examples=3, deadline=None)
@given(st.data(), st.floats(2.0, 20), st.floats(1e-8, 1e-4))
@pytest.mark.parametrize("unknown", FREE)
def test_solutions_are_within_budget_and_tight(unknown, data, epsilon, delta):
    fixed = {name: data.draw(values) for name, values in FREE.items() if name != unknown}
    plan = {"num_examples": 4_999, "epsilon": epsilon, "delta": delta, "accountant": "rdp"}
    check_plan(unknown, **plan, **fixed)


def test_a_pld_solution_is_within_budget_and_tight():
    arguments = dict(num_examples=50_000, epsilon=8.0, delta=1e-5, batch_size=4096, steps=2468)
    tight = check_plan("noise_multiplier", **arguments)
    loose = PrivacyPlan(accountant="rdp", **arguments)
    assert tight.accountant == "pld"  # The default.
    assert tight.noise_multiplier < 0.97 * loose.noise_multiplier


@pytest.mark.planted("a plan beside its budget")
@pytest.mark.parametrize("unknown, change", [("noise_multiplier", 0.999), ("steps", -1)])
def test_the_check_rejects_loose_and_overshooting_solutions(unknown, change):
    arguments = {"batch_size": 50, "steps": 100, "noise_multiplier": 3.0}
    del arguments[unknown]
    plan = PrivacyPlan(num_examples=1000, epsilon=2.0, delta=1e-5, accountant="rdp", **arguments)
    right = getattr(plan, unknown)
    wrong = right + change if unknown == "steps" else right * change
    check_solution(unknown, right, plan)
    with pytest.raises(AssertionError):
        check_solution(unknown, wrong, plan)


def test_epsilon_left_out():
    plan = PrivacyPlan(**GIVEN, noise_multiplier=1.5, accountant="rdp")
    assert plan.epsilon == epsilon(1.5, 0.05, 100, 1e-5, "rdp") == plan.epsilon_at(100)
    assert 0 == plan.epsilon_at(0) < plan.epsilon_at(50) < plan.epsilon < plan.epsilon_at(101)
    assert PrivacyPlan(**GIVEN, noise_multiplier=0).epsilon == math.inf


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_examples": 0}, "`num_examples` must be a positive integer.*num_examples=0"),
        ({"batch_size": 1001}, "`batch_size` must not exceed `num_examples`.*1001.*1000"),
        ({"batch_size": 50.0}, r"`batch_size` must be a positive integer.*batch_size=50\.0"),
        ({"steps": 0}, "`steps` must be a positive integer.*steps=0"),
        ({"epsilon": 0.0}, r"`epsilon` must be a positive, finite number.*epsilon=0\.0"),
        ({"epsilon": math.inf}, "`epsilon` must be a positive, finite number"),
        ({"delta": None}, "`delta` must lie strictly between 0 and 1.*delta=None"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "`noise_multiplier` must be a finite"),
        ({"sampling": "cyclic"}, "`sampling` must be one of.*sampling='cyclic'"),
        ({"accountant": "moments"}, "`accountant` must be one of.*accountant='moments'"),
        ({"noise_multiplier": 1.0}, "Exactly one of .* Left out: none"),
        ({"epsilon": None}, "Exactly one of .* Left out: `noise_multiplier`, `epsilon`"),
        ({"epochs": 5}, "takes the place of `steps`.*steps=100"),
        ({"epochs": 5, "steps": None, "batch_size": None}, "requires `batch_size`.*=None"),
        ({"epochs": math.inf, "steps": None}, "`epochs` must be a positive, finite"),
        ({"steps": None, "noise_multiplier": 0.5, "epsilon": 0.02}, "No `steps`.*even steps=1 "),
        ({"steps": None, "noise_multiplier": 0}, "No `steps`.*gives epsilon=inf"),
        ({"batch_size": None, "noise_multiplier": 0.5, "epsilon": 0.02}, "even batch_size=1 "),
        (
            {"batch_size": 900, "steps": None, "noise_multiplier": 8e4, "epsilon": 1e6},
            "does not bound `steps`: even steps=1.09951e\\+12",
        ),
    ],
)
def test_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        PrivacyPlan(**(GIVEN | {"epsilon": 1.0, "accountant": "rdp"} | changes))


@pytest.mark.parametrize(
    "num_examples, batch_size, steps, delta",
    [
        (50_000, 4096, 2468, 1e-5),
        (60_000, 256, 10_000, 1e-9),
        (1_803_460, 4096, 1_374_116, 5e-7),
        (1000, 1, 1, 1e-5),
        (1, 1, 1, 1e-5),
    ],
)
def test_capacity_is_the_least_whose_overflow_is_paid_for(num_examples, batch_size, steps, delta):
    plan = PrivacyPlan(num_examples, batch_size, steps, noise_multiplier=0.0, delta=delta)

    def filled_by_others(rows):
        q = batch_size / num_examples
        # Sums the mass from the far end: scipy's tail could lose precision.
        counts = np.arange(rows, min(num_examples, rows + 4000))
        return steps * math.fsum(scipy.stats.binom.pmf(counts, num_examples - 1, q))

    share = accountants.RESERVED_SHARE / 2 * delta
    assert filled_by_others(plan.capacity) <= share < filled_by_others(plan.capacity - 1)
    assert isinstance(plan.capacity, int)


def test_the_overflow_and_the_tail_are_kept_back_of_delta():
    share = accountants.RESERVED_SHARE
    plan = PrivacyPlan(**GIVEN, noise_multiplier=1.5, accountant="rdp")
    judge = rdp_privacy_accountant.RdpAccountant()
    event = dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.5))
    judge.compose(dp_accounting.SelfComposedDpEvent(event, 100))
    assert 0 < share <= 1e-3
    assert plan.epsilon == pytest.approx(judge.get_epsilon(1e-5 * (1 - share)), rel=1e-9)
    # Strictly within delta, and far within the tolerance of the goldens.
    assert judge.get_epsilon(1e-5) < plan.epsilon < judge.get_epsilon(1e-5) * (1 + 1e-5)


def test_capacity_edges():
    assert PrivacyPlan(100, 100, 5, noise_multiplier=0.0, delta=1e-5).capacity == 100
    assert PrivacyPlan(100, 99, 5, noise_multiplier=0.0, delta=1e-5).capacity == 100
    shuffled = PrivacyPlan(100, 30, 5, noise_multiplier=0.0, delta=1e-5, sampling="shuffle")
    assert shuffled.capacity == 30


@pytest.mark.parametrize("noise_multiplier", [None, 0.0])
def test_config_round_trip_does_not_solve_again(noise_multiplier, monkeypatch):
    target = 1.0 if noise_multiplier is None else None
    values = GIVEN | {"steps": np.int64(100), "batch_size": np.int32(50)}
    plan = PrivacyPlan(
        **values, epsilon=target, noise_multiplier=noise_multiplier, accountant="rdp"
    )
    optimizer = tfdpx.DPSGD(1.0, plan=plan)  # The import of its module registers plans with Keras.

    def fail(*arguments, **keywords):
        raise AssertionError("solved again")

    monkeypatch.setattr(calibration, "solve", fail)
    assert PrivacyPlan.from_config(plan.get_config()) == plan
    with pytest.raises(AttributeError):
        plan.steps = 1000
    text = json.dumps(keras.saving.serialize_keras_object(optimizer))
    assert keras.saving.deserialize_keras_object(json.loads(text)).plan == plan
    with pytest.raises(ValueError, match="`delta`"):
        PrivacyPlan.from_config(plan.get_config() | {"delta": 2.0})


@pytest.mark.parametrize(
    "name, value",
    [("noise_multiplier", 0.6), ("steps", 400), ("batch_size", 200), ("epsilon", 0.1)],
)
def test_an_edited_config_has_the_epsilon_of_its_values(name, value):
    plan = PrivacyPlan(**GIVEN, epsilon=2.0, accountant="rdp")
    config = plan.get_config() | {name: value}
    edited = tfdpx.DPSGD.from_config(
        tfdpx.DPSGD(1.0, plan=plan).get_config()
        | {"plan": PrivacyPlan.from_config(config), "noise_multiplier": None, "batch_size": None}
    ).plan
    solved = PrivacyPlan(**config | {"epsilon": None, "spent": None})
    assert getattr(edited, name) == value or name == "epsilon"
    assert edited.epsilon == pytest.approx(max(solved.epsilon, config["epsilon"]), rel=1e-9)
    assert edited.epsilon > value or name != "epsilon"


def test_text_is_a_line():
    plan = PrivacyPlan(**GIVEN, epsilon=2.0, accountant="rdp")
    assert plan.summary().startswith("(2, 1e-05)-DP for 100 steps of 50 out of 1000 examples")
    assert "\n" not in plan.summary() + repr(plan)
    assert "noise_multiplier=" in plan.summary() and "epsilon=2.0" in repr(plan)
    shuffled = PrivacyPlan(**GIVEN, epsilon=2.0, accountant="rdp", sampling="shuffle")
    assert shuffled.summary().startswith("about (2, 1e-05)-DP")
    assert shuffled.is_approximate and not plan.is_approximate
    assert plan.sampling_probability == 0.05


def test_batches_have_the_capacity_and_the_plan_counts_their_examples():
    plan = PrivacyPlan(**GIVEN, noise_multiplier=1.0, accountant="rdp")
    x = np.zeros([1000, 8, 8, 3], "uint8")
    for multiple, rows in ((1, plan.capacity), (16, math.ceil(plan.capacity / 16) * 16)):
        dataset = plan.batches(x, np.arange(1000), pad_to_multiple_of=multiple)
        assert dataset.cardinality() == plan.steps
        assert [spec.shape[0] for spec in dataset.element_spec] == [rows] * 3
    with pytest.raises(ValueError, match="999 examples, num_examples=1000"):
        plan.batches(x[:999])
    with pytest.raises(ValueError, match="`pad_to_multiple_of` must be a positive integer"):
        plan.batches(x, pad_to_multiple_of=0)


SMALL = {"num_examples": 1000, "delta": 1e-5, "accountant": "rdp"}


@pytest.mark.parametrize(
    "epochs, batch_size, steps",
    [(5, 100, 50), (1, 300, 4), (0.01, 300, 1), (2.5, 1000, 3)],
)
def test_epochs_become_steps(epochs, batch_size, steps):
    plan = PrivacyPlan(**SMALL, batch_size=batch_size, epochs=epochs, noise_multiplier=2.0)
    same = PrivacyPlan(**SMALL, batch_size=batch_size, steps=steps, noise_multiplier=2.0)
    assert plan == same and plan.steps == steps
    assert plan.epochs == pytest.approx(steps * batch_size / 1000)
    assert plan.epochs >= epochs - 1e-9


def test_a_quotient_that_rounds_up_is_no_step_more():
    assert 3 / (1 / 3) == 9 and 30 / (1 / 300) >= 9000
    for count in (299, 300, 301, 1437, 49_999):
        values = {**SMALL, "num_examples": count}
        plan = PrivacyPlan(**values, batch_size=1, epochs=1, noise_multiplier=1.0)
        assert plan.steps == count


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"delta": 2e-3}, "delta=0.002 exceeds 1/num_examples=0.001"),
        ({"noise_multiplier": 1e4, "accountant": "pld"}, "noise_multiplier=1e.04 drowns"),
    ],
)
def test_unlikely_arguments_warn_at_the_users_line(arguments, message):
    with pytest.warns(UserWarning, match=message) as caught:
        PrivacyPlan(
            **{**SMALL, "batch_size": 100, "steps": 5, "noise_multiplier": 1.0, **arguments}
        )
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyPlan(**{**SMALL, "delta": 1e-3}, batch_size=100, steps=5, noise_multiplier=1.0)
