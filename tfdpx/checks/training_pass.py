"""One forward pass and its backward pass over activations, of the size of a real one."""

import dataclasses

import tensorflow as tf

from tfdpx import keras_internals
from tfdpx.checks import made_up
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.rows import Rows

# Of numbers that are squared and added up in single precision.
_LARGEST = 1e15


@dataclasses.dataclass(frozen=True)
class Captured:
    """What a pass gave, rows as they stood in its batch.

    Attributes:
        batch: The `made_up.Batch`.
        predictions: List of tensors [rows, ...], the model's outputs, masks and logits included.
        outputs: List, one a captured layer and one of the predictions, of lists of fingerprints,
            one a tensor: float32 [rows, 3], two random projections of each row and its norm. What
            is not finite, or nearly, counts as one.
        gradients: As `outputs`, of the gradients there, without the predictions.
    """

    batch: made_up.Batch
    predictions: list
    outputs: list
    gradients: list


class TrainingPass:
    """What the private step runs on one pass, but for the rules: traced, and run on several data.

    The gradients are those of random weights on the predictions. A loss is known row by row, so no
    loss can hide what these show.

    Args:
        model: A built `keras.Model`.
        engine: The engine whose recorder captures layers; one without gives predictions alone.
        specs: Nest of `tf.TensorSpec`s [None, ...]; other axes are unknown where they will be.
        rows: Int, or None for any number.
        fingerprints: Bool, whether it can be run; if not, there is less to trace.

    Attributes:
        graph: The `tf.Graph` that was traced.
        added: List of names of the layers that called `add_loss`.
        layers: List of names of the captured layers, in the order of their calls.
        x: Nest of tensors [rows, ...] of the graph, the model's inputs.
        inputs: The same as a list.
        y_pred: What the model gives there, a nest of tensors.
        captured: What the captured layers give there, a list of tensors.
    """

    def __init__(self, model, engine, specs, rows, fingerprints=False):
        self._model = model
        self._engine = engine
        self._summary = _fingerprints if fingerprints else _nothing
        self.layers = []
        keras_internals.clear_added_losses(model)
        flat = tf.nest.flatten(specs)
        self._rows = Rows(specs, [True] * len(flat))
        order, emphasis = tf.TensorSpec([rows], tf.int32), tf.TensorSpec([rows], tf.float32)
        traced = tf.function(self._run, autograph=False).get_concrete_function(
            [tf.TensorSpec([rows, *s.shape[1:]], s.dtype) for s in flat], order, emphasis
        )
        self.added = [layer.name for layer in keras_internals.added_losses(model)]
        keras_internals.clear_added_losses(model)
        self.graph = traced.graph
        self.inputs = traced.graph.inputs[: len(flat)]
        self.x = self._rows.pack(self.inputs)
        self.y_pred, self.captured = self._kept
        # A model that runs eagerly is looked at as it runs.
        self._function = self._run if model.run_eagerly else traced

    def __call__(self, batch):
        """The `Captured` of a `made_up.Batch`."""
        if self._summary is _nothing:
            raise ValueError("Only a pass with `fingerprints=True` can be run.")
        order = tf.constant(batch.order, tf.int32)
        emphasis = tf.constant(batch.emphasis, tf.float32)
        return Captured(batch, *self._function(Rows(batch.x).tensors, order, emphasis))

    def _run(self, tensors, order, emphasis):
        model, x = self._model, self._rows.pack(tensors)
        if not hasattr(self._engine, "recorder"):
            y_pred = keras_internals.call_model(model, x)
            self._kept, tensors = (y_pred, []), Outputs(y_pred).tensors
            return tensors, self._summary([tensors]), []
        recorder = self._engine.recorder()
        with recorder.taping():
            with keras_internals.recording(recorder):
                y_pred = keras_internals.call_model(model, x)
        predictions = Outputs(y_pred)
        targets = predictions.select(predictions.tensors)
        weights = [_weights(t, order, emphasis) for t in targets]
        gradients = recorder.gradients(targets, weights)
        self.layers = [call.layer.name for call in recorder.calls]
        self._kept = y_pred, [t for call in recorder.calls for t in call.outputs]
        outputs = [*(call.outputs for call in recorder.calls), predictions.tensors]
        return predictions.tensors, *self._summary((outputs, gradients))


def _nothing(nest):
    """As many lists as there are, without what is in them."""
    return [[] for _ in nest]


def _fingerprints(nest):
    """See `Captured`. In the graph, so that no two layers' tensors need memory at once."""
    directions = {}

    def fingerprint(tensor):
        rows = tf.reshape(tensor, [tensor.shape[0] or tf.shape(tensor)[0], -1])
        rows = tf.cast(rows, "float32")
        # Not finite, or too large to square.
        rows = tf.where(tf.abs(rows) < _LARGEST, rows, 1.0)
        length = rows.shape[1]
        if length is None or length not in directions:
            directions[length] = tf.random.stateless_normal([tf.shape(rows)[1], 2], [3, 4])
        norms = tf.sqrt(tf.reduce_sum(rows * rows, axis=1, keepdims=True))
        return tf.concat([rows @ directions[length], norms], axis=1)

    return tf.nest.map_structure(fingerprint, nest)


def _weights(target, order, emphasis):
    """Normal random numbers like `target`; an example's stay with it in any order."""
    drawn = tf.random.stateless_normal(tf.shape(target), [1, 2], dtype="float32")
    drawn *= tf.reshape(emphasis, [-1] + [1] * (target.shape.rank - 1))
    return tf.cast(tf.gather(drawn, order), target.dtype)
