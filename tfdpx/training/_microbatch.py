"""One microbatch of the private step as a traced function: one graph is proved, tested and run."""

import copy
import typing

import tensorflow as tf

from tfdpx import mechanism
from tfdpx.per_example.rows import Outputs


class Inputs(typing.NamedTuple):
    """What the function of a microbatch of n examples with K views takes.

    Attributes:
        rows: `(x, y, sample_weight)`, nests of tensors [n * K, ...] and None.
        present: bool [n], which examples count; None where all do.
        key: int64 [2], from which random layers draw; no other microbatch has it.
        clips: Tuple of the tensors of `tfdpx.training.clip_policy.ClipPolicy.clips`.
        shared: List of the tensors of a `tfdpx.per_example.engine.Update`.
        shares: float32 [n * K], what each row weighs in its example's gradient; None: 1 / K.
    """

    rows: tuple
    present: tf.Tensor | None
    key: tf.Tensor
    clips: tuple = ()
    shared: tuple = ()
    shares: tf.Tensor | None = None


class Outcome(typing.NamedTuple):
    """What it gives.

    Attributes:
        losses: float32 [n * K].
        tracked: List of float32 [n * K], as of `RowLosses`.
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
    """The `EngineOutput` of a microbatch, and its clipped sums.

    Args:
        optimizer: The tfdpx optimizer.
        engine: The per-example engine.
        update: The `Update` that microbatches share.
        inputs: `Inputs`.
    """
    found = engine(*inputs.rows, update, inputs.key, inputs.shares)
    present = inputs.present
    if present is None:
        present = tf.ones_like(found.squared_norms, tf.bool)
    factors = optimizer.clip_policy.factors(
        found.squared_norms, present, optimizer.batch_size, *inputs.clips
    )
    if optimizer.noise_multiplier:
        factors = mechanism.bounded(factors, found.squared_norms, optimizer.batch_size)
    return found, found.clipped_sums(mechanism.counted(factors, found.squared_norms, present))


class Microbatch:
    """`compute`, traced.

    Args:
        optimizer: The tfdpx optimizer.
        engine: The per-example engine.
        specs: `Inputs` of `tf.TensorSpec`s, but for `shared`.

    Attributes:
        engine: The per-example engine.
        update: The `Update` that the microbatches of the update at hand share.
        graph: The `tf.Graph`.
        inputs: `Inputs` of tensors of `graph`.
        found: The `EngineOutput` there.
    """

    def __init__(self, optimizer, engine, specs):
        self.engine, self.update = engine, engine.update()
        specs = specs._replace(shared=[_spec(t) for t in self.update.tensors])

        def traced(*tensors):
            self.inputs = _packed(specs, tensors)
            update = self.update.of(self.inputs.shared)
            self.found, sums = compute(optimizer, engine, update, self.inputs)
            found = self.found
            self._predictions = Outputs(found.y_pred)
            tensors = self._predictions.tensors
            return found.losses, list(found.tracked), tensors, found.squared_norms, sums

        function = tf.function(traced, autograph=False)
        self._function = function.get_concrete_function(*_flat(specs))
        self.graph = self._function.graph

    @property
    def draws(self):
        """Whether what it gives depends on its key: some layer draws random numbers."""
        left, seen = [t.op for t in self.graph.outputs], set()
        while left:
            operation = left.pop()
            if operation is self.inputs.key.op:
                return True
            if operation not in seen:
                seen.add(operation)
                left += [t.op for t in operation.inputs]
        return False

    def renewed(self):
        """The same function for another update, of the weights as they are now."""
        twin = copy.copy(self)
        twin.update = self.update.of(self.engine.update().tensors)
        return twin

    def __call__(self, inputs):
        """The `Outcome` for `Inputs` like those that were traced."""
        losses, tracked, tensors, norms, sums = self._function(*_flat(inputs))
        return Outcome(losses, tracked, self._predictions.rebuild(tensors), norms, sums)


def _flat(inputs):
    return [t for t in tf.nest.flatten(inputs) if t is not None]


def _packed(inputs, tensors):
    tensors = iter(tensors)
    leaves = [None if leaf is None else next(tensors) for leaf in tf.nest.flatten(inputs)]
    return tf.nest.pack_sequence_as(inputs, leaves)


def _spec(tensor):
    return tf.TensorSpec(tensor.shape, tensor.dtype)
