"""Keeps the C library from giving memory back to the kernel between the operations of a step.

A step on a CPU frees and asks for the same tensors in every pass. By default glibc returns most of
what the threads of `fit` free to the kernel, and each tensor comes back as pages that the kernel
has to fill with zeros first: a private update of 64 images so lost half of its time (see
docs/benchmark.md).
"""

import ctypes
import functools
import os

# `mallopt`'s numbers for its parameters, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = {
    _TRIM_THRESHOLD: 2**31 - 1,  # Bytes that may stay free at the end of a heap: the most there is.
    _TOP_PAD: 2**26,  # Bytes, as many as a thread's heap has: an empty one stays.
    _MMAP_MAX: 0,  # No piece stands outside of the heaps: those go back as they are freed.
    # A heap for every thread would keep the free memory of each.
    _ARENA_MAX: max(2, (os.cpu_count() or 1) // 4),
}
# Where one of these is set, the user has decided.
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
    """Makes what this process frees stay with it for its next use.

    So a process keeps what it held at its peak until it ends. Nothing is changed where the C
    library is not glibc, nor where the user has set one of glibc's environment variables for this,
    such as `MALLOC_TRIM_THRESHOLD_`.

    The first private `fit` or `train_on_batch` of a process calls it; further calls do nothing.
    Threads that have a heap of their own by then keep it.

    Returns:
        Bool: whether it is so now.
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
