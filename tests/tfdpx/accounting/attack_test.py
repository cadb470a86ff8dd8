"""Tests of bounds on attacks: closed forms, simulated attacks, dp_accounting, and refusals."""

import dataclasses

import numpy as np
import pytest
from cases import slow_but
from dp_accounting.pld import common, privacy_loss_distribution
from scipy import stats

import tfdpx
from tfdpx.accounting import Ledger, accountants, attack, gaussian
from tfdpx.accounting.ledger import Entry
from tfdpx.report import words

# Two computed curves may differ by this where they are equal: sums of float64 numbers up to 1. No
# number of guesses that anyone can make shows it. Bounds on attacks stay above the true ones
# exactly, by `kept_back`, which the product adds to each of them.
ROUNDING = 1e-12
RATES = np.array([0.0, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 1.0])


SHUFFLED = Entry(1.0, 0.1, 5, poisson_sampled=False, shuffled=True)
ABOUT = {"unit": "example", "neighbours": "add_or_remove"}
SPENT = Ledger().with_release(epsilon=0.9, delta=0.0, name="x", **ABOUT)


def _bounds(noise, probability=1.0, steps=1, selections=()):
    return attack.attack_bounds(((noise, probability, steps),), 1e-5, "example", selections)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0])
def test_full_batches_have_the_closed_forms_of_gaussians(mu):
    bounds = _bounds(noise=np.sqrt(7) / mu, steps=7)
    exact = stats.norm.cdf(stats.norm.ppf(RATES) + mu)
    np.testing.assert_allclose(bounds.true_positive_rate(RATES), exact, atol=1e-5)
    assert bounds.kept_back > 100 * ROUNDING
    assert np.all(bounds.true_positive_rate(RATES) >= exact)
    assert bounds.advantage == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, abs=1e-8)
    assert bounds.right_guesses == pytest.approx(stats.norm.cdf(mu / 2), abs=1e-8)
    assert bounds.auc == pytest.approx(stats.norm.cdf(mu / np.sqrt(2)), abs=1e-5)
    assert bounds.mu == pytest.approx(mu, rel=1e-4)


def _scores(noise, probability, steps, is_present, runs, rng, assumed=None):
    """Simulates the scores of the best attack, log likelihood ratios for the noise `assumed`."""
    scores = np.zeros(runs)
    for _ in range(steps):
        drawn = is_present & (rng.random(runs) < probability)
        outcomes = drawn + noise * rng.standard_normal(runs)
        scores += np.log1p(probability * np.expm1((outcomes - 0.5) / (assumed or noise) ** 2))
    return scores


@pytest.mark.parametrize(("noise", "probability", "steps"), [(1.0, 0.1, 40), (0.6, 0.02, 60)])
def test_the_best_attack_on_poisson_samples_comes_near_and_not_beyond(noise, probability, steps):
    rng, runs = np.random.default_rng(1), 100_000
    present = _scores(noise, probability, steps, True, runs, rng)
    absent = _scores(noise, probability, steps, False, runs, rng)
    bounds = _bounds(noise, probability, steps)
    for one, other in ((present, absent), (-absent, -present)):  # Presence, then absence.
        share = np.mean(one[:, np.newaxis] > np.quantile(other, 1 - RATES[3:6]), axis=0)
        assert np.all(share <= bounds.true_positive_rate(RATES[3:6]) + 0.006)
    largest = stats.ks_2samp(present, absent).statistic
    assert bounds.advantage - 0.01 < largest < bounds.advantage + 0.01
    measured = stats.mannwhitneyu(present, absent).statistic / runs**2
    # The curve covers presence and absence together, so its area exceeds either's.
    assert bounds.auc - 0.02 < measured < bounds.auc + 0.005


def test_noise_that_is_too_small_by_a_third_is_beyond_the_bounds():
    rng, runs = np.random.default_rng(2), 50_000
    present, absent = (_scores(2 / 3, 0.1, 40, is_in, runs, rng, 1.0) for is_in in (True, False))
    bounds = _bounds(1.0, 0.1, 40)
    measured = stats.mannwhitneyu(present, absent).statistic / runs**2
    assert measured > bounds.auc + 0.02
    assert np.mean(present > np.quantile(absent, 0.99)) > bounds.true_positive_rate(0.01) + 0.02


def test_the_curve_is_concave_and_grows_with_every_update():
    rates = np.linspace(0, 1, 201)
    shorter, longer = (_bounds(1.2, 0.05, steps) for steps in (10, 200))
    curve = longer.true_positive_rate(rates)
    assert np.all(np.diff(curve) >= -ROUNDING)
    assert np.all(np.diff(curve, 2) <= ROUNDING)
    assert np.all(curve >= shorter.true_positive_rate(rates) - ROUNDING)
    # Each (epsilon, delta) of the account is a tangent of the curve.
    for delta in (1e-8, 1e-5, 1e-2):
        epsilon = tfdpx.accounting.epsilon(1.2, 0.05, 200, delta)
        assert np.all(curve <= np.exp(epsilon) * rates + delta + longer.kept_back + ROUNDING)


