"""How much memory is free: the host's, within what its control group allows, or the device's."""

import pathlib

import psutil
import tensorflow as tf


def free_bytes(device):
    """Bytes that new tensors on `device` may take, as of now.

    Args:
        device: String such as `"/device:GPU:0"`, as `tf.Variable.device` gives it. CPU means the
            host's memory.

    Returns:
        Int.

    Raises:
        ValueError: If TensorFlow does not tell how much memory such a device has.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type in (None, "CPU"):
        return min([psutil.virtual_memory().available, *control_group_rooms()])
    limits = [
        known.memory_limit_bytes
        for known in tf.compat.v1.Session().list_devices()
        if (known.device_type, tf.DeviceSpec.from_string(known.name).device_index)
        == (spec.device_type, spec.device_index)
    ]
    if spec.device_type != "GPU" or not limits:
        raise ValueError(
            'Argument `microbatch_size="auto"` needs to know how much memory the device has, which '
            f"TensorFlow does not tell. Received: device={device!r}. Give an int."
        )
    used = tf.config.experimental.get_memory_info(f"GPU:{spec.device_index}")["current"]
    return max(limits[0] - used, 0)


def control_group_rooms(proc="/proc/self/cgroup", mount="/sys/fs/cgroup"):
    """What each control group of this process has left, in bytes; containers are limited by them.

    Reads the files of Linux's version 2 and version 1 groups. Pages of files that can be dropped
    (`inactive_file`) count as free.

    Args:
        proc: Path of the list of this process's groups.
        mount: Path where the groups are mounted.

    Returns:
        List of ints, empty where nothing is limited.
    """
    proc = pathlib.Path(proc)
    if not proc.exists():
        return []
    rooms = []
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = pathlib.Path(mount), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = pathlib.Path(mount, "memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = pathlib.PurePosixPath(path)
        # A limit holds for all groups below it. In a container some paths are not to be seen.
        for folder in [group, *group.parents]:
            room = _room(root / folder.relative_to("/"), *names)
            rooms.extend([] if room is None else [room])
    return rooms


def _room(folder, limit_name, used_name, droppable_name):
    try:
        limit = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
        statistics = dict(line.split() for line in (folder / "memory.stat").open())
    except FileNotFoundError:
        return None
    if limit == "max":
        return None
    return max(int(limit) - used + int(statistics.get(droppable_name, 0)), 0)
