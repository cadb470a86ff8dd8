"""The microbatches of an update: how many examples each takes, the traced one, and their sums.

A Poisson batch is padded to a capacity that is almost never reached. Padding is at its end and adds
nothing, so microbatches end with the last row that is present, a number that is known when the step
runs. The last microbatch takes the remaining rows; under XLA all microbatches have one size. No row
changes its place, because random layers draw by place, and a row that is absent must not change the
draws of the others.

The size of a microbatch changes the memory and time of an update and nothing else: neither its
examples nor their clipping, so not its sensitivity.
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
from tfdpx.per_example.rows import Outputs, Rows, along

_FLOAT = 4  # Bytes.
# Work of a row relative to its forward pass, and bytes moved for each number in outputs and
# weights, fitted to steps on two CPU cores. Kernel launches a layer: the accelerator's is the
# number in the graph, not measured.
_BACKWARD, _TRAFFIC, _WEIGHT_TRAFFIC = 3.5, 12, 10
_CALLS = {"cpu": 4, "accelerator": 60}
# Bytes of outputs and their gradients beyond which a microbatch takes half of a batch at most.
_LARGE = 64 * 2**20
# The last microbatch takes a multiple of this fraction of a full one: kernels are compiled
# for each length.
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

    def holds_exactly(self, count):
        """Whether microbatches hold `count` rows, an int or a tensor, without any padding."""
        is_constant = isinstance(count, int) and not self.varies
        return is_constant and (0 < count <= self.examples or count % self.examples == 0)

    def rows(self, count):
        """The rows of all microbatches for `count` examples, padding included; ints or arrays."""
        rest = count % self.examples
        return count - rest + np.minimum(-(-rest // self.multiple) * self.multiple, self.examples)


def make_size(examples, varies):
    """The `MicrobatchSize` for an int, the examples of a full microbatch."""
    return MicrobatchSize(examples, -(-examples // _PARTS_OF_PASS) if varies else examples)


def choose_size(optimizer, work, num_views, count, has_padding, varies=False):
    """Returns the `MicrobatchSize` that the user gave, or the one of least expected time.

    Small microbatches are less efficient, large ones have more padding. If activations are large, a
    microbatch takes half of the batch at most, because it also holds the output gradients of all
    layers.

    Args:
        optimizer: The tfdpx optimizer.
        work: `tfdpx.per_example.cost_model.Work` of a row.
        num_views: Int K, rows an example.
        count: Int, rows of a replica's batch, or None if unknown.
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
    if not has_padding:  # All microbatches full: Keras counts metrics as it always does.
        mean = count
    elif optimizer.plan is None or optimizer.plan.sampling == "poisson":
        probability = optimizer.plan.sampling_probability if optimizer.plan else 0.0
        deviation = math.sqrt(optimizer.batch_size * (1.0 - probability)) / replicas
    largest = min(count, mean + math.ceil(4 * deviation))
    if 8 * work.elements * num_views * mean > _LARGE:
        # Large enough for nearly all draws, if that costs no padding.
        probable_count = min(largest, mean + math.ceil(2 * deviation)) if varies else mean
        largest = min(largest, -(-probable_count // 2))
    seconds = _predict_seconds(work, num_views)
    size = least_time(*seconds, mean, deviation, max(largest, 1), count, varies)
    if has_padding or varies or count % size == 0:
        return size
    return next((n for n in range(largest, largest // 2, -1) if count % n == 0), count)


def chosen_sizes(model):
    """The `MicrobatchSize`s of a model's private steps so far, a list."""
    caches = model_internals.innermost(model.optimizer).prepared
    return list(caches[model].sizes.values()) if model in caches else []


def least_time(
    seconds_per_example, seconds_per_microbatch, mean, deviation, largest, max_count, varies=False
):
    """Returns the microbatch size, an int up to `largest`, with the least expected time.

    Args:
        seconds_per_example: Float, seconds of an example.
        seconds_per_microbatch: Float, further seconds of a microbatch.
        mean: Float, expected examples of an update, normally distributed.
        deviation: Float, their standard deviation.
        largest: Int.
        max_count: Int, the most examples that an update can have.
        varies: Bool, whether the last microbatch may take fewer examples than the others.
    """
    counts = np.clip(
        mean + deviation * scipy.stats.norm.ppf((np.arange(64) + 0.5) / 64), 1.0, max_count
    )
    # Odd sizes divide badly among threads; the largest may save a microbatch, a divisor padding.
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
    """Predicted seconds of an example, and further ones of a microbatch."""
    device = device_kind()
    row_cost = Cost(_BACKWARD * work.flops, _FLOAT * _TRAFFIC * work.elements)
    microbatch = Cost(
        bytes=_FLOAT * _WEIGHT_TRAFFIC * work.weights, calls=_CALLS[device] * work.calls
    )
    return num_views * row_cost.seconds(device), microbatch.seconds(device)


class Batch(typing.NamedTuple):
    """The examples of a batch, or the ones that a microbatch takes.

    Attributes:
        data: `(x, y, sample_weight)`, nests of tensors [B, ...].
        present: bool [B], which examples count; None where all do.
        number: int32 [B], the example's place in the whole batch.
        ids: int32 [B], the number of each example in the data set, for a clip policy; or None.
        choices: Nest of tensors [B, ...], the random choices of its views; or None.
        clips: float32 [B], of `tfdpx.training.clipping.ClipPolicy.clips`, or None.
        present_of_users: bool [B, k], the examples of each person that are there; or None.
        class_weights: float32 [B], for the losses and metrics that Keras shows; or None.
        factors: float32 [B] in [0, 1], by which its clipped gradient is multiplied.
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
    """The arguments of the function of a microbatch of n examples with K views.

    Attributes:
        rows: `(x, y, sample_weight)`, nests of tensors [n * K, ...] and None.
        present: bool [n], which examples count; None where all do.
        key: int64 [2], from which random layers draw; no other microbatch has it.
        weights: float32 [n] in [0, 1], which multiply clipped gradients. NaN marks an example as
            one without a finite gradient.
        clips: float32 [n], of `tfdpx.training.clipping.ClipPolicy.clips`, or None.
        shared: List of the tensors of a `tfdpx.per_example.engine.Update`.
        row_weights: float32 [n * K], of each row in its example's gradient; None: 1 / K.
    """

    rows: tuple
    present: tf.Tensor | None
    key: tf.Tensor
    weights: tf.Tensor
    clips: tf.Tensor | None = None
    shared: tuple = ()
    row_weights: tf.Tensor | None = None


class Outcome(typing.NamedTuple):
    """The output of the function of a microbatch.

    Attributes:
        losses: float32 [n * K].
        tracked: List of float32 [n * K], as in `RowLosses`.
        y_pred: The model's output, a nest of tensors [n * K, ...].
        squared_norms: float32 [n].
        sums: List of float32 tensors, one a trained variable: clipped gradients over B, added up.
    """

    losses: tf.Tensor
    tracked: list
    y_pred: object
    squared_norms: tf.Tensor
    sums: list


def compute(optimizer, engine, update, inputs):
    """Returns the `EngineOutput` of a microbatch, and its clipped sums.

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
    """`compute`, traced.

    Args:
        optimizer: The tfdpx optimizer.
        engine: The per-example engine.
        specs: `Inputs` of `tf.TensorSpec`s, but for `shared`.
        size: The `MicrobatchSize` that it is traced for.

    Attributes:
        size: The argument.
        engine: The per-example engine.
        update: The `Update` that the microbatches of the update at hand share.
        graph: The `tf.Graph`.
        inputs: `Inputs` of tensors of `graph`.
        output: The `EngineOutput` there.
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
        """Whether the output depends on the key, because some layer draws random numbers."""
        return self.inputs.key.op in _dependencies_of(self.graph)

    def renew(self):
        """Returns the same function for another update, with the current weights."""
        twin = copy.copy(self)
        # Not the engine's, which may have left a layer to the map in a later trace.
        twin.update = self.update.with_tensors(self.update.again().tensors)
        return twin

    def __call__(self, inputs):
        """The `Outcome` for `Inputs` like those that were traced."""
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
        sums: List of float32 tensors, one a trained variable: clipped sums over B.
        examples: float32 scalar, the number of present examples.
        nonfinite: float32 scalar, the number of present examples without a finite gradient.
        measured: `tfdpx.training.clipping.NormStatistics`, once all norms are known.
        loss: float32 scalar, of the present rows.
        tracked: List of float32 scalars, such sums of `RowLosses.tracked`.
        squared_norms: float32 [B], each at the place of its example; 0 for absent ones.
    """

    sums: list
    examples: tf.Tensor
    nonfinite: tf.Tensor
    measured: typing.Any = ()
    loss: tf.Tensor | tuple = ()
    tracked: typing.Sequence = ()
    squared_norms: tf.Tensor | tuple = ()


def run(one_microbatch, batch, size, zero):
    """Returns the `Totals` of all microbatches, and Keras's logs if there is just one.

    Args:
        one_microbatch: Function of the `Batch` of some examples, and of the number of the
            microbatch, to their `Totals` and logs.
        batch: `Batch`.
        size: `MicrobatchSize`.
        zero: The zero element of `Totals`, for summing over microbatches.
    """
    count, present = Rows(batch.data).count, batch.present
    # If all microbatches are full, no row is left out. Microbatches of any number of rows are not
    # treated as full: the checks must see that the number is unknown.
    are_full = present is None and size.holds_exactly(count)
    if are_full and 0 < count <= size.examples:
        return one_microbatch(batch, 0)
    rows = Rows(batch)
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
        # The last microbatch is filled up with the first row, marked absent.
        places = tf.where(is_real, places, 0)
        part = rows.map(lambda t: tf.gather(t, places))
        if present is not None:
            is_real &= part.present
        x, y, weights = part.data
        if weights is not None:
            weights = Rows(weights).map(lambda w: tf.where(along(is_real, w), w, tf.zeros_like(w)))
        part = part._replace(data=(x, y, weights), present=None if are_full else is_real)
        microbatch_totals, _ = one_microbatch(part, index)
        return index + 1, tf.nest.map_structure(tf.add, totals, microbatch_totals)

    def has_rows_left(index, _):
        return index * size.examples < examples

    loop = tf.while_loop(has_rows_left, body, (tf.constant(0), zero), parallel_iterations=1)
    return loop[1], None
