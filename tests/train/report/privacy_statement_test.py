"""The statement in words agrees with the accountant in numbers, and claims nothing else."""

import math
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given

import tfdpx
from tfdpx.train.report import privacy_statement


def make_plan(**changes):
    arguments = dict(num_examples=1437, batch_size=256, steps=300, delta=1e-5, noise_multiplier=3.0)
    return tfdpx.PrivacyPlan(**{**arguments, **changes})


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("steps", [1, 300])
def test_the_line_of_tensorflow_privacy_that_is_named_says_the_same(accountant, steps, monkeypatch):
    # Skips what fails to import on TensorFlow >= 2.16.
    monkeypatch.setattr("sys.skip_tf_privacy_import", True, raising=False)
    lib = pytest.importorskip("tensorflow_privacy.privacy.analysis.compute_dp_sgd_privacy_lib")
    plan = make_plan(accountant=accountant)
    text = flat(privacy_statement.statement(plan, steps))
    theirs = lib.compute_dp_sgd_privacy_statement(
        number_of_examples=plan.num_examples,
        batch_size=plan.batch_size,
        # It rounds the steps up from here; the whole number could round to one more.
        num_epochs=(steps - 1e-6) * plan.sampling_probability,
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        used_microbatching=False,
        accountant_type=lib.AccountantType[accountant.upper()],
    )
    named = re.search(r'prints for these numbers, "(.*?)" applies', text).group(1)
    value = re.search(rf"{re.escape(named)}:\s+([\d.]+)", theirs).group(1)
    # Three decimals are printed: a step too many, or averages clipped, would differ by more.
    assert float(value) == pytest.approx(plan.epsilon_at(steps), abs=6e-4)


@given(st.floats(1e-6, 1e6))
def test_what_is_claimed_is_never_less_than_what_was_spent(epsilon):
    text = flat(privacy_statement.statement(make_plan(), 300, epsilon=epsilon))
    cited = float(re.search(r"has \((\S+), 1e-05\)-differential privacy", text).group(1))
    told = float(re.search(r"epsilon = (\S+), delta", text).group(1))
    assert epsilon * (1 - 1e-8) <= told <= cited <= epsilon * 1.0011


def test_all_that_a_reader_needs_is_in_it():
    text = flat(privacy_statement.statement(make_plan(), 300, dataset="folder:birds", clip=0.02))
    for part in (
        "trained on folder:birds (N = 1,437 training images)",
        "after 300 updates",
        "one training image, added or removed",
        "l2 norm of 0.02",
        "noise_multiplier = 3",
        "PLD accountant of dp_accounting",
        "drew each image with probability 0.178149",
        "Covers:",
        "Does not cover:",
        "know no data",
        "what was tuned on them costs more",
    ):
        assert part in text
    whole = flat(privacy_statement.statement(make_plan(batch_size=1437), 300))
    assert "each update took all images" in whole and "drew each image" not in whole


def test_shuffling_is_called_an_approximation():
    text = flat(privacy_statement.statement(make_plan(sampling="shuffle"), 300))
    assert "approximation" in text and "were cut from permutations" in text
    assert "neither applies" in text
    assert "approximation" in privacy_statement.statement(make_plan(), 300, is_approximate=True)
    assert "approximation" not in privacy_statement.statement(make_plan(), 300)


def test_a_seeded_run_is_not_releasable():
    text = privacy_statement.statement(make_plan(), 300, is_seeded=True)
    assert "NOT RELEASABLE" in text and "not releasable" in text.splitlines()[0]
    assert "releasable" not in privacy_statement.statement(make_plan(), 300).lower()


def test_it_says_what_the_weights_had_seen():
    mnist = {"dataset": "mnist", "epsilon": math.inf}
    text = flat(privacy_statement.statement(make_plan(), 300, seen=[mnist]))
    assert "trained on mnist (epsilon inf), on none of these images" in text
    own = {"dataset": "sklearn_digits", "epsilon": 1.0}
    text = privacy_statement.statement(make_plan(), 300, epsilon=4.0, seen=[own], repeated=[own])
    assert "on these images too, and epsilon and delta are the sums" in flat(text)
    text = privacy_statement.statement(make_plan(), 300, epsilon=math.inf)
    assert "There is no differential privacy" in text and "1e-05" not in text


def test_no_noise_is_no_privacy():
    text = privacy_statement.statement(make_plan(noise_multiplier=0.0), 300)
    assert "epsilon is infinite" in text
