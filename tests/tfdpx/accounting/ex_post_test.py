"""The probability that a run's loss exceeds the epsilon of each conversion, as in individual.md.

The oracle is the normal distribution: the loss of one full-batch Gaussian of mu = fraction / sigma
is N(mu^2 / 2, mu^2).
"""

import pytest
from scipy import stats

from tfdpx.accounting import PrivacyPlan
from tfdpx.accounting.individual import Losses, individual_epsilon


def exceeded(conversion, mu, delta):
    """Returns the probability that the loss exceeds epsilon, divided by delta."""
    if conversion == "improved, from RDP":
        losses = Losses("improved", full_batch=False)
        [epsilon] = losses.epsilons(losses.of_step([mu], 1.0, 1.0), delta)
    else:
        plan = PrivacyPlan(100, batch_size=100, steps=1, noise_multiplier=1.0, delta=delta)
        # The improved conversion is exact for full batches.
        [epsilon] = individual_epsilon([mu], plan, conversion=conversion)
    return stats.norm.sf(epsilon, mu**2 / 2, mu) / delta


@pytest.mark.parametrize(
    "conversion, multiples",
    [
        ("improved", [5.283, 9.341, 14.582, 39.437]),
        ("improved, from RDP", [1.056, 2.194, 3.648, 10.656]),
    ],
)
def test_delta_does_not_bound_the_tail_of_the_loss(conversion, multiples):
    ratios = [exceeded(conversion, mu, 1e-5) for mu in (1.0, 0.5, 0.3, 0.1)]
    assert ratios == pytest.approx(multiples, abs=2e-3)


def test_of_mironovs_conversion_it_does():
    for mu in (1.0, 0.3, 0.03):
        for delta in (1e-3, 1e-8):
            assert exceeded("mironov", mu, delta) < 0.2