def test_mu_depends_on_the_delta_from_which_it_holds():
    bounds = _bounds(1.0, 0.01, 1000)
    of = {delta: dataclasses.replace(bounds, delta=delta).mu for delta in (0.12, 2.7e-6)}
    assert of == {0.12: pytest.approx(0.41, abs=0.005), 2.7e-6: pytest.approx(0.47, abs=0.005)}


def test_the_curve_of_mu_is_above_an_update_in_closed_form():
    noise, probability, epsilons = 0.5, 0.01, np.linspace(0, 8, 20_001)
    at = noise**2 * np.log((np.expm1(epsilons) + probability) / probability) + 0.5
    absent, drawn = stats.norm.sf(at / noise), stats.norm.sf((at - 1) / noise)
    deltas = probability * (drawn - absent) - np.expm1(epsilons) * absent
    bounds, is_covered = _bounds(noise, probability), deltas >= 1e-5
    assert np.all(gaussian.exact_delta(bounds.mu, epsilons) >= deltas * is_covered)
    rates = bounds.true_positive_rate(RATES[:4])
    assert np.all(rates >= np.min(np.outer(RATES[:4], np.exp(epsilons)) + deltas, axis=1))


def test_a_paid_search_counts_as_the_worst_of_its_epsilon_and_delta():
    bounds = _bounds(2.0, selections=((0.7, 1e-3),))
    gaussian = privacy_loss_distribution.from_gaussian_mechanism(
        2.0, value_discretization_interval=1e-3, use_connect_dots=True
    )
    search = privacy_loss_distribution.from_privacy_parameters(
        common.DifferentialPrivacyParameters(0.7, 1e-3), value_discretization_interval=1e-3
    )
    expected = gaussian.compose(search).get_delta_for_epsilon(bounds.epsilons)
    np.testing.assert_allclose(bounds.deltas, expected, atol=5e-5)
    entry = Entry(9.0, 1.0, 30)
    ledger = Ledger((entry,)) + Ledger.selected((entry,), 5.0, 1e-6)
    alone = Ledger((entry,)).attack_bounds(1e-5)
    assert ledger.attack_bounds(1e-5).auc > alone.auc
    search = attack.attack_bounds((), 1e-5, "example", ((0.7, 1e-3),))
    heights = search.true_positive_rate(np.linspace(0, 1, 1001))
    assert search.auc >= np.mean(heights[:-1] + heights[1:]) / 2
    assert _bounds(2.0, selections=((0.01, 1e-6),) * 40).right_guesses < 0.9
    rate = np.exp(ledger.epsilon(1e-5)) * 1e-3 + ledger.total_delta(1e-5)
    assert ledger.attack_bounds(1e-5).true_positive_rate(1e-3) <= rate


GOALS = (0.55, 0.65, 0.8)


def _plan(**arguments):
    defaults = {"num_examples": 1000, "batch_size": 1000, "steps": 60, "delta": 1e-5}
    return tfdpx.PrivacyPlan(**defaults | arguments)


@pytest.mark.parametrize("goal", GOALS)
def test_full_batches_for_right_guesses_have_the_closed_form(goal):
    mu = 2 * stats.norm.ppf(goal)
    plan = _plan(right_guesses=goal)
    assert plan.attack_bounds().right_guesses <= goal
    assert plan.attack_bounds().right_guesses == pytest.approx(goal, abs=1e-6)
    assert plan.noise_multiplier == pytest.approx(np.sqrt(60) / mu, rel=1e-6)
    assert plan.epsilon == pytest.approx(gaussian.exact_epsilon(mu, 1e-5), abs=1e-3)
    assert "stricter limit" not in plan.summary() + plan.statement()
    steps = _plan(right_guesses=goal, steps=None, noise_multiplier=20.0).steps
    assert steps == int(mu**2 * 20.0**2 * (1 + 1e-9))


@pytest.mark.parametrize("goal", slow_but(GOALS, 0.55))
def test_simulated_attacks_on_sampled_plans_stay_within_the_right_guesses(goal):
    plan = _plan(right_guesses=goal, batch_size=100, steps=20)
    run, rng = (plan.noise_multiplier, 0.1, 20), np.random.default_rng(1)
    scores = [_scores(*run, is_in, 100_000, rng) for is_in in (True, False)]
    measured = (1 + stats.ks_2samp(*scores).statistic) / 2
    bound = plan.attack_bounds().right_guesses
    assert bound - 0.005 < measured < bound + 0.005
    assert measured < goal
    # Epsilon binds: less noise is refused although guesses would allow it.
    limit = attack.full_batch_epsilon(goal, 1e-5)
    assert limit * (1 - 1e-4) < plan.epsilon <= limit
    said = ", but epsilon is the stricter limit: at most" in plan.summary()
    assert said == (goal - bound > 5e-4)
    assert said == ("epsilon is the stricter limit" in " ".join(plan.statement().split()))


