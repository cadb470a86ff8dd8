"""What the private step says to layers and losses below it, for this thread or for a model.

The wrappers of `hook` read it: who sees every call of a layer, whether random numbers are frozen,
whether losses are of one replica, whose `fit` is running.
"""

import concurrent.futures
import contextlib
import threading
import weakref

import tensorflow as tf

_active = threading.local()
_drivers = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def recording(recorder):
    """Shows every operation called in this thread to `recorder.observe(operation, args, kwargs)`.

    `recording(None)` hides them from an outer recorder.
    """
    previous = getattr(_active, "recorder", None)
    _active.recorder = recorder
    try:
        yield recorder
    finally:
        _active.recorder = previous


def recorder():
    """The recorder that is active in this thread, or None."""
    return getattr(_active, "recorder", None)


@contextlib.contextmanager
def freeze_rng():
    """Within it, layers that hold a seed generator (such as dropout) run in inference mode.

    What they draw nevertheless is the same for all rows. For comparing one forward pass with
    another.
    """
    previous, _active.is_rng_frozen = is_rng_frozen(), True
    try:
        yield
    finally:
        _active.is_rng_frozen = previous


def is_rng_frozen():
    """Whether this thread is within `freeze_rng`."""
    return getattr(_active, "is_rng_frozen", False)


@contextlib.contextmanager
def driving(model, name):
    """Within it, `driver(model)` is `name`: who splits batches over replicas and runs the step."""
    previous = _drivers.get(model)
    _drivers[model] = name
    try:
        yield
    finally:
        _drivers[model] = previous


def driver(model):
    """Whose `fit` is running: "keras" or "tfdpx", None outside of both."""
    return _drivers.get(model)


@contextlib.contextmanager
def unscaled_losses():
    """Within it, losses are computed as if there were one replica."""
    _active.unscaled = True
    try:
        yield
    finally:
        _active.unscaled = False


def is_unscaled():
    """Whether this thread is within `unscaled_losses`."""
    return getattr(_active, "unscaled", False)


@contextlib.contextmanager
def masking_invalid():
    """Within it, a token that is in no table has an embedding of NaN, so its example counts zero.

    By itself TensorFlow ends the run, on CPUs.
    """
    previous, _active.is_masking = is_masking_invalid(), True
    try:
        yield
    finally:
        _active.is_masking = previous


def is_masking_invalid():
    """Whether this thread is within `masking_invalid`."""
    return getattr(_active, "is_masking", False)


@tf.autograph.experimental.do_not_convert
def eagerly(function, *args):
    """`function(*args)` in eager mode, also while a graph is being traced.

    In a thread of its own: `tf.init_scope` would leave the graph too, but it stops every tape in
    the thread, and gradients taken in it are silently zero.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function, *args).result()
