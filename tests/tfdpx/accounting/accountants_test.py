import csv
import math
import pathlib

import absl.logging
import dp_accounting
import numpy as np
import pytest
import rdp_precision
import scipy.optimize
import scipy.stats
from dp_accounting import pld
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpx.accounting import Ledger, accountants, epsilon, gaussian
from tfdpx.accounting.ledger import Entry

GOLDENS = pathlib.Path(__file__).parent / "accounting_goldens.csv"
TOLERANCE = {"rdp": 1e-4, "pld": 2e-3}


def read_goldens():
    with open(GOLDENS, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def matches(value, printed, accountant):
    """Returns whether `value` is the golden, which was printed to four significant digits."""
    half_unit = 0.5 * 10.0 ** (math.floor(math.log10(float(printed))) - 3)
    golden, error = float(printed), value - float(printed)
    above = rdp_precision.EXCESS * golden if accountant == "rdp" else 0.0
    slack = TOLERANCE[accountant] * golden + half_unit
    return -slack <= error <= slack + above


def run_of(row):
    return float(row["sigma"]), float(row["q"]), int(row["steps"]), float(row["delta"])


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("row", read_goldens(), ids=lambda row: f"sigma{row['sigma']}-q{row['q']}")
def test_goldens(row, accountant):
    golden = row[f"eps_{accountant}"]
    assert matches(epsilon(*run_of(row), accountant), golden, accountant)


@pytest.mark.planted("the accountant of another mechanism")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_goldens_reject_another_mechanism(accountant):
    row = read_goldens()[6]
    noise, probability, steps, delta = run_of(row)
    golden = row[f"eps_{accountant}"]
    for wrong in [
        (noise * 1.01, probability, steps, delta),
        (noise, probability * 1.01, steps, delta),
        (noise, probability, round(steps * 1.02), delta),
        (noise, probability, steps, delta * 1.1),
    ]:
        assert not matches(epsilon(*wrong, accountant), golden, accountant)


def test_rdp_at_a_large_sampling_probability():
    # 18.07 is the epsilon of all orders; without fractional ones it is 18.63.
    spent = epsilon(18.3, 0.77, 5200, 1e-5, "rdp")
    highest = 18.07 * (1 + rdp_precision.EXCESS_AT_LARGE_PROBABILITY)
    assert 18.06 < spent < highest + 0.01
    assert epsilon(18.3, 0.77, 5200, 1e-5, "pld") < 18.06


def test_an_order_that_is_left_out_is_not_logged(monkeypatch, caplog):
    def left_out(q, sigma, alpha):  # As dp_accounting 0.6 does if an order does not converge.
        absl.logging.warning("alpha=%f failed to converge. Excluding this order from it.", alpha)
        return math.inf

    monkeypatch.setattr(rdp_privacy_accountant, "_compute_log_a_frac", left_out)
    spent = accountants.composed([(18.3, 0.77, 5200)], "rdp").get_epsilon(1e-5)
    assert spent == pytest.approx(18.63, abs=0.01)
    absl.logging.warning("of a user")
    assert [entry.getMessage() for entry in caplog.records] == ["of a user"]


@pytest.mark.parametrize("noise, steps", [(0.85, 1), (20.0, 206), (6.0, 3)])
def test_pld_without_sampling_is_the_exact_gaussian(noise, steps):
    delta, mu = 1e-5, math.sqrt(steps) / noise

    def excess(epsilon):  # Balle and Wang 2018, Theorem 8.
        cdf = scipy.stats.norm.cdf
        return cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * cdf(-mu / 2 - epsilon / mu) - delta

    exact = scipy.optimize.brentq(excess, 0, 50)
    assert epsilon(noise, 1.0, steps, delta, "pld") == pytest.approx(exact, rel=1e-4)
    assert epsilon(noise, 1.0, steps, delta, "rdp") > exact


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_edges(accountant):
    assert epsilon(1.0, 0.1, 0, 1e-5, accountant) == 0.0
    assert accountants.composed_epsilon((), 1e-5, accountant) == 0.0
    assert epsilon(0.0, 0.1, 0, 1e-5, accountant) == 0.0
    assert epsilon(0.0, 0.1, 1, 1e-5, accountant) == math.inf
    assert epsilon(0.0, 1.0, 1, 1e-5, accountant) == math.inf
    nearly_all = epsilon(2.0, 1 - 1e-9, 5, 1e-5, accountant)
    assert epsilon(2.0, 1.0, 5, 1e-5, accountant) == pytest.approx(nearly_all, rel=1e-3)


@pytest.mark.parametrize("noise, probability", [(1e4, 1e-6), (5e5, 0.05)])
def test_a_loss_too_small_for_rdp_is_an_error(noise, probability):
    # dp_accounting refuses the first as negative, and returns epsilon 0 for the second.
    with pytest.raises(ValueError, match="'rdp' cannot resolve so small a privacy loss"):
        epsilon(noise, probability, 1000, 1e-5, "rdp")


def test_pld_grid_follows_the_loss():
    # 100,000 steps with a loss of 1e-4 each, for which a grid of 1e-4 gives 0.1058, 8% too much.
    probability, noise, steps, delta = 1e-3, 10.0, 100_000, 1e-5
    # So small a loss equals the loss of a Gaussian of the same chi-squared divergence.
    loss = probability * math.sqrt(math.expm1(1 / noise**2))
    gaussian = epsilon(1 / loss, 1.0, steps, delta, "pld")
    spent = epsilon(noise, probability, steps, delta, "pld")
    assert gaussian * 0.999 < spent < gaussian * 1.006 < 0.1


@pytest.mark.parametrize(
    "arguments, name",
    [
        ((-1.0, 0.1, 1, 1e-5), "noise_multiplier"),
        ((math.nan, 0.1, 1, 1e-5), "noise_multiplier"),
        ((1.0, 0.0, 1, 1e-5), "sampling_probability"),
        ((1.0, 1.1, 1, 1e-5), "sampling_probability"),
        ((1.0, 0.1, 1.5, 1e-5), "steps"),
        ((1.0, 0.1, 1, 0.0), "delta"),
        ((1.0, 0.1, 1, 1e-5, "moments"), "accountant"),
    ],
)
def test_errors_name_argument_and_value(arguments, name):
    with pytest.raises(ValueError, match=f"Argument `{name}` .*Received: {name}="):
        epsilon(*arguments)


def test_at_tiny_deltas_pld_gives_way_to_rdp():
    """PLD returns 5.84 at 1e-12, and infinity below 1e-15: the FFT rounds."""
    for delta, wanted in ((1e-11, 3.039), (1e-12, 3.247)):
        assert epsilon(1.0, 0.001, 100_000, delta) == pytest.approx(wanted, rel=1e-3)
    assert epsilon(1.0, 0.001, 100_000, 1e-8) == pytest.approx(2.2525, rel=1e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_largest_value_of_the_noise_is_taken_off_delta(accountant):
    """The reserved share of delta is too small at little noise: the tail adds 4.3e-6 to 1e-5."""
    run = (0.3334, 0.01, 1000)
    added = gaussian.added_delta(*run[:2], 10**9, run[2], gaussian.LARGEST_RADIUS)
    assert 4e-6 < added < 5e-6
    left = 1e-5 * (1 - accountants.RESERVED_SHARE / 2) - added
    wanted = accountants.composed([run], accountant).get_epsilon(left)
    assert epsilon(*run, 1e-5, accountant) == pytest.approx(wanted, rel=1e-9)
    assert epsilon(0.19, 0.01, 1000, 1e-5, accountant) == math.inf
    assert epsilon(1.0, 0.001, 100_000, 1e-16, accountant) == math.inf


DELTA = 1e-5
RUNS = [(1.0, 0.05, 300), (4.0, 0.3, 100), (2.0, 1.0, 3), (0.7, 0.01, 50)]


def composed(runs, accountant):
    """Composes the events one after another, only by dp_accounting."""
    for sigma, probability, steps in runs:
        event = dp_accounting.PoissonSampledDpEvent(
            probability, dp_accounting.GaussianDpEvent(sigma)
        )
        accountant.compose(event, steps)
    return accountant.get_epsilon(DELTA)


@pytest.mark.slow
def test_a_ledger_of_unlike_entries_is_their_composition():
    ledger = Ledger(tuple(Entry(*run) for run in RUNS))
    wanted = composed(RUNS, pld.PLDAccountant())
    assert ledger.epsilon(DELTA) == pytest.approx(wanted, rel=3e-3)
    wanted = composed(RUNS, dp_accounting.rdp.RdpAccountant())
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(wanted, rel=0.02)
    halves = [Entry(s, q, part) for s, q, n in RUNS for part in (n // 2, n - n // 2)]
    assert Ledger(tuple(halves)).epsilon(DELTA) == ledger.epsilon(DELTA)
