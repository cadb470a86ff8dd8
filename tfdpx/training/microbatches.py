"""The microbatches of an update: their size, the function that computes one, and their sums.

A Poisson batch has a random number of examples, and is padded to a fixed number of rows. Padding
comes last. While a step runs, it finds the last row that holds an example, and stops the loop over
microbatches there. The last microbatch takes the remaining rows; under XLA all microbatches have
the same size. The random numbers that a layer draws for a row depend on the row's place in the
batch. So rows keep their places, and an absent row changes no other row's numbers.

The size of microbatches changes only the memory and the time of an update. It changes neither the
examples of an update nor their clipping, so it does not change the sensitivity.
"""

import copy
import dataclasses
import math
import typing

import numpy as np
import scipy.stats
import tensorflow as tf

from tfdpx import mechanism
from tfdpx._keras import model_internals, tensorflow_internals
from tfdpx.per_example.cost_model import Cost, device_kind
from tfdpx.per_example.rows import Outputs, Rows, along, joining_vectors

_FLOAT = 4  # Bytes.
# The work of a row relative to its forward pass, and how many times each number of the outputs, and
# of the weights, is read or written. These were fitted to steps on two CPU cores.
_BACKWARD, _TRAFFIC, _WEIGHT_TRAFFIC = 3.5, 12, 10
# Kernel launches per layer. For an accelerator, they were counted in the graph, not measured.
_CALLS = {"cpu": 4, "accelerator": 60}
# If outputs and their gradients have more bytes than this, a microbatch takes at most half of a
# batch.
_LARGE = 64 * 2**20
# Kernels are compiled for each length. To limit the number of lengths, the last microbatch is
# padded to a multiple of the size of a full one divided by this number.
_PARTS_OF_PASS = 16


