"""A few of the inputs that `tools/fuzz.py` tries by the thousand."""

import fuzz_configurations
import fuzz_inputs
import hypothesis
import keras
import pytest

pytestmark = pytest.mark.nightly


@hypothesis.given(fuzz_inputs.PLANS)
def test_plans(arguments):
    fuzz_inputs.check_plan(arguments)


@hypothesis.settings(max_examples=5)
@hypothesis.given(fuzz_inputs.SENSIBLE_PLANS)
def test_sensible_plans(arguments):
    fuzz_inputs.check_plan(arguments)


@hypothesis.given(fuzz_inputs.damage(len(fuzz_inputs.SAVED_LEDGER)))
def test_ledgers(how):
    fuzz_inputs.check_ledger(how)


@hypothesis.settings(max_examples=5)
@hypothesis.given(fuzz_inputs.flags())
def test_flags(preset_and_flags):
    fuzz_inputs.check_flags(preset_and_flags)


def test_foreign_errors_are_not_taken_for_an_answer():
    with pytest.raises(ZeroDivisionError), fuzz_inputs.only_our_errors():
        _ = 1 / 0
    with pytest.raises(ValueError, match="invalid literal"), fuzz_inputs.only_our_errors():
        int("x")


@hypothesis.settings(max_examples=30)
@hypothesis.given(fuzz_configurations.CONFIGURATIONS)
def test_configurations(config):
    try:
        fuzz_configurations.check(config)
    except Exception as error:
        if not fuzz_inputs.is_ours(error):
            raise
    finally:
        keras.backend.clear_session()
