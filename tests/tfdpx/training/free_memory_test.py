"""Free memory, from made-up control groups and against what the system says."""

import psutil
import pytest
import tensorflow as tf

from tfdpx.training import _free_memory


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def second_version(folder, limit, used, droppable=0):
    write(
        folder,
        memory__max=limit,
        memory__current=used,
        memory__stat=f"anon 5\ninactive_file {droppable}",
    )


def test_the_tightest_of_nested_groups_counts(tmp_path):
    second_version(tmp_path / "job", 1000, 600, droppable=50)
    second_version(tmp_path / "job" / "step", 900, 300)
    second_version(tmp_path / "job" / "step" / "task", "max", 100)
    (tmp_path / "groups").write_text("0::/job/step/task\n")
    rooms = _free_memory.control_group_rooms(tmp_path / "groups", tmp_path)
    assert sorted(rooms) == [450, 600]


def test_the_first_version(tmp_path):
    write(
        tmp_path / "memory" / "job",
        memory__limit_in_bytes=1000,
        memory__usage_in_bytes=700,
        memory__stat="total_inactive_file 100",
    )
    (tmp_path / "groups").write_text("5:cpu:/job\n4:hugetlb,memory:/job\n0::/\n")
    assert _free_memory.control_group_rooms(tmp_path / "groups", tmp_path) == [400]


def test_a_container_that_sees_only_its_own_group(tmp_path):
    second_version(tmp_path, 1000, 1200)
    (tmp_path / "groups").write_text("0::/not/to/be/seen\n")
    assert _free_memory.control_group_rooms(tmp_path / "groups", tmp_path) == [0]


def test_a_system_without_control_groups(tmp_path):
    assert _free_memory.control_group_rooms(tmp_path / "none", tmp_path) == []


def test_the_host(monkeypatch):
    free = _free_memory.free_bytes("/job:localhost/replica:0/task:0/device:CPU:0")
    assert 0 <= free <= psutil.virtual_memory().total
    monkeypatch.setattr(_free_memory, "control_group_rooms", lambda: [12345])
    assert _free_memory.free_bytes("") == 12345


@pytest.fixture
def two_gpus(monkeypatch):
    [real] = tf.compat.v1.Session().list_devices()[:1]
    kinds = [("GPU", 0, 700), ("GPU", 1, 1000), ("TPU", 0, 5000)]
    known = [type(real)(f"/device:{kind}:{i}", kind, limit, 0) for kind, i, limit in kinds]

    class Session:
        def list_devices(self):
            return known

    monkeypatch.setattr(tf.compat.v1, "Session", Session)
    used = {"GPU:0": 900, "GPU:1": 300}
    monkeypatch.setattr(
        tf.config.experimental, "get_memory_info", lambda device: {"current": used[device]}
    )


def test_a_gpu(two_gpus):
    assert _free_memory.free_bytes("/job:localhost/replica:0/task:0/device:GPU:1") == 700
    assert _free_memory.free_bytes("/device:GPU:0") == 0


def test_devices_of_unknown_memory(two_gpus):
    for device in ("/device:TPU:0", "/device:GPU:7"):
        with pytest.raises(ValueError, match="Give an int"):
            _free_memory.free_bytes(device)
