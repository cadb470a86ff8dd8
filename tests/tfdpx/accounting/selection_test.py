"""The price of releasing the best of several runs."""

import math

import dp_accounting
import numpy as np
import pytest

from tfdpx.accounting import accountants, epsilon, selection
from tfdpx.accounting.ledger import Entry


def gaussians(sigma, steps, probability=1.0):
    return [Entry(sigma, probability, steps)]


def test_the_best_of_several_costs_more_than_one_and_less_than_their_sum():
    sigma, steps, mean = 12.0, 11, 10
    one = epsilon(sigma, 1.0, steps, 1e-5, "rdp")
    selected = selection.selection_epsilon(gaussians(sigma, steps), 1e-5, mean)
    assert one < selected < epsilon(sigma, 1.0, mean * steps, 1e-5, "rdp")
    assert selection.selection_epsilon(gaussians(sigma, steps), 1e-5, 100) > selected
    assert selection.selection_epsilon(gaussians(0.0, steps), 1e-5, 100) == math.inf


def test_the_papers_bound_is_met():
    # Theorem 2 of Papernot and Steinke at shape 1, for runs of rho = steps / (2 sigma^2).
    sigma, steps, mean, delta = 12.0, 11, 10, 1e-5
    rho = steps / (2 * sigma**2)
    orders = np.linspace(1.01, 200, 20_000)
    other = np.min((orders - 1) * rho + np.log(mean) / orders)
    bound = orders * rho + 2 * other + np.log(mean) / (orders - 1)
    converted = np.min(bound + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1))
    price = selection.selection_epsilon(gaussians(sigma, steps), delta, mean)
    assert price == pytest.approx(converted, rel=0.05)


def test_the_tail_of_the_noise_of_each_run_is_taken_off_delta():
    run = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(12.0), 11)
    search = dp_accounting.dp_event.RepeatAndSelectDpEvent(run, mean=1000, shape=1)
    judge = accountants.rdp_accountant().compose(search)
    left = 1e-5 * (1 - 1000 * accountants.RESERVED_SHARE)
    price = selection.selection_epsilon(gaussians(12.0, 11), 1e-5, 1000)
    assert price == pytest.approx(judge.get_epsilon(left), rel=1e-9)
    assert price > 1.001 * judge.get_epsilon(1e-5)


@pytest.mark.parametrize("entries", [gaussians(1.0, 11), gaussians(1.0, 200, 0.1)])
def test_the_noise_keeps_within_the_target(entries):
    entries = [*entries, Entry(5.0, 1.0, 1)]
    scale = selection.selection_scale(entries, 2.0, 1e-5, 20)
    scaled = [Entry(scale * e.noise_multiplier, e.sampling_probability, e.steps) for e in entries]
    spent = selection.selection_epsilon(scaled, 1e-5, 20)
    assert 1.995 < spent <= 2.0
    # The score costs, and the sampling probability is used.
    assert selection.selection_epsilon(scaled[:1], 1e-5, 20) < spent


def test_entries_without_exact_sampling_are_refused():
    for entry in (Entry(1.0, 0.1, 5, poisson_sampled=False), Entry(1.0, None, 5)):
        with pytest.raises(ValueError, match="`entries` must hold exact entries"):
            selection.selection_epsilon([entry], 1e-5, 10)


def test_runs_are_geometric():
    runs = [selection.draw_runs(5) for _ in range(4000)]
    assert min(runs) == 1
    assert np.mean(runs) == pytest.approx(5, rel=0.1)
    assert np.var(runs) == pytest.approx(20, rel=0.25)
    with pytest.raises(ValueError, match="`mean` must be a number above 1"):
        selection.draw_runs(1)
