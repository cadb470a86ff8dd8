"""Freed memory that stays with the process, measured by its page faults."""

import os
import platform
import subprocess
import sys

import pytest

from tfdpx.train import startup

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# A thread that takes and frees 150 MiB in pieces, like the passes of a step. It prints the result
# of `keep_freed_memory`, and the page faults of four rounds.
_ROUNDS = """
import ctypes, importlib.util, resource, sys, threading
import numpy as np

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: huge pages would hide faults.
spec = importlib.util.spec_from_file_location("startup", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
succeeded = module.keep_freed_memory()

def round():
    held = [np.ones(5 << 20, "uint8") for _ in range(30)]

def rounds():
    round()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        round()
    print(succeeded, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=rounds)
thread.start()
thread.join()
"""
_PAGES_OF_A_ROUND = (150 << 20) // os.sysconf("SC_PAGE_SIZE")


def rounds(**variables):
    """Returns the result of `keep_freed_memory`, and the page faults of a round per page."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    process = subprocess.run(
        [sys.executable, "-c", _ROUNDS, startup.__file__],
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "0", **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    succeeded, faults = process.stdout.split()[-2:]
    return succeeded, int(faults) / 4 / _PAGES_OF_A_ROUND


def test_a_thread_gets_its_freed_memory_back_without_new_pages():
    succeeded, share = rounds()
    assert succeeded == "True" and share < 0.01


def test_settings_of_the_user_are_left_alone():
    succeeded, share = rounds(MALLOC_TRIM_THRESHOLD_="131072")
    assert succeeded == "False" and share > 0.05
