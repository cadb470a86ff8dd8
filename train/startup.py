"""Imports TensorFlow quietly, and lets a process keep the memory that it frees.

Programs import this module first. Before TensorFlow reads its log settings, it writes messages
about processors and drivers to the standard error; this module hides them. To see all messages, set
`TF_CPP_MIN_LOG_LEVEL=0` in the environment.

A step on a CPU frees and allocates the same tensors in every microbatch. By default, when the
threads of `fit` free memory, glibc returns most of it to the kernel. The kernel then fills each
page with zeros before the process gets the page again. Without `keep_freed_memory`, this took half
of the time of a private update of 64 images (see docs/benchmark.md).
"""

import ctypes
import logging
import os
import platform
import tempfile

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# The numbers of `mallopt`'s parameters are from glibc's malloc.h.
_MALLOPT = {
    -1: 2**31 - 1,  # M_TRIM_THRESHOLD: the free bytes that may stay at the end of a heap.
    -2: 2**26,  # M_TOP_PAD: the bytes of a thread's heap, so large that an empty heap is kept.
    -4: 0,  # M_MMAP_MAX: no allocations outside of heaps, as the kernel gets them back when freed.
    -8: max(2, (os.cpu_count() or 1) // 4),  # M_ARENA_MAX: few heaps, as each keeps free memory.
}


def keep_freed_memory():
    """Makes this process keep and reuse the memory that it frees.

    The process then holds its peak memory until it ends. Nothing changes if the C library is not
    glibc, or if the user has set one of glibc's environment variables for this, for example
    `MALLOC_TRIM_THRESHOLD_`.

    Call this function before the training, because it does not affect threads that already have a
    heap. Further calls change nothing.

    Returns:
        Bool, whether the process keeps freed memory.
    """
    is_set = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if is_set or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all([mallopt(*setting) == 1 for setting in _MALLOPT.items()])


def _import_tensorflow():
    """Imports TensorFlow, and shows all of its messages if the import fails."""
    with tempfile.TemporaryFile() as notices:
        stderr = os.dup(2)
        os.dup2(notices.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            notices.seek(0)
            os.write(stderr, notices.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


if os.environ[_LEVEL] == "3":
    _import_tensorflow()
    # TensorFlow warns if a function is traced for several shapes. The programs need several shapes.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
