"""Whether a model and its loss are proved to keep examples apart, or that was only tried."""

import dataclasses

import tensorflow as tf

from tfdpx import keras_internals
from tfdpx.checks.proof import rules  # noqa: F401  (registers what types of operation do)
from tfdpx.checks.proof.lengths import ONE, ROWS, Length, symbol
from tfdpx.checks.proof.values import Fixed, Rows, Total, Unknown
from tfdpx.checks.proof.walk import Walk
from tfdpx.per_example.losses import loss_of_rows
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.rows import Rows as Batch

PROVED, TRIED = "proved", "tried"


@dataclasses.dataclass(frozen=True)
class Separation:
    """What is known of how a model keeps examples apart.

    Attributes:
        reasons: Tuple of str, the operations that could not be followed, first ones first.
    """

    reasons: tuple = ()

    @property
    def verdict(self):
        """`"proved"`, or `"tried"` where made-up data alone speak for it."""
        return TRIED if self.reasons else PROVED

    def __str__(self):
        return f"{self.verdict}: {self.reasons[0]}" if self.reasons else self.verdict


def reasons_of_forward(graph, inputs, rows, predictions, operations=None):
    """Texts of where a forward pass could not be followed, a list.

    Args:
        graph: `tf.Graph` of a function.
        inputs: Tensors of `graph`, [rows, ...].
        rows: `Length`.
        predictions: Tensors of `graph`, which must have rows on their first axis.
        operations: Those whose side effects count; by default all of `graph`.
    """
    walk = Walk(rows)
    found = walk(graph, _given(inputs, rows), predictions, operations)
    return [*filter(None, (_no_rows(value, rows) for value in found)), *walk.problems]


def reasons_of_loss(model, data, predictions, rows):
    """Texts of where the loss could not be followed, a list.

    Args:
        model: A compiled, built `keras.Model`.
        data: `(x, y, sample_weight)`, nests of tensors [rows, ...]; shapes and dtypes are read.
        predictions: What the model gives, a nest of symbolic tensors [rows, ...].
        rows: `Length`.
    """
    of_rows = loss_of_rows(model, *data[:2], predictions, data[2])
    both = Batch(data).tensors, Outputs(predictions).tensors
    specs = [[_spec(t, rows) for t in tensors] for tensors in both]
    graph = tf.function(of_rows, autograph=False).get_concrete_function(*specs).graph
    walk = Walk(rows)
    count = len(tf.nest.flatten(specs))
    found = walk(graph, _given(graph.inputs[:count], rows), graph.outputs)
    return [*filter(None, map(_no_total, found)), *walk.problems]


def _spec(tensor, rows):
    return tf.TensorSpec([rows.known, *tensor.shape[1:]], tensor.dtype)


def _given(tensors, rows):
    given = {}
    for tensor in tensors:
        behind = [
            symbol(f"{tensor.name}:{axis}") if length is None else Length(length)
            for axis, length in enumerate(tensor.shape[1:], 1)
        ]
        given[id(tensor)] = Rows((rows, *behind), 0)
    return given


def _no_rows(value, rows):
    if isinstance(value, Unknown):
        return value.reason
    apart = isinstance(value, Rows) and (value.axis, value.after, value.shape[0]) == (0, ONE, rows)
    return None if apart else "an output has no rows on its first axis"


def _no_total(value):
    if isinstance(value, Unknown):
        return value.reason
    return None if isinstance(value, (Fixed, Total)) else "the loss is no sum over the examples"


def traced(model, x):
    """The graph of a forward pass of any number of rows.

    Args:
        model: A built `keras.Model`.
        x: Nest of tensors [rows, ...]; only shapes and dtypes are read.

    Returns:
        Triple of the graph, its inputs, and the model's symbolic output.
    """
    batch, kept = Batch(x), []

    def forward(tensors):
        kept.append(keras_internals.call_model(model, batch.pack(tensors)))
        return Outputs(kept[0]).tensors

    specs = [_spec(t, ROWS) for t in batch.tensors]
    graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    return graph, graph.inputs[: len(specs)], kept[0]


def separation_of(model, x, y=None, sample_weight=None):
    """..."""
    graph, inputs, y_pred = traced(model, x)
    reasons = reasons_of_forward(graph, inputs, ROWS, Outputs(y_pred).tensors)
    if y is not None:
        reasons += reasons_of_loss(model, (x, y, sample_weight), y_pred, ROWS)
    return Separation(tuple(dict.fromkeys(reasons)))
