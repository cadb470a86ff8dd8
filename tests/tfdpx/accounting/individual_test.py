"""Epsilon from norms: the paper's figures, closed forms, dp_accounting and a higher precision."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.accounting import IndividualAccountant, Ledger, PrivacyPlan, epsilon
from tfdpx.accounting.gaussian import (
    ORDERS,
    PAPER_ORDERS,
    divergences,
    epsilons,
    exact_epsilon,
    exact_epsilons,
)
from tfdpx.accounting.individual import individual_epsilon
from tfdpx.accounting.ledger import Entry

# CIFAR-10 of Yu et al. 2022: 50,000 images, 200 epochs of ceil(50,000 / 4,000) steps.
PAPER = PrivacyPlan(50_000, batch_size=4000, steps=2600, noise_multiplier=3.2, delta=1e-5)


@pytest.mark.parametrize("conversion, worst", [("mironov", 7.2465), ("improved", 6.5547)])
def test_the_worst_case_of_the_paper(conversion, worst):
    [spent] = individual_epsilon([1.0], PAPER, conversion=conversion)
    assert spent == pytest.approx(worst, abs=6e-5)


def reference(noise_multiplier, probability, steps, delta, orders):
    """Returns dp_accounting's RDP epsilon at these orders, with the improved conversion."""
    judge = rdp_privacy_accountant.RdpAccountant(list(map(int, orders)))
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    judge.compose(dp_accounting.PoissonSampledDpEvent(probability, event), steps)
    return judge.get_epsilon(delta * (1 - 1e-4))


@settings(max_examples=6)
@given(
    st.floats(0.05, 1.0),
    st.floats(0.7, 8.0),
    st.floats(0.01, 0.9),
    st.integers(1, 5000),
)
def test_a_constant_norm_is_less_sensitivity(fraction, sigma, probability, steps):
    plan = PrivacyPlan(
        10_000,
        batch_size=max(1, round(10_000 * probability)),
        steps=steps,
        noise_multiplier=sigma,
        delta=1e-5,
        accountant="rdp",
    )
    [spent] = individual_epsilon([fraction], plan)
    orders = [2, 3, 4, 5, 6, 8, 12, 16, 32, 64, 128, 256]
    expected = reference(sigma / fraction, plan.sampling_probability, steps, 1e-5, orders)
    assert spent <= expected * (1 + 1e-6)
    exact = epsilon(sigma / fraction, plan.sampling_probability, steps, 1e-5, "pld")
    assert spent >= exact * (1 - 3e-3)
    wanted = reference(sigma / fraction, plan.sampling_probability, steps, 1e-5, PAPER_ORDERS)
    assert spent <= wanted * (1 + 1e-6) and (spent >= wanted * (1 - 1e-6) or wanted < 0.2)


