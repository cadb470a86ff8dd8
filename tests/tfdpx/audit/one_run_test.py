"""Canaries of one training detect a training without privacy, pass a private one; misuse fails."""

import math

import keras
import numpy as np
import pytest
import seeds
import small
from scipy import stats

import tfdpx
from tfdpx import audit
from tfdpx.audit.one_run import one_run_report

COUNT, ROWS, CLASSES = 200, 40, 2
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def canaries(**arguments):
    """Makes canaries with one feature each: this best shows the model's memory of them."""
    x = 3.0 * np.eye(COUNT, dtype="float32")
    return audit.OneRunAudit(x, np.arange(COUNT) % CLASSES, **{"seed": 3, **arguments})


def data():
    rng = np.random.default_rng(0)
    x = np.zeros([ROWS, COUNT], "float32")
    return x, rng.integers(0, CLASSES, ROWS)


def linear(optimizer):
    seeds.fix(0)
    model = keras.Sequential([keras.Input((COUNT,)), keras.layers.Dense(CLASSES)])
    model.compile(optimizer, LOSS, jit_compile=False)
    return model


def plan(**arguments):
    arguments = {"batch_size": 120, "steps": 8, "epsilon": 2.0, "delta": 1e-3, **arguments}
    return tfdpx.PrivacyPlan(ROWS + COUNT, **arguments)


def trained(planned, optimizer_class=tfdpx.DPSGD, clip=1.0):
    one_run = canaries()
    model = linear(optimizer_class(20.0, plan=planned, l2_norm_clip=clip, seed=1))
    batches = planned.batches(*one_run.insert(*data()), seed=2)
    model.fit(batches, callbacks=[one_run], verbose=0)
    return one_run.report(), exceeds(planned.attack_bounds(), one_run)


def exceeds(bounds, one_run, error=1e-6):
    """Returns whether an attack on canaries exceeds bounds, by chance with probability `error`.

    Thresholds are quantiles of all scores, so they do not depend on the coins. The bounds hold
    for rates of several canaries: the curve is concave. Confidence intervals share `error`.
    """
    scores, included = one_run.scores, one_run.included

    def rates(hits):  # The least and the largest.
        test = stats.binomtest(int(hits.sum()), len(hits))
        return test.proportion_ci(1 - 2 * error / 7)

    verdicts = [rates((scores > np.median(scores)) == included).low > bounds.right_guesses]
    for quantile in (0.5, 0.8, 0.95):
        is_guessed = scores > np.quantile(scores, quantile)
        true, false = rates(is_guessed[included]).low, rates(is_guessed[~included]).high
        verdicts.append(true > bounds.true_positive_rate(false))
    return any(verdicts)


@pytest.mark.slow
def test_a_private_training_passes_with_a_bound_that_is_not_idle():
    planned = plan(epsilon=8.0)
    report, is_above = trained(planned)
    assert not is_above and report.passed and "PASSED" in str(report)
    assert report.epsilon == pytest.approx(8.0, rel=1e-3) and report.delta == 1e-3
    assert 0.2 < report.epsilon_lower_bound <= report.epsilon
    assert report.epsilon_lower_bound < report.gdp_epsilon_lower_bound <= report.epsilon
    assert report.canaries == COUNT and report.correct <= report.guesses <= COUNT
    assert report.membership.members + report.membership.others == COUNT
    assert report.membership.auc > 0.6 and 0.1 in report.membership.tpr_at_fpr


@pytest.mark.slow
def test_a_training_with_a_tenth_of_the_noise_fails():
    class Quiet(tfdpx.DPSGD):
        def private_train_step(self, model, data):
            real = tfdpx.mechanism.privatize

            def quieter(sums, noise_multiplier, *arguments):
                return real(sums, noise_multiplier / 10, *arguments)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tfdpx.mechanism, "privatize", quieter)
                return super().private_train_step(model, data)

    report, is_above = trained(plan(epsilon=1.0), Quiet)
    assert is_above and not report.passed and "FAILED" in str(report)
    assert report.epsilon_lower_bound > 1.5 > report.epsilon


def test_a_training_without_privacy_shows_a_large_epsilon():
    one_run = canaries()
    x, y, weights = one_run.insert(*data())
    model = linear(keras.optimizers.SGD(1.0))
    model.fit(x, y, 60, 20, sample_weight=weights, callbacks=[one_run], verbose=0)
    report = one_run.report()
    assert report.correct == report.guesses and report.epsilon == math.inf
    assert report.epsilon_lower_bound > 3.0 and report.gdp_epsilon_lower_bound > 3.5
    assert report.membership.auc == 1.0 and set(report.membership.tpr_at_fpr.values()) == {1.0}
    assert "NOT PRIVATE" in str(report)


def test_canaries_that_are_left_out_add_nothing_and_all_have_a_row():
    one_run = canaries()
    x, y, weights = one_run.insert(*data(), sample_weight=np.full(ROWS, 2.0))
    assert len(x) == len(y) == len(weights) == ROWS + COUNT and x.dtype == np.float32
    np.testing.assert_array_equal(weights, [2.0] * ROWS + list(one_run.included * 1.0))
    assert 70 < one_run.included.sum() < 130
    assert not np.array_equal(canaries(seed=4).included, one_run.included)
    fresh = canaries(seed=None).included
    assert not np.array_equal(canaries(seed=None).included, fresh)
    # The values of a canary that is left out do not change the weights.
    model = linear(tfdpx.DPSGD(1.0, batch_size=240, noise_multiplier=1e-6, seed=1))
    other = x.copy()
    other[ROWS:][~one_run.included] = 7.0
    changes = []
    for inputs in (x, other):
        model.set_weights([np.zeros_like(w) for w in model.get_weights()])
        changes.append(small.step(model, inputs, y, weights))
    np.testing.assert_allclose(changes[0], changes[1], atol=1e-6)
    assert np.abs(changes[0]).max() > 1e-3


def test_a_guess_is_right_if_a_highest_score_was_in_or_a_lowest_was_out():
    assert one_run_report(np.arange(9.0), np.arange(9) > 4, 1e-5, guesses=4).correct == 4


@pytest.mark.slow
def test_misuse_is_named():
    planned, one_run = plan(noise_multiplier=2.0, epsilon=None), canaries()
    model = linear(tfdpx.DPSGD(1.0, plan=planned))
    x, y = data()
    with pytest.raises(ValueError, match="No canary is in the data"):
        model.fit(planned.batches(*canaries().insert(x, y)), callbacks=[one_run], verbose=0)
    one_run.insert(x, y)
    with pytest.raises(RuntimeError, match="before `fit` has ended"):
        one_run.report()
    with pytest.raises(ValueError, match="do not end with the canaries"):
        other = canaries(seed=4).insert(x, y)
        model.fit(planned.batches(*other), callbacks=[one_run], verbose=0)
    scores = np.arange(4.0)
    for call, message in [
        (lambda: canaries(delta=2.0), "`delta`"),
        (lambda: canaries(confidence=1.0), "`confidence`"),
        (lambda: one_run_report(scores, scores < 2, 1e-5, guesses=5), "`guesses`"),
        (lambda: one_run_report(scores, np.arange(4), 1e-5), "`included`"),
        (lambda: audit.OneRunAudit(np.ones([3, 2]), np.ones([2])), "one length"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
