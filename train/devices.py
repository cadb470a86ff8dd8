"""Chooses where a run trains: on one device, all devices of a host, several hosts, or a TPU."""

import contextlib
import json
import os

import keras
import tensorflow as tf
from absl import flags

from tfdpx._keras import lora
from tfdpx.account import copy_weights
from tfdpx.sampling.shards import check_divides
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.startup import keep_freed_memory
from tfdpx.training.distributed import agree

KINDS = ("auto", "cpu", "mirrored", "multiworker", "tpu")

_STRATEGY = flags.DEFINE_enum(
    "strategy",
    "auto",
    KINDS,
    "Devices to train on. mirrored: all GPUs of this host, or its --cpu_devices. multiworker: the "
    "hosts in the environment variable TF_CONFIG; each runs this command with the same flags and a "
    "--workdir that all can read. auto: a TPU, several hosts or several GPUs, if available.",
)
_TPU = flags.DEFINE_string(
    "tpu", None, 'Name of the TPU; "local" for the TPU of a Cloud TPU VM. Implies --strategy=tpu.'
)
_CPU_DEVICES = flags.DEFINE_integer(
    "cpu_devices", 1, "Divide the CPU into this many devices, to try a strategy.", lower_bound=1
)


def from_flags():
    """Returns the `tf.distribute.Strategy` for the flags --strategy, --tpu and --cpu_devices.

    Call this function before TensorFlow computes anything. It also calls
    `startup.keep_freed_memory`.

    Raises:
        UserError: If the devices do not exist, or TF_CONFIG is missing or invalid.
    """
    keep_freed_memory()
    return make(_STRATEGY.value, _TPU.value, _CPU_DEVICES.value)


def make(kind, tpu=None, cpu_devices=1):
    """Returns a strategy like `from_flags`, but takes arguments instead of flags.

    Args:
        kind: One of `KINDS`.
        tpu: Optional name of a TPU.
        cpu_devices: Int, the number of logical devices into which the CPU is split.
    """
    if tpu is not None and kind not in ("auto", "tpu"):
        raise UserError(f"Flag --tpu={tpu} needs --strategy=tpu. Received: --strategy={kind}.")
    workers, gpus = _workers(), tf.config.list_physical_devices("GPU")
    if tpu is not None or (kind == "auto" and tf.config.list_physical_devices("TPU")):
        kind = "tpu"
    elif kind == "auto" and len(workers) > 1:
        kind = "multiworker"
    elif kind == "auto" and max(len(gpus), cpu_devices) > 1:
        kind = "mirrored"
    if kind == "tpu":
        return _connect_tpu(tpu or "local")
    if cpu_devices > 1:
        [cpu] = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration()] * cpu_devices
        tf.config.set_logical_device_configuration(cpu, parts)
    if kind == "cpu":
        tf.config.set_visible_devices([], "GPU")
    if kind == "mirrored":
        devices = tf.config.list_logical_devices("GPU" if gpus else "CPU")
        return tf.distribute.MirroredStrategy([device.name for device in devices])
    if kind == "multiworker":
        if not workers:
            raise UserError(
                "Flag --strategy=multiworker needs the environment variable TF_CONFIG, such as "
                '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", '
                '"index": 0}}, with another index on each host. It is not set.'
            )
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def _workers():
    """Returns the addresses in TF_CONFIG, in order; an empty list if it is not set."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return []
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        if not {"chief", "worker"} >= set(cluster):
            raise ValueError("it may list a chief and workers only")
        if not 0 <= int(task["index"]) < len(cluster[task["type"]]):
            raise ValueError("its task must be one of them")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "The environment variable TF_CONFIG is no valid JSON of a cluster and a task: "
            f"{error!r}. Received: {text}"
        ) from error
    return [*cluster.get("chief", []), *cluster.get("worker", [])]


def _connect_tpu(name):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if name != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        raise UserError(
            f"Cannot use the TPU {name!r}: {error} Name it with --tpu, install the TensorFlow for "
            "TPUs on a Cloud TPU VM, or choose another --strategy."
        ) from error


def is_chief(strategy):
    """Returns whether this process writes checkpoints, events and the final model."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return True
    resolver = strategy.cluster_resolver
    if resolver.task_type == "chief":
        return True
    return "chief" not in resolver.cluster_spec().jobs and not resolver.task_id


def check_batch_size(strategy, batch_size):
    """Raises UserError unless a batch divides evenly among replicas. The error suggests sizes."""
    with checking_flags():
        check_divides(strategy.num_replicas_in_sync, batch_size, "examples of --batch_size")


@contextlib.contextmanager
def chief_first(strategy, settings):
    """Context manager in which the chief, the first host, runs the block before the other hosts.

    For example, the chief can write files that the other hosts then read.

    Args:
        strategy: The `tf.distribute.Strategy`.
        settings: Dict of JSON values. All hosts must have the same settings.

    Yields:
        Function without arguments, to call after the block. It returns an int of 128 secret random
        bits. The chief draws them, and all hosts get the same int.

    Raises:
        UserError: If the hosts have different settings.
    """

    def meet():
        with checking_flags():
            return agree(strategy, None, {"flags": settings})

    chief = is_chief(strategy)
    entropy = None if chief else meet()
    yield lambda: entropy
    if chief:
        entropy = meet()


def on_one_device(model):
    """Returns a copy of a Functional or Sequential model that belongs to no strategy.

    The copy has the same weights. It is not compiled and has no optimizer.

    Args:
        model: `keras.Model`, built under any strategy.
    """
    # Keras may also compile the clone of a compiled model.
    bare = keras.Model(model.inputs, model.outputs, name=model.name)
    copy = keras.models.clone_model(bare)
    lora.enable_as(bare, copy)
    copy_weights(bare, copy)
    return copy
