"""Training on replicas and on hosts: the same updates, the same noise, and what is refused."""

import processes
import pytest

UPDATES = [
    "replica_cases.updates_agree_without_jit",
    pytest.param("replica_cases.updates_agree_with_jit", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", UPDATES)
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_updates_metrics_and_all_reduces_on_devices(devices, case):
    processes.run_alone(case, devices)


@pytest.mark.parametrize("case", UPDATES)
def test_updates_metrics_and_all_reduces_on_two_hosts(case):
    processes.run_workers(case)


@pytest.mark.parametrize(
    "case",
    [
        "replica_cases.augmented_updates_agree",
        "replica_cases.masks_are_drawn_for_each_replica",
        "replica_cases.keras_fit_agrees_with_ours",
        "replica_cases.what_would_void_the_guarantee_is_refused",
        "replica_noise_cases.planted_bugs_in_the_noise_are_found",
    ],
)
def test_on_two_devices(case):
    processes.run_alone(case)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_noise_is_drawn_once(devices):
    processes.run_alone("replica_noise_cases.noise_is_drawn_once", devices)


def test_hosts_that_hold_different_things_stop():
    processes.run_workers("replica_cases.hosts_must_hold_the_same")
