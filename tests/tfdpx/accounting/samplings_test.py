import math

import dp_accounting
import pytest
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant

from tfdpx.accounting import epsilon
from tfdpx.accounting.groups import Sampling

NOISE, PROBABILITY, STEPS, DELTA = 3.0, 0.1, 40, 1e-5
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def spent(sampling, accountant="rdp", noise=NOISE, probability=PROBABILITY, steps=STEPS):
    return sampling.epsilon(noise, probability, steps, DELTA, accountant)


def gaussians(noise, times, accountant):
    """Returns dp_accounting's epsilon of so many full-batch Gaussians."""
    judge = {
        "rdp": rdp_privacy_accountant.RdpAccountant,
        "pld": pld_privacy_accountant.PLDAccountant,
    }[accountant]()
    judge.compose(dp_accounting.GaussianDpEvent(noise), times)
    return judge.get_epsilon(DELTA)


@pytest.mark.parametrize("neighbours", ["add_or_remove_one", "zero_out"])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_poisson_is_what_a_plan_has(neighbours, accountant):
    result = spent(Sampling("poisson", neighbours), accountant)
    assert result == epsilon(NOISE, PROBABILITY, STEPS, DELTA, accountant)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("neighbours, noise", [("zero_out", NOISE), ("replace_one", NOISE / 2)])
def test_shuffled_batches_get_no_amplification(neighbours, noise, accountant):
    # 40 steps at a tenth of the data are four epochs, and each holds an example once.
    result = spent(Sampling("shuffle", neighbours), accountant)
    assert result == pytest.approx(gaussians(noise, 4, accountant), rel=1e-3)
    assert result > 1.5 * spent(Sampling("poisson"), accountant)


@pytest.mark.parametrize(
    "probability, steps, times",
    [(0.1, 41, 5), (0.3, 7, 3), (1 / 3, 6, 2), (1.0, 6, 6)],
)
def test_in_how_many_shuffled_batches_an_example_can_be(probability, steps, times):
    # The rest at the end of an epoch is dropped, for example 0.3 makes three batches an epoch.
    assert Sampling("shuffle").run(NOISE, probability, steps) == (NOISE, 1.0, times)


def test_fixed_sizes_are_judged_by_dp_accounting():
    judge = rdp_privacy_accountant.RdpAccountant(neighboring_relation=REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(NOISE / 2)
    judge.compose(dp_accounting.SampledWithoutReplacementDpEvent(1000, 100, gaussian), STEPS)
    result = spent(Sampling("without_replacement"))
    assert result == pytest.approx(judge.get_epsilon(DELTA), rel=1e-4)


@pytest.mark.parametrize(
    "name, neighbours, message",
    [
        ("poisson", "replace_one", "No accountant here covers Poisson sampling.*2 epsilon"),
        ("shuffle", "add_or_remove_one", "moves all later ones.*neighbours='zero_out'"),
        ("without_replacement", "add_or_remove_one", "of equal size.*'replace_one'"),
        ("without_replacement", "zero_out", "replaced examples.*'replace_one'"),
        ("with_replacement", None, "but no accountant for it.*'without_replacement'"),
        ("cyclic", None, "`sampling` must be one of"),
        ("poisson", "friends", "`neighbours` must be one of"),
    ],
)
def test_samplings_without_an_accountant_are_refused(name, neighbours, message):
    with pytest.raises(ValueError, match=message):
        Sampling(name, neighbours)
    with pytest.raises(ValueError, match="`accountant` must be one of .*'rdp'.*='pld'"):
        spent(Sampling("without_replacement"), "pld")


@pytest.mark.parametrize(
    "name, accountant",
    [("poisson", "pld"), ("poisson", "rdp"), ("shuffle", "pld"), ("without_replacement", "rdp")],
)
def test_delta_undoes_epsilon(name, accountant):
    sampling = Sampling(name)
    target = spent(sampling, accountant)
    delta = sampling.delta(NOISE, PROBABILITY, STEPS, target, accountant)
    assert delta == pytest.approx(DELTA, rel=1e-3)
    assert spent(sampling, steps=0) == 0.0 and spent(sampling, noise=0.0) == math.inf