@pytest.mark.parametrize("order", [2, 40])
@pytest.mark.parametrize("fraction, probability", [(1.0, 0.08), (0.01, 1e-5)])
def test_divergences_have_no_rounding_where_losses_are_small(order, fraction, probability):
    from fractions import Fraction

    sigma = 2.0
    q, s = Fraction(probability), Fraction(sigma) / Fraction(fraction)
    excess = Fraction(0)
    for k in range(2, order + 1):
        x = Fraction(k * (k - 1)) / (2 * s * s)
        # exp(x) - 1 by its series, in rational numbers.
        term = expm1 = x
        for i in range(2, 60 if x < 10 else 900):
            term = term * x / i
            term = Fraction(term.numerator * 2**300 // term.denominator, 2**300)
            expm1 += term
        excess += math.comb(order, k) * (1 - q) ** (order - k) * q**k * expm1
    digits = excess.numerator * 10**60 // excess.denominator
    expected = (math.log1p(float(Fraction(digits, 10**60)))) / (order - 1)
    [[divergence]] = divergences([fraction], sigma, probability, np.array([order]))
    assert expected <= divergence <= expected * (1 + 1e-8)


def test_steps_of_different_norms_add_up():
    norms = np.random.default_rng(0).uniform(size=(3, 2))
    totals = individual_epsilon(norms, PAPER, delta=1e-6)
    for i in range(2):
        spent = sum(divergences([f], 3.2, 0.08, ORDERS)[0] for f in norms[:, i])
        [expected] = epsilons(spent[np.newaxis], ORDERS, 1e-6 * (1 - 1e-4), "improved")
        assert totals[i] == pytest.approx(expected)
    order = np.argsort(norms.max(axis=0))
    assert individual_epsilon(np.zeros([7, 2]), PAPER).tolist() == [0, 0]
    assert totals[order[0]] <= individual_epsilon(norms.max(axis=0)[order[:1]], PAPER)[0]


@pytest.mark.slow
def test_losses_of_many_norms_are_interpolated_from_above():
    plan = PrivacyPlan(1000, batch_size=80, steps=100, noise_multiplier=3.2, delta=1e-5)
    norms = np.append(np.random.default_rng(0).uniform(size=997) ** 2, [1.0, 0.002, 0.0])
    spent = individual_epsilon(norms, plan)[-30:]
    exact = individual_epsilon(norms[-30:], plan)
    assert (spent >= exact * (1 - 1e-9)).all() and (spent <= exact * 1.02 + 1e-6).all()


def test_full_batches_are_exact():
    plan = PrivacyPlan(100, batch_size=100, steps=9, noise_multiplier=6.0, delta=1e-5)
    mus = [0.001, 0.01, 0.3, 0.5, 1.0]
    spent = individual_epsilon([2 * mu for mu in mus[:-1]], plan)
    expected = [exact_epsilon(mu, 1e-5 * (1 - 1e-4)) for mu in mus[:-1]]
    np.testing.assert_allclose(spent, expected, rtol=1e-6, atol=1e-9)
    assert individual_epsilon([1.0], plan)[0] == pytest.approx(plan.epsilon, rel=1e-6)
    mixed = individual_epsilon(np.array([[1.0], [0.5], [0.1]]), plan)
    assert mixed[0] == pytest.approx(exact_epsilon(math.sqrt(1.26) / 6, 1e-5 * (1 - 1e-4)), 1e-6)
    assert exact_epsilons([0.0, math.inf], 1e-5).tolist() == [0.0, math.inf]


def test_unfit_arguments_are_refused():
    small = {"num_examples": 100, "batch_size": 10, "steps": 5, "delta": 1e-5}
    noiseless = PrivacyPlan(**small, noise_multiplier=0.0)
    shuffled = PrivacyPlan(**small, noise_multiplier=1.0, sampling="shuffle")
    for call, message in [
        (lambda: individual_epsilon([1.1], PAPER), "`norms` must lie in"),
        (lambda: individual_epsilon([math.nan], PAPER), "`norms` must lie in"),
        (lambda: individual_epsilon(0.5, PAPER), "`norms` must have shape"),
        (lambda: individual_epsilon([0.5], PAPER, conversion="best"), "`conversion` must be one"),
        (lambda: individual_epsilon([0.5], PAPER, delta=0.0), "`delta` must lie strictly"),
        (lambda: individual_epsilon([1.0], noiseless), "Poisson sampling and noise"),
        (lambda: IndividualAccountant(noiseless), "Poisson sampling and noise"),
        (lambda: IndividualAccountant(shuffled), "Poisson sampling and noise"),
        (lambda: IndividualAccountant(PAPER, rounding=0), "`rounding` must lie in"),
        (lambda: IndividualAccountant(PAPER, refreshes_per_epoch=0.5), "`refreshes_per_epoch`"),
        (lambda: IndividualAccountant(3), "`plan` must be a PrivacyPlan"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("rounding, levels", [(0.01, 100), (0.3, 4), (1, 1)])
def test_norms_are_rounded_to_so_many_values(rounding, levels):
    accountant = IndividualAccountant(PAPER, rounding)
    assert len(accountant.fractions) == levels and accountant.fractions[-1] == 1
    assert IndividualAccountant.from_config(accountant.get_config()).plan == PAPER


class Record:
    """A stand-in for an optimizer's record: steps of two examples at three levels, and a ledger."""

    def __init__(self, ledger):
        self._ledger = ledger

    def counts(self):
        return np.array([[10, 0, 0], [0, 4, 6]])

    def ledger(self):
        return self._ledger


@pytest.mark.slow
def test_updates_that_were_not_seen_count_in_full():
    plan = PrivacyPlan(1000, batch_size=80, steps=20, noise_multiplier=3.2, delta=1e-5)
    run_entry = Entry(3.2, 0.08, 10, run=1)

    def spending(*entries):
        accountant = IndividualAccountant(plan, rounding=1 / 3)
        accountant.attach(Record(Ledger(entries)))
        return accountant.epsilon()

    third, full = np.full(10, 1 / 3), np.ones(10)
    mixed = np.array([2 / 3] * 4 + [1] * 6)
    expected = individual_epsilon(np.stack([third, mixed], 1), plan)
    bound = Ledger((run_entry,)).epsilon(1e-5)
    np.testing.assert_allclose(spending(run_entry), np.minimum(expected, bound), rtol=1e-9)
    again = np.concatenate([np.stack([third, mixed], 1), np.stack([full, full], 1)])
    expected = individual_epsilon(again, plan)
    bound = Ledger((Entry(3.2, 0.08, 20),)).epsilon(1e-5)
    other_run = spending(run_entry, Entry(3.2, 0.08, 10, run=2))
    np.testing.assert_allclose(other_run, np.minimum(expected, bound), rtol=1e-9)
    unknown, certain = (Entry(3.2, rate, 10, poisson_sampled=False) for rate in (None, 1.0))
    np.testing.assert_array_equal(spending(run_entry, unknown), spending(run_entry, certain))
    other = spending(run_entry, Entry(50.0, 1.0, 3))
    assert (other > spending(run_entry)).all() and (other < expected).all()
    assert np.isinf(spending(run_entry, Entry(0.0, 1.0, 3))).all()
