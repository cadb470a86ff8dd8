"""Whether the graph of a model proves batch independence, or each example is computed alone."""

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals
from tfdpx.independence import rules  # noqa: F401  (says what each type of operation does)
from tfdpx.independence._values import BatchSum, Fixed, PerExample, Unknown
from tfdpx.independence._walk import Walk
from tfdpx.independence.lengths import ONE, ROWS, Length, symbol
from tfdpx.per_example import rows as batches
from tfdpx.per_example.losses import loss_of_rows
from tfdpx.per_example.outputs import Outputs

_KEY = "the key of the microbatch"


@dataclasses.dataclass(frozen=True)
class Independence:
    """Why no example of a microbatch influences another's gradient.

    Attributes:
        reasons: Tuple of str, what could not be followed in the model's graph; the first comes
            first. Empty where the graph proves it.
        rows: Int, the rows of the microbatches that this is about; None for every number of rows.
    """

    reasons: tuple = ()
    rows: int | None = None

    @property
    def verdict(self):
        """`"proved"`; or `"alone"`, where each example is computed as a batch of one."""
        return "alone" if self.reasons else "proved"

    def __str__(self):
        if self.reasons:
            return f"alone: each example is computed as a batch of one, since {self.reasons[0]}"
        number = "any number of rows" if self.rows is None else f"microbatches of {self.rows} rows"
        return f"proved, for {number}"


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
        x = layer_internals.known_inputs(model)
        if x is None:
            raise ValueError(
                f"Argument `x` must be given, since model '{model.name}' does not know its "
                "inputs. Received: x=None."
            )
    length = ROWS if rows is None else Length(rows)
    reasons = _reasons(model, (x, y, sample_weight), length)
    return Independence(tuple(dict.fromkeys(reasons)), rows)


def reasons_of_graph(graph, inputs, targets, rows, key=None, fixed=(), alone=()):
    """Texts of what could not be followed from the inputs of a graph to its targets, a list.

    Args:
        graph: `tf.Graph` of a function.
        inputs: Tensors of `graph`, [rows, ...].
        targets: Tensors of `graph`, which are to have the same rows on their first axis.
        rows: `Length`.
        key: Tensor of `graph` that no other run of it has, from which it draws; or None.
        fixed: Tensors of `graph` that follow from variables alone.
        alone: Pairs of lists of tensors of `graph`, [rows, ...]: the second were computed from the
            first, each row alone.
    """
    values = _with_rows(inputs, rows)
    values.update({id(t): Fixed(tuple(map(Length, t.shape))) for t in fixed})
    if key is not None:
        values[id(key)] = Fixed((Length(2),), sources=frozenset([_KEY]))
    targets = [*targets, *(t for pair in alone for t in pair[0])]
    values.update(_with_rows([t for pair in alone for t in pair[1]], rows))

    def walked(more):
        walk = Walk(rows)
        if key is not None:
            walk.writes(_KEY)
        found = walk(graph, {**values, **more}, targets)
        return found, walk.problems

    found, problems = walked({})
    # A layer that gives every row the same, as positions: whoever reads it must read it by rows.
    copies = {
        id(t): PerExample(value.shape, 0)
        for t, value in zip(targets, found, strict=True)
        if isinstance(value, Fixed) and 0 in value.like_rows and value.shape[0] == rows
        if not value.sources  # No draw, which rows might share.
    }
    if copies:
        found, more = walked(copies)
        problems = {**problems, **more}
    return [*filter(None, (_no_rows(value, rows) for value in found)), *problems]


def independence_of_microbatch(model, microbatch, rows):
    """The `Independence` of a microbatch of the private step, by its own graph.

    Args:
        model: A compiled, built `keras.Model`.
        microbatch: `tfdpx.training._microbatch.Microbatch` of the layerwise engine.
        rows: Int, or None if it was traced for any number.
    """
    inputs, found = microbatch.inputs, microbatch.found
    x, length = batches.Rows(inputs.rows[0]).tensors, ROWS if rows is None else Length(rows)
    reasons = reasons_of_graph(
        microbatch.graph, x, found.of_rows, length, inputs.key, inputs.shared, found.alone
    )
    return Independence(tuple(dict.fromkeys(reasons)), rows)


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
    walked = walk(graph, _with_rows(inputs, rows), graph.outputs)
    return [*filter(None, map(_no_total, walked)), *walk.problems]


def _reasons(model, specs, rows):
    """Texts of what could not be followed in the model, and in the loss if `specs` has targets."""
    specs = tf.nest.map_structure(lambda t: _spec_of(t, rows), specs)
    kept = []

    def forward(data):
        kept.append((data, model_internals.call_model(model, data[0])))
        return Outputs(kept[0][1]).tensors

    layer_internals.clear_added_losses(model)
    try:
        graph = tf.function(forward, autograph=False).get_concrete_function(specs).graph
    except Exception as error:
        return [f"the model could not be traced: {error}"]
    added = layer_internals.adding_losses(model)
    layer_internals.clear_added_losses(model)
    [(data, y_pred)] = kept
    inputs, targets = batches.Rows(data).tensors, Outputs(y_pred).tensors
    reasons = reasons_of_graph(graph, inputs, targets, rows)
    if added:
        reasons.append(f"these layers call `add_loss`: {added}")
    if specs[1] is not None:
        reasons += reasons_of_loss(model, data, y_pred, rows)
    return reasons


def _spec_of(leaf, rows):
    if leaf is None:
        return None
    leaf = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)
    return tf.TensorSpec([rows.known, *leaf.shape[1:]], tf.as_dtype(leaf.dtype))


def _of_rows(tensor, rows):
    return tf.TensorSpec([rows.known, *tensor.shape[1:]], tensor.dtype)


def _with_rows(tensors, rows):
    """`{id of a tensor: PerExample}`, for inputs whose first axis has the rows."""
    given = {}
    for tensor in tensors:
        behind = [
            symbol(f"{tensor.name}:{axis}") if length is None else Length(length)
            for axis, length in enumerate(tensor.shape[1:], 1)
        ]
        given[id(tensor)] = PerExample((rows, *behind), 0)
    return given


def _no_rows(value, rows):
    if isinstance(value, Unknown):
        return value.reason
    apart = isinstance(value, PerExample) and (value.axis, value.after, value.shape[0]) == (
        0,
        ONE,
        rows,
    )
    return None if apart else "an output of the model or of a layer has no rows on its first axis"


def _no_total(value):
    if isinstance(value, Unknown):
        return value.reason
    return None if isinstance(value, (Fixed, BatchSum)) else "the loss is no sum over the examples"
