"""Whether a model and its loss are proved to keep examples apart, or that was only tried."""

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpx import keras_internals
from tfdpx.independence import rules  # noqa: F401  (says what each type of operation does)
from tfdpx.independence.hidden_state import RANDOM
from tfdpx.independence.lengths import ONE, ROWS, Length, symbol
from tfdpx.independence.values import Fixed, Rows, Total, Unknown
from tfdpx.independence.walk import Walk
from tfdpx.memory import graph_peak
from tfdpx.per_example import rows as batches
from tfdpx.per_example.losses import loss_of_rows
from tfdpx.per_example.outputs import Outputs

_EAGER = "the model runs eagerly, so its Python may do something else in each step"


@dataclasses.dataclass(frozen=True)
class Independence:
    """What is known of how a model and its loss keep examples apart.

    Attributes:
        reasons: Tuple of str, what could not be followed; the first comes first.
        rows: Int, the rows of the passes that this is about; None for every number of rows.
    """

    reasons: tuple = ()
    rows: int = None

    @property
    def verdict(self):
        """`"proved"`; or `"tried"`, where made-up data alone speak for it."""
        return "tried" if self.reasons else "proved"

    def __str__(self):
        number = "any number of rows" if self.rows is None else f"passes of {self.rows} rows"
        return f"{self.verdict}, for {number}" + "".join(f"; {r}" for r in self.reasons[:1])


def independence_of(model, x=None, y=None, sample_weight=None, rows=None):
    """Walks the graph of the training-mode forward pass, and of the loss, if `y` is given.

    Nothing is run, and no data are read. `tfdpx.independence` says what is proved.

    Args:
        model: A built `keras.Model`; compiled, if `y` is given.
        x: Nest of tensors, arrays or `tf.TensorSpec`s [rows, ...], of which shapes and dtypes are
            read; by default the model's own inputs.
        y: As `x`, the targets; None to leave out the loss.
        sample_weight: As `x`, or None.
        rows: Int, the number of rows that the graph is traced for; None for every number.

    Returns:
        `Independence`.

    Raises:
        ValueError: If `rows` is below 2, or if `x` is None and the model does not know its inputs.
    """
    if rows is not None and rows < 2:
        raise ValueError(
            "Argument `rows` must be None or an integer of at least 2: one row has no other to "
            f"mix with. Received: rows={rows!r}."
        )
    if x is None:
        x = keras_internals.known_inputs(model)
        if x is None:
            raise ValueError(
                f"Argument `x` must be given, since model '{model.name}' does not know its "
                "inputs. Received: x=None."
            )
    length = ROWS if rows is None else Length(rows)
    reasons = _reasons(model, (x, y, sample_weight), length)
    return Independence(tuple(dict.fromkeys(reasons)), rows)


def shared_draws(model, x, rows):
    """Texts of why random numbers are not known to be each example's own; a list.

    Empty where the training-mode forward pass draws none, or is proved.

    Args:
        model: A built `keras.Model`.
        x: Nest of `tf.TensorSpec`s [None, ...].
        rows: Int, of a pass, or None for any number.
    """
    length = ROWS if rows is None else Length(rows)
    graph, reasons = _walked(model, (x, None, None), length)
    return [] if graph is not None and not _draws(graph) else reasons


def _draws(graph):
    """Whether a graph, or one that it calls, draws random numbers or moves a seed on."""
    # All other variables that a pass assigns to are refused.
    types = (*RANDOM, "Assign")
    return any(
        operation.type.removeprefix("Stateless").startswith(types)
        or any(_draws(body) for _, body in graph_peak.called(operation))
        for operation in graph.get_operations()
    )


