"""How many examples a microbatch of the private step takes, where `microbatch_size` is no number.

None: those of least expected time. `"auto"`: the most that fit in memory; it is traced, not run,
for two small numbers of examples. Its peak grows linearly in examples, so two predictions give all
others. Which size is taken changes the memory and time of an update and nothing else: neither its
examples nor their clipping, so not its sensitivity.
"""

import math
import typing

import keras
import numpy as np
import scipy.stats
import tensorflow as tf
from absl import logging

from tfdpx._keras import model_internals, step_context
from tfdpx._warnings import warn
from tfdpx.per_example.cost_model import Cost, device_kind
from tfdpx.per_example.rows import Rows
from tfdpx.training import _free_memory, _graph_peak

AUTO = "auto"
FLOAT = 4  # Bytes.

# Examples of the two trial traces.
_TRIALS = (4, 8)

# Share of the free memory that the prediction may fill. Peaks measured on CPUs are 1.0 to 1.4 times
# the prediction, and 2.3 in eager mode, where Python keeps what a graph would free.
_SHARE, _EAGER_SHARE = 0.5, 0.3

# What an update holds besides a microbatch, in sizes of the trained weights: sums, noise, its
# random bits, the gradient. And in sizes of the batch: what is read ahead, and the copy with
# padding.
_WEIGHTS_HELD, _BATCHES_HELD = 4, 3


# Work of a row against its forward microbatch, and bytes moved for each number in outputs and
# weights: fitted to steps on two CPU cores. Launches a layer: on a GPU it is what the graph has,
# unmeasured.
_BACKWARD, _TRAFFIC, _WEIGHT_TRAFFIC = 3.5, 12, 10
_CALLS = {"cpu": 4, "accelerator": 60}
# Bytes of outputs and their gradients beyond which a microbatch takes half of a batch at most.
_LARGE = 64 * 2**20


# A last microbatch takes whole parts, of so many in a full one: kernels are compiled for each
# length.
_PARTS_OF_PASS = 16


