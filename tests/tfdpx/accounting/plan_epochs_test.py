import warnings

import pytest

from tfdpx.accounting import PrivacyPlan

GIVEN = {"num_examples": 1000, "delta": 1e-5, "accountant": "rdp"}


@pytest.mark.parametrize(
    "epochs, batch_size, steps",
    [(5, 100, 50), (1, 300, 4), (0.01, 300, 1), (2.5, 1000, 3), (30, 10, 3000), (3, 7, 429)],
)
def test_epochs_become_steps(epochs, batch_size, steps):
    plan = PrivacyPlan(**GIVEN, batch_size=batch_size, epochs=epochs, noise_multiplier=2.0)
    same = PrivacyPlan(**GIVEN, batch_size=batch_size, steps=steps, noise_multiplier=2.0)
    assert plan == same and plan.steps == steps
    assert plan.epochs == pytest.approx(steps * batch_size / 1000)
    assert plan.epochs >= epochs - 1e-9


def test_a_quotient_that_rounds_up_is_no_step_more():
    assert 3 / (1 / 3) == 9 and 30 / (1 / 300) >= 9000
    for count in (299, 300, 301, 1437, 49_999):
        given = {**GIVEN, "num_examples": count}
        plan = PrivacyPlan(**given, batch_size=1, epochs=1, noise_multiplier=1.0)
        assert plan.steps == count


def test_the_plan_of_a_config_has_epochs_too():
    plan = PrivacyPlan(**GIVEN, batch_size=100, epochs=5, noise_multiplier=2.0)
    assert "epochs" not in plan.get_config()
    assert PrivacyPlan.from_config(plan.get_config()) == plan


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"epochs": 5, "steps": 3, "batch_size": 10}, "takes the place of `steps`.*steps=3"),
        ({"epochs": 5, "epsilon": 1.0}, "needs `batch_size`.*batch_size=None"),
        ({"epochs": 0, "batch_size": 10}, "`epochs` must be a positive.*epochs=0"),
        ({"epochs": -1.0, "batch_size": 10}, "`epochs` must be a positive"),
        ({"epochs": float("inf"), "batch_size": 10}, "`epochs` must be a positive, finite"),
        ({"epochs": "5", "batch_size": 10}, "`epochs` must be a positive"),
        ({"epochs": 5, "batch_size": 2000}, "must not exceed `num_examples`"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyPlan(**GIVEN, noise_multiplier=2.0, **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"delta": 2e-3}, "delta=0.002 exceeds 1/num_examples=0.001"),
        ({"noise_multiplier": 1e4, "accountant": "pld"}, "noise_multiplier=1e.04 drowns"),
    ],
)
def test_what_is_hardly_meant_is_said_at_the_users_line(arguments, message):
    with pytest.warns(UserWarning, match=message) as caught:
        PrivacyPlan(
            **{**GIVEN, "batch_size": 100, "steps": 5, "noise_multiplier": 1.0, **arguments}
        )
    assert [warning.filename for warning in caught] == [__file__]


def test_usual_plans_are_not_doubted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyPlan(**{**GIVEN, "delta": 1e-3}, batch_size=100, steps=5, noise_multiplier=1.0)
        PrivacyPlan(**GIVEN, batch_size=100, steps=5, epsilon=0.1)
