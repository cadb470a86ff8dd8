"""Released statistics: near the truth, and as private as promised."""

import math

import numpy as np
import pytest

from tfdpx.accounting import Ledger
from tfdpx.accounting import individual_statistics as module
from tfdpx.accounting.individual_statistics import release_statistics
from tfdpx.accounting.ledger import Entry


def values(count):
    return np.clip(np.random.default_rng(0).lognormal(0, 0.6, count), 0, 8)


def test_statistics_are_within_two_percent():
    x, errors, noise_multiplier = values(1437), [], 5.0
    for seed in range(5):
        report = release_statistics(x, 8.0, 1e-5, noise_multiplier, seed=seed)
        assert release_statistics(x, 8.0, 1e-5, noise_multiplier).mean != report.mean
        true = [x.mean(), *np.quantile(x, list(report.quantiles))]
        errors.append(np.abs([report.mean, *report.quantiles.values()] / np.array(true) - 1))
    assert np.mean(errors, axis=0).max() < 0.02
    expected = Ledger((Entry(noise_multiplier, 1.0, 24),)).epsilon(1e-5)
    assert report.epsilon == report.total_epsilon == expected
    before = Ledger((Entry(2.0, 0.1, 100),))
    total = release_statistics(x, 8.0, 1e-5, noise_multiplier, before=before).total_epsilon
    assert before.epsilon(1e-5) < total < before.epsilon(1e-5) + expected


def looks(monkeypatch, x, steps=3, shares=(0.2, 0.5, 0.9)):
    """Returns the mean and the counts below thresholds that do not depend on `x`."""
    counts = []

    def at_fixed(share_below, shares, bound, steps):
        for step in range(steps):
            counts.append(share_below(np.linspace(1, 7, len(shares)) + step / 7))
        return shares

    monkeypatch.setattr(module, "_quantiles", at_fixed)
    mean = release_statistics(x, 8.0, 1e-5, 1e-12, quantiles=shares, steps=steps).mean
    return mean, np.array(counts)


def test_an_example_changes_a_release_by_the_sensitivity_at_most(monkeypatch):
    count, bound = 40, 8.0
    x = values(count)
    for value in (0.0, 3.0, 8.0, 100.0, -5.0):
        # An absent example adds nothing to either sum, at the same public number of examples.
        x[0] = value
        mean, below = looks(monkeypatch, x)
        rest_mean, rest_below = looks(monkeypatch, x[1:])
        with_it = (mean - bound / 2) * count, (below - 0.5) * count
        without = (rest_mean - bound / 2) * (count - 1), (rest_below - 0.5) * (count - 1)
        assert abs(with_it[0] - without[0]) <= bound / 2 + 1e-9
        change = np.linalg.norm(with_it[1] - without[1], axis=1)
        np.testing.assert_allclose(change, math.sqrt(3) / 2)


def test_noise_has_the_deviation_that_is_paid_for(monkeypatch):
    x, sigma = values(50), 3.0
    means, below = [], []
    for seed in range(1500):
        released = []
        monkeypatch.setattr(
            module,
            "_quantiles",
            lambda f, s, b, n, released=released: released.append(f(np.ones(2))) or s,
        )
        means.append(release_statistics(x, 8.0, 1e-5, sigma, (0.3, 0.6), seed=seed).mean)
        below.append(released[0])
    # Four releases of sensitivity bound / 2 over 50, and counts of sensitivity sqrt(2) / 2.
    inner = np.array(means)
    inner = inner[(inner > 0) & (inner < 8)]
    assert np.std(inner) == pytest.approx(sigma / 2 * 4 / 50, rel=0.08)
    deviation = sigma * math.sqrt(2) / 2 / 50
    for deviation_of in np.std(below, axis=0):
        assert deviation_of == pytest.approx(deviation, rel=0.08)
        assert not deviation_of == pytest.approx(deviation * 2 / 3, rel=0.3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bound": 0.0}, "`bound` must be positive and finite"),
        ({"noise_multiplier": 0.0}, "`noise_multiplier` must be a finite number > 0"),
        ({"delta": 1.0}, "`delta` must lie strictly"),
        ({"steps": 0}, "`steps` must be a positive integer"),
        ({"quantiles": (0.5, 1.0)}, "`quantiles` must be a tuple"),
        ({"values": [1.0, math.nan]}, "`values` must be finite"),
    ],
)
def test_unfit_arguments_are_refused(change, message):
    arguments = {"values": [1.0, 2.0], "bound": 8.0, "delta": 1e-5, "noise_multiplier": 5.0}
    with pytest.raises(ValueError, match=message):
        release_statistics(**{**arguments, **change})