class MicrobatchSize(typing.NamedTuple):
    """How many examples the microbatches of an update take.

    Attributes:
        examples: Int, of a full microbatch.
        multiple: Int. The last microbatch takes what is left, filled up to a multiple of this; one
            as large as `examples` makes all microbatches alike, which XLA needs.
    """

    examples: int
    multiple: int

    @property
    def varies(self):
        """Whether the last microbatch may be smaller than the others."""
        return self.multiple < self.examples

    def fits(self, count):
        """Whether microbatches hold `count` rows, an int or a tensor, without any padding."""
        known = isinstance(count, int) and not self.varies
        return known and (0 < count <= self.examples or count % self.examples == 0)

    def rows(self, count):
        """The rows of all microbatches for `count` examples, padding included; ints or arrays."""
        rest = count % self.examples
        return count - rest + np.minimum(-(-rest // self.multiple) * self.multiple, self.examples)


def of_examples(examples, varies):
    """The `MicrobatchSize` for an int, the examples of a full microbatch."""
    return MicrobatchSize(examples, -(-examples // _PARTS_OF_PASS) if varies else examples)


def choose(optimizer, work, num_views, count, weighted, varies=False):
    """The `MicrobatchSize` that `microbatch_size` says, or the one of least expected time.

    Few examples a microbatch cost efficiency, many cost padding. Where activations are large a
    microbatch takes half of the batch at most: it holds output gradients of all layers besides.

    Args:
        optimizer: The tfdpx optimizer.
        work: `tfdpx.per_example.cost_model.Work` of a row.
        num_views: Int K, rows an example.
        count: Int, rows of a replica's batch, or None if unknown.
        weighted: Bool, whether the batch may hold padding.
        varies: Bool, whether the last microbatch may take fewer examples than the others.

    Returns:
        `MicrobatchSize`. For `"auto"`, of the expected examples of a batch.
    """
    return of_examples(_examples(optimizer, work, num_views, count, weighted, varies), varies)


def _examples(optimizer, work, num_views, count, weighted, varies):
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    mean = -(-optimizer.batch_size // replicas)
    if count is None:
        count = mean
    size = optimizer.microbatch_size
    if size == AUTO:
        return count
    if size is not None:
        return min(count, size)
    deviation = 0.0
    if not weighted:  # All microbatches full, so that Keras counts metrics as it always does.
        mean = count
    elif optimizer.plan is None or optimizer.plan.sampling == "poisson":
        probability = optimizer.plan.sampling_probability if optimizer.plan else 0.0
        deviation = math.sqrt(optimizer.batch_size * (1.0 - probability)) / replicas
    largest = min(count, mean + math.ceil(4 * deviation))
    if 8 * work.elements * num_views * mean > _LARGE:
        # Of nearly all draws, where that costs no padding.
        usual = min(largest, mean + math.ceil(2 * deviation)) if varies else mean
        largest = min(largest, -(-usual // 2))
    seconds = _seconds(work, num_views)
    size = least_time(*seconds, mean, deviation, max(largest, 1), count, varies)
    if weighted or varies or count % size == 0:
        return size
    return next((n for n in range(largest, largest // 2, -1) if count % n == 0), count)


def chosen(model):
    """The `MicrobatchSize`s of a model's private steps so far, a list."""
    prepared = model_internals.innermost(model.optimizer).prepared
    return list(prepared[model].sizes.values()) if model in prepared else []


def least_time(each, every, mean, deviation, largest, most, varies=False):
    """The size of a microbatch, an int up to `largest`, of least expected time for an update.

    Args:
        each: Float, seconds of an example.
        every: Float, seconds of a microbatch besides.
        mean: Float, expected examples of an update, normally distributed.
        deviation: Float, their standard deviation.
        largest: Int.
        most: Int, the most examples that an update can have.
        varies: Bool, whether the last microbatch may take fewer examples than the others.
    """
    drawn = np.clip(mean + deviation * scipy.stats.norm.ppf((np.arange(64) + 0.5) / 64), 1.0, most)
    # Odd sizes divide badly among threads; the largest may save a microbatch, and a divisor
    # padding.
    sizes = np.arange(1, largest + 1)
    sizes = sizes[(sizes < 16) | (sizes % 4 == 0) | (sizes == largest) | (mean % sizes == 0)]
    drawn = np.ceil(drawn)
    expected = [
        np.mean(-(-drawn // size)) * every + np.mean(of_examples(size, varies).rows(drawn)) * each
        for size in map(int, sizes)
    ]
    return int(sizes[np.argmin(expected)])


def _seconds(work, num_views):
    """Predicted seconds of an example and of a microbatch besides."""
    device = device_kind()
    row = Cost(_BACKWARD * work.flops, FLOAT * _TRAFFIC * work.elements)
    every = Cost(bytes=FLOAT * _WEIGHT_TRAFFIC * work.weights, calls=_CALLS[device] * work.calls)
    return num_views * row.seconds(device), every.seconds(device)


class MicrobatchAutotuner:
    """Finds out, on the first call, how large a microbatch fits."""

    def __init__(self):
        self._largest = None

    def __call__(self, one_microbatch, batch, batch_size, variables):
        """The examples of a microbatch that fits in free memory, an int >= 1.

        Args:
            one_microbatch: Function of a nest like `batch`; it is only traced, the first time.
            batch: Nest of tensors [B, ...], this device's part of an update; only shapes and
                dtypes are read.
            batch_size: Int, expected examples of an update on all devices, for where B is unknown.
            variables: The trained `keras.Variable`s; the first is on the device.

        Raises:
            ValueError: If `batch` has an axis behind the first that has no static length, or
                TensorFlow does not know the device's memory.
        """
        count = Rows(batch).count
        if not isinstance(count, int):
            count = -(-batch_size // tf.distribute.get_strategy().num_replicas_in_sync)
        if self._largest is None:
            self._largest = _largest_fitting(one_microbatch, batch, count, variables)
        return divide(count, self._largest)


def divide(batch_size, largest):
    """The size up to `largest` that cuts a batch into as few equal microbatches with least padding.

    Args:
        batch_size: Int >= 1.
        largest: Int >= 1.
    """
    microbatches = -(-batch_size // largest)
    return -(-batch_size // microbatches)


def _largest_fitting(one_microbatch, batch, batch_size, variables):
    """The largest power of two of examples whose microbatch fits; says, or warns, what it finds."""
    rows = Rows(batch)
    if not all(t.shape[1:].is_fully_defined() for t in rows.tensors):
        raise ValueError(
            'Argument `microbatch_size="auto"` needs inputs whose axes behind the first have fixed '
            f"lengths. Received: shapes {[tuple(t.shape) for t in rows.tensors]}. Pad to one "
            "length, or give an int."
        )
    few, many = step_context.eagerly(_peaks, one_microbatch, rows)
    each = (many - few) / (_TRIALS[1] - _TRIALS[0])
    weights = sum(v.value.shape.num_elements() * v.value.dtype.size for v in variables)
    inputs = sum(t.shape[1:].num_elements() * t.dtype.size for t in rows.tensors)
    held = _WEIGHTS_HELD * weights + _BATCHES_HELD * inputs * batch_size + few - _TRIALS[0] * each
    free = _free_memory.free_bytes(variables[0].value.device)
    share = _EAGER_SHARE if tf.executing_eagerly() else _SHARE
    # Replicas on one host share its memory; more hosts only have more.
    room = share * free / tf.distribute.get_strategy().num_replicas_in_sync - held
    largest = 2 ** (max(int(room / each), 1).bit_length() - 1)
    size = divide(batch_size, largest)
    message = (
        f'microbatch_size="auto": microbatches of {size} examples for batches of {batch_size}. An '
        f"update is predicted to hold {_text(held + size * each)} of {_text(free)} that are free."
    )
    if room < each:
        warn(f"{message} It may run out of memory.")
    else:
        _say(message)
    return largest


def _peaks(one_microbatch, rows):
    return [_peak(one_microbatch, rows, examples) for examples in _TRIALS]


def _peak(one_microbatch, rows, examples):
    specs = [tf.TensorSpec([examples, *t.shape[1:]], t.dtype) for t in rows.tensors]
    traced = tf.function(lambda *tensors: one_microbatch(*rows.pack(tensors)), autograph=False)
    return _graph_peak.peak_bytes(traced.get_concrete_function(*specs))


def _text(count):
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _say(message):
    """Tells the user as Keras does: on the standard output, or to absl's log."""
    if keras.config.is_interactive_logging_enabled():
        print(message, flush=True)
    else:
        logging.info(message)
