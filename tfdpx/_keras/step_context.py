"""Settings of the private step for layers and losses that the step calls, by thread or by model.

The wrappers of `hook` read the settings: the recorder that sees every call of a layer, whether
random numbers are frozen, whether losses are for one replica, and which `fit` is running.
"""

import concurrent.futures
import contextlib
import threading
import weakref

import tensorflow as tf


class _Active(threading.local):
    recorder = converters = next_key = constants = None
    is_rng_frozen = is_unscaled = is_masking = False


active = _Active()
_drivers = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def setting(name, value):
    """Context manager that sets an attribute of `active` in this thread, and restores it."""
    previous = getattr(active, name)
    setattr(active, name, value)
    try:
        yield value
    finally:
        setattr(active, name, previous)


def recording(recorder):
    """Context manager in which `recorder` sees every call of a Keras operation in this thread.

    In place of each call, `recorder.observe(operation, args, kwargs)` runs. `recording(None)` hides
    the calls from an outer recorder.
    """
    return setting("recorder", recorder)


def recorder():
    """Returns the active recorder of this thread, or None."""
    return active.recorder


def freeze_rng():
    """Context manager that puts layers with a seed generator (dropout) in inference mode.

    If a layer still draws random numbers, all rows get the same ones. In this way, one forward pass
    can be compared with another.
    """
    return setting("is_rng_frozen", True)


def is_rng_frozen():
    """Returns whether this thread is within `freeze_rng`."""
    return active.is_rng_frozen


@contextlib.contextmanager
def driving(model, name):
    """Context manager in which `driver(model)` returns `name`, "keras" or "tfdpx"."""
    previous = _drivers.get(model)
    _drivers[model] = name
    try:
        yield
    finally:
        _drivers[model] = previous


def driver(model):
    """Returns which `fit` is running: "keras" or "tfdpx", None outside of both."""
    return _drivers.get(model)


def unscaled_losses():
    """Context manager in which losses are computed as if there were one replica."""
    return setting("is_unscaled", True)


def is_unscaled():
    """Returns whether this thread is within `unscaled_losses`."""
    return active.is_unscaled


def masking_invalid():
    """Context manager in which the embedding of an unknown token is NaN.

    The example with the token then counts as zero. Without this setting, TensorFlow ends the run
    with an error on CPUs.
    """
    return setting("is_masking", True)


def is_masking_invalid():
    """Returns whether this thread is within `masking_invalid`."""
    return active.is_masking


@tf.autograph.experimental.do_not_convert
def eagerly(function, *args):
    """Returns `function(*args)` in eager mode, also while a graph is being traced.

    The function runs in a new thread. `tf.init_scope` would also leave the graph, but it stops
    every gradient tape of the thread, and gradients inside of it are silently zero.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function, *args).result()
