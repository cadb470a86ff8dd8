"""Separate processes for tests on replicas: TensorFlow fixes its devices at the start."""

import importlib
import json
import os
import socket
import subprocess
import sys
import warnings


def run_alone(*cases, devices=2):
    """Runs cases, each "module.function" of this folder, in a process with logical CPU devices.

    A failure shows its stack trace.
    """
    _finish([_start(cases, {"LOGICAL_CPUS": str(devices)})])


def run_workers(*cases, count=2):
    """Runs cases in `count` processes that form a cluster."""
    _finish([_start(cases, {"TF_CONFIG": config}) for config in cluster(count)])


def cluster(count):
    """Returns the TF_CONFIG of each of `count` workers on free ports of loopback."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for listener in sockets:
        listener.close()
    return [
        json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
        for index in range(count)
    ]


def _start(cases, environment):
    return subprocess.Popen(
        [sys.executable, __file__, *cases],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _finish(processes):
    try:
        results = [p.communicate(timeout=300) for p in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (output, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0 and output.endswith("done\n"), errors[-5000:]


def _run(cases):
    """Runs cases in this process."""
    import tensorflow as tf

    warnings.simplefilter("ignore")
    if "TF_CONFIG" not in os.environ:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * int(os.environ["LOGICAL_CPUS"]),
        )
    for case in cases:
        module, function = case.split(".")
        getattr(importlib.import_module(module), function)()
    print("done")


if __name__ == "__main__":
    _run(sys.argv[1:])