def independence_of_pass(model, one_pass, y, sample_weight, rows):
    """The `Independence` of a training pass that the checks have traced.

    Args:
        model: A compiled, built `keras.Model`.
        one_pass: `tfdpx.checks.training_pass.TrainingPass`.
        y: Nest of tensors [rows, ...], or None; shapes and dtypes are read.
        sample_weight: As `y`.
        rows: Int, or None if it was traced for any number.
    """
    length = ROWS if rows is None else Length(rows)
    targets = [*Outputs(one_pass.y_pred).tensors, *one_pass.captured]
    reasons = reasons_of_graph(one_pass.graph, one_pass.inputs, targets, length)
    if model.run_eagerly:
        reasons.append(_EAGER)
    data = one_pass.x, y, sample_weight
    reasons += reasons_of_loss(model, data, one_pass.y_pred, length)
    return Independence(tuple(dict.fromkeys(reasons)), rows)


def reasons_of_graph(graph, inputs, targets, rows):
    """Texts of what could not be followed from the inputs of a graph to its targets, a list.

    Args:
        graph: `tf.Graph` of a function.
        inputs: Tensors of `graph`, [rows, ...].
        targets: Tensors of `graph`, which are to have the same rows on their first axis.
        rows: `Length`.
    """
    walk = Walk(rows)
    found = walk(graph, _with_rows(inputs, rows), targets)
    return [*filter(None, (_no_rows(value, rows) for value in found)), *walk.problems]


def reasons_of_loss(model, data, y_pred, rows):
    """Texts of what could not be followed in the loss, a list.

    Args:
        model: A compiled, built `keras.Model`.
        data: `(x, y, sample_weight)`, nests of tensors [rows, ...]; shapes and dtypes are read.
        y_pred: What the model gives, a nest of symbolic tensors [rows, ...].
        rows: `Length`.
    """
    given = batches.Rows(data).tensors, Outputs(y_pred).tensors
    specs = [[_of_rows(t, rows) for t in tensors] for tensors in given]
    try:
        function = tf.function(loss_of_rows(model, *data[:2], y_pred, data[2]), autograph=False)
        graph = function.get_concrete_function(*specs).graph
    except Exception as error:
        return [f"the loss of a batch could not be traced: {error}"]
    walk = Walk(rows)
    inputs = graph.inputs[: len(specs[0]) + len(specs[1])]
    found = walk(graph, _with_rows(inputs, rows), graph.outputs)
    return [*filter(None, map(_no_total, found)), *walk.problems]


def _reasons(model, specs, rows):
    """Texts of what could not be followed in the model, and in the loss if `specs` has targets."""
    _, reasons = _walked(model, specs, rows)
    return [*reasons, _EAGER] if model.run_eagerly else reasons


def _walked(model, specs, rows):
    """The graph of the forward pass or None, and what could not be followed there and in a loss."""
    specs = tf.nest.map_structure(lambda t: _spec_of(t, rows), specs)
    kept = []

    def forward(data):
        kept.append((data, keras_internals.call_model(model, data[0])))
        return Outputs(kept[0][1]).tensors

    keras_internals.clear_added_losses(model)
    try:
        graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    except Exception as error:
        return None, [f"the model could not be traced: {error}"]
    added = [layer.name for layer in keras_internals.added_losses(model)]
    keras_internals.clear_added_losses(model)
    [(data, y_pred)] = kept
    inputs, targets = batches.Rows(data).tensors, Outputs(y_pred).tensors
    reasons = reasons_of_graph(graph, inputs, targets, rows)
    if added:
        reasons.append(f"these layers call `add_loss`: {added}")
    if specs[1] is not None:
        reasons += reasons_of_loss(model, data, y_pred, rows)
    return graph, reasons


def _spec_of(leaf, rows):
    if leaf is None:
        return None
    leaf = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    return tf.TensorSpec([rows.known, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))


def _of_rows(tensor, rows):
    return tf.TensorSpec([rows.known, *tensor.shape[1:]], tensor.dtype)


def _with_rows(tensors, rows):
    """`{id of a tensor: Rows}`, for inputs whose first axis has the rows."""
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
    return None if apart else "an output of the model or of a layer has no rows on its first axis"


def _no_total(value):
    if isinstance(value, Unknown):
        return value.reason
    return None if isinstance(value, (Fixed, Total)) else "the loss is no sum over the examples"
