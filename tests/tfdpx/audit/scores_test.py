"""AUC, advantage and true positives at few false ones, against closed forms and definitions."""

import numpy as np
import pytest
import small
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tfdpx import audit
from tfdpx.audit import membership
from tfdpx.audit.one_run import one_run_report

some_scores = st.lists(st.integers(-4, 4), min_size=1, max_size=12)


@given(some_scores, some_scores, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]))
def test_all_follow_from_their_definitions(members, nonmembers, fpr):
    pairs = [(m > o) + 0.5 * (m == o) for m in members for o in nonmembers]
    assert membership.auc(members, nonmembers) == pytest.approx(np.mean(pairs))
    members, nonmembers = np.array(members), np.array(nonmembers)
    thresholds = np.arange(-5.5, 5.0)
    true, false = (np.array([np.mean(s > t) for t in thresholds]) for s in (members, nonmembers))
    assert membership.advantage(members, nonmembers) == pytest.approx(max(true - false))
    assert membership.tpr_at_fpr(members, nonmembers, fpr) == pytest.approx(max(true[false <= fpr]))


@pytest.mark.parametrize("members", [[], [1.0, float("nan")]])
def test_no_scores_and_nan_are_refused(members):
    for function in (membership.auc, membership.advantage):
        with pytest.raises(ValueError, match="`members`"):
            function(members, [0.0])
    with pytest.raises(ValueError, match="`fpr`"):
        membership.tpr_at_fpr([1.0], [0.0], 1.0)


def test_scores_that_know_nothing_show_no_leakage():
    """The largest of many thresholds is above chance by chance; bounds at 95% are above in 5%."""
    shown = {"advantage": 0, "one run": 0, "one run, Gaussian": 0}
    for seed in range(100):
        rng = np.random.default_rng(seed)
        scores, coins = rng.normal(size=400), rng.integers(0, 2, 400) == 1
        report = one_run_report(scores, coins, delta=1e-5)
        assert report.membership.advantage > 0
        shown["advantage"] += report.membership.advantage_lower_bound > 0
        shown["one run"] += report.epsilon_lower_bound > 0
        shown["one run, Gaussian"] += report.gdp_epsilon_lower_bound > 0
    assert max(shown.values()) <= 10, shown


def test_the_lower_bound_of_the_advantage_is_below_it_and_near_for_many_scores():
    rng = np.random.default_rng(0)
    report = membership.membership_report(rng.normal(1.0, size=100_000), rng.normal(size=100_000))
    exact = 2 * stats.norm.cdf(0.5) - 1
    assert exact - 0.02 < report.advantage_lower_bound < exact


def test_losses_of_examples_are_those_of_batches_of_one():
    x, y = small.data()
    model = small.model(noise_multiplier=1.0, compile_arguments={"jit_compile": False})
    model(x)
    losses = audit.example_losses(model, x, y, batch_size=5)
    alone = [model.evaluate(x[i : i + 1], y[i : i + 1], verbose=0) for i in range(len(x))]
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