@pytest.mark.parametrize("sampled", [{}, {"batch_size": 100, "accountant": "rdp"}])
@pytest.mark.parametrize("unknown", ["noise_multiplier", "steps"])
def test_right_guesses_cover_earlier_updates_searches_and_people(sampled, unknown):
    entry = Entry(100.0, 1.0, 50, unit="user")
    spent = Ledger((entry,)) + Ledger.selected((entry,), 3.0, 1e-6)
    about = ABOUT | {"unit": "user", "name": "counts"}
    spent = spent.with_release(epsilon=0.1, delta=1e-7, **about)
    solved = {"noise_multiplier": 15.0, "steps": 60} | sampled | {unknown: None}
    plan = _plan(**solved, right_guesses=0.7, unit="user", spent=spent)
    assert plan.attack_bounds().right_guesses <= 0.7
    assert plan.attack_bounds().right_guesses > 0.7 - (0.002 if unknown == "steps" else 1e-5) or (
        plan.epsilon > attack.full_batch_epsilon(0.7, 1e-5) * 0.99
    )
    # The plan's delta pays for search and mechanism too.
    left = plan.delta - 1e-6 - 1e-7
    assert plan.epsilon == pytest.approx(
        plan.ledger_at(plan.steps).composed_epsilon(left, plan.accountant)
    )
    assert tfdpx.PrivacyPlan.from_config(plan.get_config()) == plan


@pytest.mark.parametrize("noise", [0.05, 0.02, 1e-60, 0.0])
@pytest.mark.parametrize("probability", [0.01, 1.0])
def test_without_noise_to_speak_of_an_attack_may_be_right_every_time(noise, probability):
    runs = ((noise, probability, 1000),)
    bounds = attack.attack_bounds(runs, 1e-5, "example")
    assert (bounds.right_guesses, bounds.auc, bounds.mu) == (1.0, 1.0, np.inf)
    assert "right every time" in words.say("guesses", bounds, "image")


def test_a_plan_and_its_ledger_have_the_bounds_of_their_unit():
    plan = tfdpx.PrivacyPlan(1000, batch_size=100, steps=50, epsilon=2.0, delta=1e-5, unit="user")
    bounds = plan.attack_bounds()
    assert bounds.unit == "user"
    assert bounds.to_dict() == plan.ledger_at(50).attack_bounds(1e-5).to_dict()
    assert "whether one person was" in " ".join(plan.statement().split())
    assert Ledger().attack_bounds(1e-5).auc == pytest.approx(0.5, abs=1e-8)
    mixed = Ledger((Entry(5.0, 0.1, 5), Entry(5.0, 0.1, 5, unit="user")))
    assert mixed.attack_bounds(1e-5).auc == 1.0


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Ledger(is_complete=False).attack_bounds(1e-5), "spent on the weights is unknown"),
        (
            lambda: Ledger((Entry(1.0, 0.1, 5, False),)).attack_bounds(1e-5),
            "no plan drew .* of 5 up",
        ),
        (lambda: Ledger((SHUFFLED,)).attack_bounds(1e-5), "not Poisson sampled"),
        (lambda: Ledger((Entry(1.0, None, 5),)).attack_bounds(1e-5), "probability is unknown"),
        (lambda: Ledger().attack_bounds(), "delta"),
        (lambda: _bounds(1.0).true_positive_rate([0.5, 1.1]), r"lie in \[0, 1\]"),
        (lambda: _bounds(1.0).true_positive_rate(float("nan")), r"lie in \[0, 1\]"),
        (
            lambda: _plan(right_guesses=0.65, epsilon=2.0),
            "`epsilon` must be left out with `right_guesses`",
        ),
        (
            lambda: _plan(right_guesses=0.65, sampling="shuffle", batch_size=100),
            '`sampling` must be "poisson".*No bound',
        ),
        (
            lambda: _plan(right_guesses=60),
            "`right_guesses` must lie .* at most 60 times out of 100",
        ),
        (lambda: _plan(right_guesses=0.5), "`right_guesses` must lie"),
        (lambda: _plan(right_guesses=0.65, noise_multiplier=2.0), "Exactly one"),
        (
            lambda: _plan(right_guesses=0.65, spent=SPENT),
            "`right_guesses` must pay for `spent`",
        ),
    ],
)
def test_it_is_refused_by_name(call, text):
    with pytest.raises(ValueError, match=text):
        call()


@pytest.mark.parametrize("runs", [((1.0, 0.01, 1000),), ((0.5, 0.9, 3), (2.0, 1.0, 4))])
def test_the_profile_is_the_one_of_dp_accounting(runs):
    largest, deltas = accountants.privacy_profile(runs)
    epsilons = np.linspace(0.0, largest, 100)
    expected = accountants.composed(runs, "pld").get_delta(epsilons)
    np.testing.assert_allclose(deltas(epsilons), expected, rtol=1e-9, atol=1e-14)
