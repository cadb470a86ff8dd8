"""What `adversarial_test` runs in a process of its own, by `processes.run_alone`."""

import os
import sys
import warnings

import adversarial
import tensorflow as tf

BOUND = 1.0 + 1e-5


def updates():
    """Whole updates with and without a hostile example, on two replicas."""
    assert 0.5 < adversarial.on_two_replicas() <= BOUND


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    [device] = tf.config.list_physical_devices("CPU")
    count = int(os.environ["LOGICAL_CPUS"])
    configurations = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(device, configurations)
    globals()[sys.argv[1]]()
    print("done")
