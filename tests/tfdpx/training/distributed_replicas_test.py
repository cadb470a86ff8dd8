"""Training on replicas and hosts: the same updates, the same noise, and refusals."""

import processes
import pytest


@pytest.mark.slow
def test_two_devices_update_like_one_and_draw_their_noise_once():
    processes.run_alone(
        "replica_cases.updates_agree",
        "replica_noise_cases.noise_is_drawn_once",
    )


@pytest.mark.slow
@pytest.mark.planted("each replica adds noise, or adds the sums once more")
def test_planted_bugs_in_the_noise_are_found():
    processes.run_alone("replica_noise_cases.planted_bugs_in_the_noise_are_found")


@pytest.mark.slow
def test_hosts_update_like_one_device_and_stop_if_they_hold_different_things():
    processes.run_workers(
        "replica_cases.updates_agree_with_and_without_jit",
        "replica_cases.hosts_must_hold_the_same",
    )


@pytest.mark.slow
def test_more_on_two_devices():
    processes.run_alone(
        "replica_cases.masks_are_drawn_for_each_replica",
        "replica_cases.keras_fit_agrees_with_ours",
        "replica_cases.batches_that_void_the_guarantee_are_refused",
    )


@pytest.mark.nightly
def test_views_and_people_on_two_devices():
    processes.run_alone(
        "replica_cases.augmented_updates_agree", "replica_cases.updates_on_people_agree"
    )
