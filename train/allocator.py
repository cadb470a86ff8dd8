"""Keeps the C library from giving memory back to the kernel between the operations of a step.

A step on a CPU frees and allocates the same tensors in every microbatch. By default glibc returns
most of the memory that the threads of `fit` free to the kernel, and the kernel fills each page with
zeros before it gives it back. A private update of 64 images lost half of its time because of this
(see docs/benchmark.md).
"""

import ctypes
import functools
import os

# `mallopt`'s numbers for its parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {
    _TRIM_THRESHOLD: 2**31 - 1,  # Bytes that may stay free at the end of a heap: the maximum.
    _TOP_PAD: 2**26,  # Bytes, the size of a thread's heap: an empty heap is kept.
    _MMAP_MAX: 0,  # Nothing is allocated outside of the heaps: that returns when freed.
    # Few heaps: each keeps its own free memory.
    _ARENA_MAX: max(2, (os.cpu_count() or 1) // 4),
}
# If one of these is set, the user's choice is kept.
_VARIABLES = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_TRIM_THRESHOLD_",
)


@functools.cache
def keep_freed_memory():
    """Makes this process keep the memory that it frees for its next use.

    The process then holds its peak memory until it ends. Nothing changes if the C library is not
    glibc, or if the user has set one of glibc's environment variables for this, such as
    `MALLOC_TRIM_THRESHOLD_`.

    Programs call it before they train; further calls do nothing.
    Threads that already have a heap keep it.

    Returns:
        Bool, whether freed memory is kept now.
    """
    if any(name in os.environ for name in _VARIABLES):
        return False
    try:
        library = ctypes.CDLL(None)
        mallopt = library.mallopt if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # Windows has no library of the process itself.
        return False
    if mallopt is None:
        return False
    return all([mallopt(parameter, value) == 1 for parameter, value in _SETTINGS.items()])