class MicrobatchSize(typing.NamedTuple):
    """The size of the microbatches of an update.

    Attributes:
        examples: Int, the number of examples in a full microbatch.
        multiple: Int. The last microbatch takes the remaining examples and is padded to a multiple
            of this number. If `multiple` equals `examples`, all microbatches have the same size, as
            XLA needs.
    """

    examples: int
    multiple: int

    @property
    def varies(self):
        """Bool, whether the last microbatch may be smaller than the others."""
        return self.multiple < self.examples

    def holds_exactly(self, count):
        """Returns whether microbatches for `count` rows need no padding, a bool.

        `count` is an int, or a tensor if the number is not known yet. For a tensor, the result is
        False.
        """
        is_constant = isinstance(count, int) and not self.varies
        return is_constant and (0 < count <= self.examples or count % self.examples == 0)

    def rows(self, count):
        """Returns the total number of rows in microbatches for `count` examples.

        The number includes the padding of the last microbatch. `count` is an int or an array, and
        the result is of the same kind.
        """
        rest = count % self.examples
        return count - rest + np.minimum(-(-rest // self.multiple) * self.multiple, self.examples)


def make_size(examples, varies):
    """Returns the `MicrobatchSize` for `examples` examples in a full microbatch."""
    return MicrobatchSize(examples, -(-examples // _PARTS_OF_PASS) if varies else examples)


def choose_size(optimizer, work, num_views, count, has_padding, varies=False):
    """Returns the `MicrobatchSize` that the user chose, or the one with the least expected time.

    Small microbatches are less efficient, and large microbatches have more padding. If activations
    are large, a microbatch takes at most half of the batch, because the output gradients of all
    layers need memory, too.

    Args:
        optimizer: The tfdpx optimizer.
        work: `tfdpx.per_example.cost_model.Work`, the cost of a row.
        num_views: Int K, the number of rows of an example.
        count: Int, the number of places for examples in a replica's batch, or None if unknown.
        has_padding: Bool, whether the batch may hold padding.
        varies: Bool, whether the last microbatch may take fewer examples than the others.

    Returns:
        `MicrobatchSize`.
    """
    examples = _choose_examples(optimizer, work, num_views, count, has_padding, varies)
    return make_size(examples, varies)


def _choose_examples(optimizer, work, num_views, count, has_padding, varies):
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    mean = -(-optimizer.batch_size // replicas)
    if count is None:
        count = mean
    size = optimizer.microbatch_size
    if size is not None:
        return min(count, size)
    deviation = 0.0
    if not has_padding:  # Every place holds an example.
        mean = count
    elif optimizer.plan is None or optimizer.plan.sampling == "poisson":
        probability = optimizer.plan.sampling_probability if optimizer.plan else 0.0
        deviation = math.sqrt(optimizer.batch_size * (1.0 - probability)) / replicas
    largest = min(count, mean + math.ceil(4 * deviation))
    if 8 * work.elements * num_views * mean > _LARGE:
        # At most half of the batch. If the last microbatch may be small, take half of a large batch
        # instead of a mean one, so that two microbatches hold nearly every batch.
        probable_count = min(largest, mean + math.ceil(2 * deviation)) if varies else mean
        largest = min(largest, -(-probable_count // 2))
    seconds = _predict_seconds(work, num_views)
    size = least_time(*seconds, mean, deviation, max(largest, 1), count, varies)
    if has_padding or varies or count % size == 0:
        return size
    return next((n for n in range(largest, largest // 2, -1) if count % n == 0), count)


def chosen_sizes(model):
    """Returns a list of the `MicrobatchSize`s that a model's private steps have used so far."""
    caches = model_internals.innermost(model.optimizer).prepared
    return list(caches[model].sizes.values()) if model in caches else []


def least_time(
    seconds_per_example, seconds_per_microbatch, mean, deviation, largest, max_count, varies=False
):
    """Returns the microbatch size with the least expected time, an int up to `largest`.

    Args:
        seconds_per_example: Float, the seconds that each example adds.
        seconds_per_microbatch: Float, the seconds that each microbatch adds regardless of its size.
        mean: Float, the mean number of examples in an update. The number of examples is assumed to
            have a normal distribution.
        deviation: Float, the standard deviation of the number of examples in an update.
        largest: Int, the largest microbatch size to choose.
        max_count: Int, the largest number of examples that an update can have.
        varies: Bool, whether the last microbatch may take fewer examples than the others.
    """
    counts = np.clip(
        mean + deviation * scipy.stats.norm.ppf((np.arange(64) + 0.5) / 64), 1.0, max_count
    )
    # Most sizes that are not multiples of 4 are left out: they divide badly among threads. But the
    # largest size may save a microbatch, and a divisor of the mean saves padding.
    sizes = np.arange(1, largest + 1)
    sizes = sizes[(sizes < 16) | (sizes % 4 == 0) | (sizes == largest) | (mean % sizes == 0)]
    counts = np.ceil(counts)
    expected_seconds = [
        np.mean(-(-counts // size)) * seconds_per_microbatch
        + np.mean(make_size(size, varies).rows(counts)) * seconds_per_example
        for size in map(int, sizes)
    ]
    return int(sizes[np.argmin(expected_seconds)])


def _predict_seconds(work, num_views):
    """Returns the predicted seconds per example and seconds per microbatch, two floats."""
    device = device_kind()
    row_cost = Cost(_BACKWARD * work.flops, _FLOAT * _TRAFFIC * work.elements)
    microbatch = Cost(
        bytes=_FLOAT * _WEIGHT_TRAFFIC * work.weights, calls=_CALLS[device] * work.calls
    )
    return num_views * row_cost.seconds(device), microbatch.seconds(device)


class Batch(typing.NamedTuple):
    """The examples of a batch, or of one microbatch.

    Attributes:
        data: `(x, y, sample_weight)`, nests of tensors [B, ...].
        present: bool [B], whether a row holds an example; None if all do.
        number: int32 [B], each example's place in the whole batch.
        ids: int32 [B], the index of each example in the data set, for a clip policy; or None.
        choices: Nest of tensors [B, ...], the random choices of each example's views; or None.
        clips: float32 [B], the result of `tfdpx.training.clipping.ClipPolicy.clips`, or None.
        present_of_users: bool [B, k], whether each of a person's examples is present; or None.
        class_weights: float32 [B], the class weights for the losses and metrics that Keras shows;
            or None.
        factors: float32 [B] in [0, 1], the numbers that multiply the clipped gradients: class
            weights divided by the largest one.
    """

    data: tuple
    present: tf.Tensor | None = None
    number: tf.Tensor | None = None
    ids: tf.Tensor | None = None
    choices: typing.Any = None
    clips: tf.Tensor | None = None
    present_of_users: tf.Tensor | None = None
    class_weights: tf.Tensor | None = None
    factors: tf.Tensor | None = None


class Inputs(typing.NamedTuple):
    """The arguments of the function that computes a microbatch of n examples with K views.

    Attributes:
        rows: `(x, y, sample_weight)`, nests of tensors [n * K, ...]; y and sample_weight may be
            None.
        present: bool [n], whether a row holds an example; None if all do.
        key: int64 [2], the key for the random numbers that layers draw. Every microbatch has a
            different key.
        weights: float32 [n] in [0, 1], the numbers that multiply the clipped gradients. If a weight
            is NaN, the example counts as one without a finite gradient.
        clips: float32 [n], the result of `tfdpx.training.clipping.ClipPolicy.clips`, or None.
        shared: List of the tensors of a `tfdpx.per_example.engine.Update`.
        row_weights: float32 [n * K], the weight of a row in its example's gradient; None means
            1 / K.
    """

    rows: tuple
    present: tf.Tensor | None
    key: tf.Tensor
    weights: tf.Tensor
    clips: tf.Tensor | None = None
    shared: tuple = ()
    row_weights: tf.Tensor | None = None


class Outcome(typing.NamedTuple):
    """The output of the function that computes a microbatch of n examples with K views.

    Attributes:
        losses: float32 [n * K], the loss of each row.
        tracked: List of float32 [n * K], numbers for the model's metrics; see `RowLosses`.
        y_pred: The model's output, a nest of tensors [n * K, ...].
        squared_norms: float32 [n], the squared norm of each example's gradient.
        sums: List of float32 tensors, one for each trained variable: the sum of clipped gradients,
            divided by B.
    """

    losses: tf.Tensor
    tracked: list
    y_pred: object
    squared_norms: tf.Tensor
    sums: list


def compute(optimizer, engine, update, inputs):
    """Returns the `EngineOutput` of a microbatch, and the sums of its clipped gradients.

    Args:
        optimizer: The tfdpx optimizer.
        engine: The per-example engine.
        update: The `Update` that microbatches share.
        inputs: `Inputs`.
    """
    output = engine(*inputs.rows, update, inputs.key, inputs.row_weights)
    norms = tf.where(tf.math.is_nan(inputs.weights), inputs.weights, output.squared_norms)
    present = inputs.present
    if present is None:
        present = tf.ones_like(norms, tf.bool)
    factors = optimizer.clip_policy.clip(norms, present, optimizer.batch_size, inputs.clips)
    if optimizer.noise_multiplier:
        factors = mechanism.cap_to_sensitivity(factors, norms, optimizer.batch_size)
    sums = output.clipped_sums(mechanism.zero_invalid(factors * inputs.weights, norms, present))
    return dataclasses.replace(output, squared_norms=norms), sums


class Microbatch:
    """The function `compute`, traced for one size of microbatches.

    Args:
        optimizer: The tfdpx optimizer.
        engine: The per-example engine.
        specs: `Inputs` that hold `tf.TensorSpec`s instead of tensors. Their `shared` is not read.
        size: The `MicrobatchSize` to trace for.

    Attributes:
        size: See the argument.
        engine: See the argument.
        update: The `Update` that the microbatches of the current update share.
        graph: The traced `tf.Graph`.
        inputs: `Inputs` that hold the symbolic input tensors of `graph`.
        output: `EngineOutput` that holds the symbolic output tensors of `graph`.
    """

    def __init__(self, optimizer, engine, specs, size):
        self.engine, self.update, self.size = engine, engine.update(), size
        specs = specs._replace(shared=[_spec(t) for t in self.update.tensors])

        def trace(*tensors):
            self.inputs = _pack(specs, tensors)
            update = self.update.with_tensors(self.inputs.shared)
            self.output, sums = compute(optimizer, engine, update, self.inputs)
            output = self.output
            self._predictions = Outputs(output.y_pred)
            tensors = self._predictions.tensors
            return output.losses, list(output.tracked), tensors, output.squared_norms, sums

        function = tf.function(trace, autograph=False)
        self._function = function.get_concrete_function(*_flatten(specs))
        self.graph = self._function.graph

    @property
    def draws(self):
        """Bool, whether the output depends on the key, because some layer draws random numbers."""
        return self.inputs.key.op in _dependencies_of(self.graph)

    def renew(self):
        """Returns a copy of this function that uses the current weights, for another update."""
        twin = copy.copy(self)
        # `engine.update()` may differ, if a later trace changed how the engine computes a layer.
        twin.update = self.update.with_tensors(self.update.again().tensors)
        return twin

    def __call__(self, inputs):
        """Returns the `Outcome` for `Inputs` with the traced shapes and dtypes."""
        losses, tracked, tensors, norms, sums = self._function(*_flatten(inputs))
        return Outcome(losses, tracked, self._predictions.rebuild(tensors), norms, sums)


def _dependencies_of(graph):
    """Returns the set of operations that the outputs of a graph depend on."""
    waiting, dependencies = [t.op for t in graph.outputs], set()
    while waiting:
        operation = waiting.pop()
        if operation in dependencies:
            continue
        dependencies.add(operation)
        inputs = operation.inputs
        if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
            [(_, body)] = tensorflow_internals.called(operation)
            inner_dependencies = _dependencies_of(body)
            inputs = [
                t
                for t, inner in zip(inputs, body.inputs, strict=True)
                if inner.op in inner_dependencies
            ]
        waiting += [t.op for t in inputs]
    return dependencies


def _flatten(inputs):
    return [t for t in tf.nest.flatten(inputs) if t is not None]


def _pack(inputs, tensors):
    tensors = iter(tensors)
    leaves = [None if leaf is None else next(tensors) for leaf in tf.nest.flatten(inputs)]
    return tf.nest.pack_sequence_as(inputs, leaves)


def _spec(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)


class Totals(typing.NamedTuple):
    """Sums over the examples of a microbatch, of a batch, or of all replicas.

    Attributes:
        sums: List of float32 tensors, one for each trained variable: sums of clipped gradients,
            divided by B.
        examples: float32 scalar, the number of present examples.
        nonfinite: float32 scalar, the number of present examples without a finite gradient.
        measured: `tfdpx.training.clipping.NormStatistics`; empty until all norms are known.
        loss: float32 scalar, the sum of the losses of present examples.
        tracked: List of float32 scalars, the sums of `RowLosses.tracked` over present examples.
        squared_norms: float32 [B], the squared norm of each example's gradient; 0 for absent
            examples.
    """

    sums: list
    examples: tf.Tensor
    nonfinite: tf.Tensor
    measured: typing.Any = ()
    loss: tf.Tensor | tuple = ()
    tracked: typing.Sequence = ()
    squared_norms: tf.Tensor | tuple = ()


def run(one_microbatch, batch, size, zero):
    """Runs all microbatches of a batch.

    Returns the sum of their `Totals`, and Keras's logs. The logs are None unless all examples are
    in a single, full microbatch.

    Args:
        one_microbatch: Function `one_microbatch(part, number)`. `part` is the `Batch` of the
            microbatch's examples, and `number` is the number of the microbatch. The function
            returns the `Totals` of these examples, and Keras's logs.
        batch: `Batch`.
        size: `MicrobatchSize`.
        zero: `Totals` of zeros, to begin the sum over microbatches.
    """
    count, present = Rows(batch.data).count, batch.present
    # If all microbatches are full, no row is marked as absent. If the number of rows may vary,
    # microbatches do not count as full: the checks must see that the number is unknown.
    are_full = present is None and size.holds_exactly(count)
    if are_full and 0 < count <= size.examples:
        return one_microbatch(batch, 0)
    rows, (join, split) = Rows(batch), joining_vectors(zero)
    examples = count
    if present is not None:
        examples = tf.reduce_max(tf.where(present, tf.range(1, count + 1), 0))

    def body(index, totals):
        start, length = index * size.examples, size.examples
        if size.varies:
            remaining = -(-(examples - start) // size.multiple) * size.multiple
            length = tf.minimum(length, remaining)
        places = start + tf.range(length)
        is_real = places < examples
        # The last microbatch is padded with copies of the first row, which are marked as absent.
        places = tf.where(is_real, places, 0)
        part = rows.map(lambda t: tf.gather(t, places))
        if present is not None:
            is_real &= part.present
        x, y, weights = part.data
        if weights is not None:
            weights = Rows(weights).map(lambda w: tf.where(along(is_real, w), w, tf.zeros_like(w)))
        part = part._replace(data=(x, y, weights), present=None if are_full else is_real)
        microbatch_totals, _ = one_microbatch(part, index)
        return index + 1, [a + b for a, b in zip(totals, join(microbatch_totals), strict=True)]

    def has_rows_left(index, _):
        return index * size.examples < examples

    loop = tf.while_loop(has_rows_left, body, (tf.constant(0), join(zero)), parallel_iterations=1)
    return split(loop[1]), None
