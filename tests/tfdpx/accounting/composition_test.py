"""Runs of different noise, sampling and clip compose as dp_accounting composes them."""

import dp_accounting
import pytest
from dp_accounting import pld

from tfdpx.accounting import Ledger
from tfdpx.accounting.ledger import Entry

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
