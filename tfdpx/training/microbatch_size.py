"""How many examples a microbatch of the private step takes: of least time where no number is given.

Which size is taken changes the memory and time of an update and nothing else: neither its examples
nor their clipping, so not its sensitivity.
"""

import math
import typing

import numpy as np
import scipy.stats
import tensorflow as tf

from tfdpx._keras import model_internals
from tfdpx.per_example.cost_model import Cost, device_kind

FLOAT = 4  # Bytes.

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
        `MicrobatchSize`.
    """
    return of_examples(_examples(optimizer, work, num_views, count, weighted, varies), varies)


def _examples(optimizer, work, num_views, count, weighted, varies):
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    mean = -(-optimizer.batch_size // replicas)
    if count is None:
        count = mean
    size = optimizer.microbatch_size
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
