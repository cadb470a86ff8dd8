"""What metrics must not do: keep what is not their own, or end the run."""

import tensorflow as tf

from tfdpx._keras import metric_internals
from tfdpx.independence import raising
from tfdpx.independence.hidden_state import Found
from tfdpx.per_example.invalid_values import invalid_left_out
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.rows import Rows


def problems_of_metrics(model, data, y_pred, rows, absent):
    """Texts of how metrics change state other than their own, or may end the run.

    Args:
        model: A compiled, built `keras.Model`.
        data: `(x, y, sample_weight)`, nests of tensors [rows, ...]; shapes and dtypes are read.
        y_pred: What the model gives, a nest of symbolic tensors [rows, ...].
        rows: Int, or None for any number.
        absent: Bool, whether some of them may be.
    """
    given, predictions = Rows(data), Outputs(y_pred)

    def metrics(tensors, predicted, present=None):
        x, y, sample_weight = given.pack(tensors)
        y_pred = predictions.rebuild(predicted)
        with invalid_left_out():
            return metric_internals.compute_metrics(model, x, y, y_pred, sample_weight, present)

    specs = [
        [tf.TensorSpec([rows, *t.shape[1:]], t.dtype) for t in tensors]
        for tensors in (given.tensors, predictions.tensors)
    ]
    flags = [tf.TensorSpec([rows], tf.bool)] if absent else []
    graph = tf.function(metrics, autograph=False).get_concrete_function(*specs, *flags).graph
    # A metric may have a weight as an attribute, which Keras then counts among its variables.
    others = {id(v) for v in [*model.weights, *model.optimizer.variables]}
    own = [v for v in model.metrics_variables if id(v) not in others]
    # Reading a metric adds it up over the hosts.
    yield from Found(graph, model, own, ("Collective",)).problems("`compute_metrics`")
    ends = raising.problems(graph, graph.inputs[: len(specs[0]) + len(specs[1])], varying=True)
    yield from (f"In `compute_metrics` one example could end the run: {reason}." for reason in ends)
