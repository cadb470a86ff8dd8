"""The epsilon of k rows together, against goldens of dp_accounting 0.6 and integrated densities."""

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import tfdpx
from tfdpx.accounting import Ledger, accountants, gaussian, group_epsilon
from tfdpx.accounting.ledger import Entry


def sampled_plan(**changed):
    defaults = {"num_examples": 1000, "batch_size": 100, "steps": 500, "noise_multiplier": 4.0}
    return tfdpx.PrivacyPlan(**defaults | {"delta": 1e-5} | changed)


def small_noise(**changed):
    defaults = {"num_examples": 10_000, "batch_size": 64, "steps": 782, "noise_multiplier": 1.0}
    return tfdpx.PrivacyPlan(**defaults | {"delta": 1e-6} | changed)


def integrated(noise, probability, k, delta):
    """Sums the hockey-stick divergences of one update on a grid, both ways; returns epsilon."""
    x = np.linspace(-12 * noise, k + 12 * noise, 400_001)
    drawn = scipy.stats.binom.pmf(np.arange(k + 1), k, probability)
    without = scipy.stats.norm.pdf(x, scale=noise)
    rows = sum(p * scipy.stats.norm.pdf(x, i, noise) for i, p in enumerate(drawn))

    def excess(epsilon):
        ways = (rows, without), (without, rows)
        return max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ways) * (
            x[1] - x[0]
        ) - delta * (1 - accountants.RESERVED_SHARE)

    return scipy.optimize.brentq(excess, 0.0, 100.0) if excess(0.0) > 0 else 0.0


@pytest.mark.parametrize("accountant", ["pld", "gdp", "zcdp", "rdp"])
def test_full_batches_have_k_times_the_sensitivity(accountant):
    runs = ((2.0, 1.0, 3), (5.0, 1.0, 8))
    ledger = Ledger(tuple(Entry(*run) for run in runs))
    mu = 4 * math.sqrt(3 / 2**2 + 8 / 5**2)
    delta = 1e-5 * (1 - accountants.RESERVED_SHARE)
    spent = group_epsilon(ledger, 4, delta=1e-5, accountant=accountant)
    if accountant == "rdp":
        louder = accountants.composed_epsilon(((2 / 4, 1.0, 3), (5 / 4, 1.0, 8)), 1e-5, "rdp")
        assert spent == pytest.approx(louder, rel=1e-9)
    else:
        convert = gaussian.zcdp_epsilon if accountant == "zcdp" else gaussian.exact_epsilon
        assert spent == pytest.approx(convert(mu, delta), rel=1e-9)


def test_goldens():
    plan = tfdpx.PrivacyPlan(1000, batch_size=1000, steps=1, noise_multiplier=1.0, delta=1e-5)
    for k, golden in [(1, 4.377), (2, 9.997)]:  # Two rows cost more than twice one.
        assert group_epsilon(plan, k) == pytest.approx(golden, abs=1e-3)
    for k, golden in [(1, 1.1995), (3, 3.937), (10, 15.464)]:
        assert group_epsilon(small_noise(), k) == pytest.approx(golden, rel=1e-3)
    for k, golden in [(2, 5.1770), (3, 8.3920), (10, 40.5957)]:
        spent = group_epsilon(sampled_plan(), k)
        assert golden < spent == pytest.approx(golden, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_one_update_is_what_densities_say(accountant):
    cases = [
        (1.0, 0.01, 2, 1e-6),
        (1.0, 0.3, 3, 1e-3),
        (3.0, 0.9, 3, 1e-6),
        (8.0, 0.5, 12, 1e-3),
    ]
    for noise, probability, k, delta in cases:
        true = integrated(noise, probability, k, delta)
        ledger = Ledger((Entry(noise, probability, 1),))
        spent = group_epsilon(ledger, k, delta=delta, accountant=accountant)
        assert spent >= true * (1 - 1e-6) > 0, (noise, probability, k, delta)
        if accountant == "pld":
            assert spent == pytest.approx(true, rel=5e-3, abs=1e-3)


@pytest.mark.slow
def test_of_few_and_of_more_rows():
    plan = sampled_plan()
    assert group_epsilon(plan, 0) == 0.0
    assert group_epsilon(plan, 1) == plan.epsilon
    spent = [group_epsilon(plan, k) for k in range(1, 5)]
    shares = [epsilon / k for k, epsilon in enumerate(spent, 1)]
    assert shares == sorted(set(shares))
    ledger = plan.ledger_at(plan.steps)
    assert group_epsilon(ledger, np.int64(3), delta=plan.delta) == spent[2]
    rdp = sampled_plan(accountant="rdp")
    assert group_epsilon(rdp, 1) == rdp.epsilon
    more = ledger + Ledger((Entry(3.0, 1.0, 1),))
    assert group_epsilon(more, 2, delta=plan.delta) > spent[1]
    assert group_epsilon(Ledger(), 3, delta=1e-5) == 0.0
    assert group_epsilon(Ledger((Entry(0.0, 0.1, 5),)), 2, delta=1e-5) == math.inf
    # One row may cost nothing at a large delta, but several do.
    cheap = Ledger((Entry(2.0, 1.0, 1),))
    assert group_epsilon(cheap, 1, delta=0.3) == 0.0 < group_epsilon(cheap, 8, delta=0.3)


def test_unfit_arguments_are_refused():
    plan, ledger = sampled_plan(), Ledger((Entry(4.0, 0.1, 5),))
    for source, k, arguments, message in [
        (plan, -1, {}, "Argument `k` must be an integer >= 0. Received: k="),
        (plan, True, {}, "Argument `k` must be an integer >= 0. Received: k="),
        (plan, 1001, {}, "k=1001. The plan has num_examples=1000"),
        (ledger, 2, {}, "Argument `delta` must"),
        (ledger, 2, {"delta": 1e-5, "accountant": "moments"}, "Argument `accountant` must"),
        (ledger, 2, {"delta": 1e-5, "accountant": "gdp"}, "are only for full batches"),
        (Ledger((Entry(4.0, None, 5),)), 2, {"delta": 1e-5}, "sampling probability is unknown"),
        (7.0, 2, {}, r"model\.optimizer\.ledger"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            group_epsilon(source, k, **arguments)
