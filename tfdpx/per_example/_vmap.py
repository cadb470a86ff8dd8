"""The oracle engine: the whole model differentiated one example at a time, by `vectorized_map`."""

import copy
import functools

import tensorflow as tf

from tfdpx._keras import model_internals, step_context
from tfdpx.per_example._result import EngineOutput
from tfdpx.per_example._update import Update
from tfdpx.per_example.invalid_values import invalid_as_nan, invalid_left_out
from tfdpx.per_example.layout import measured_work
from tfdpx.per_example.losses import loss_of_one
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.randomness import RngReplay, keyed
from tfdpx.per_example.rounding import squared_norms
from tfdpx.per_example.rows import Rows, merge_views, split_views
from tfdpx.per_example.rules.base import sum_examples
from tfdpx.per_example.vectorize import NotVectorized, vectorized_map


class VmapEngine:
    """Instantiates every example's whole gradient. Slow and large, and right for any model.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of tensors [rows, ...] like those to come; only shapes and dtypes are read.
        num_views: Int K, rows of the batch per example.

    Attributes:
        work: The `Work` of one row.
        loops: Whether one example is computed after the other, since TensorFlow cannot vectorize
            the model.
    """

    def __init__(self, model, x, num_views):
        self.work = measured_work(model, x)
        self._model = model
        self._num_views = num_views
        self.loops = False

    suits_any_number = True

    def looping(self):
        """The same engine, which computes one example after the other and vectorizes nothing."""
        other = copy.copy(self)
        other.loops = True
        return other

    def with_views(self, num_views):
        """The same engine for another number of rows an example."""
        other = copy.copy(self)
        other._num_views = num_views
        return other

    def update(self):
        """As `LayerwiseEngine.update`; nothing is shared."""
        return Update()

    def __call__(self, x, y, sample_weight, update=None, key=None, shares=None):
        """As `LayerwiseEngine.__call__`; the update shares nothing."""
        del update
        model, num_views = self._model, self._num_views
        batch = Rows((x, y, sample_weight))
        if shares is None:
            shares = tf.fill(tf.shape(batch.tensors[0])[:1], 1.0 / num_views)
        with keyed(model, key):
            draws = RngReplay(model)
        made = []

        def one(inputs):
            seeds, rows, shares = inputs
            x, y, sample_weight = batch.pack(rows)
            with (
                tf.GradientTape() as tape,
                step_context.recording(None),
                draws.of_example(seeds),
                invalid_as_nan(alone=True) as conditions,
            ):
                y_pred = model_internals.call_model(model, x)
                made.append(Outputs(y_pred))
                of_one = loss_of_one(model, x, y, y_pred, sample_weight)
                values = [
                    of_one([t[k] for t in rows], [t[k] for t in made[-1].tensors])
                    for k in range(num_views)
                ]
                losses, *each = [tf.stack(of_all) for of_all in zip(*values, strict=True)]
                losses = conditions.applied(losses)
                mean = tf.reduce_sum(losses * shares)
            with invalid_left_out():
                gradients = tape.gradient(
                    mean,
                    [v.value for v in model.trainable_variables],
                    unconnected_gradients=tf.UnconnectedGradients.ZERO,
                )
            gradients = [tf.cast(tf.convert_to_tensor(g), "float32") for g in gradients]
            return losses, each, made[-1].tensors, gradients

        examples = [split_views(t, num_views) for t in batch.tensors]
        seeds = draws.seeds(tf.shape(examples[0])[0])
        inputs = seeds, examples, split_views(shares, num_views)
        mapped = functools.partial(vectorized_map, one, inputs, "The model")
        try:
            losses, each, tensors, gradients = mapped(loop=self.loops)
        except NotVectorized:
            self.loops = True
            losses, each, tensors, gradients = mapped(loop=True)
        return EngineOutput(
            merge_views(losses),
            [merge_views(t) for t in each],
            made[-1].rebuild([merge_views(t) for t in tensors]),
            squared_norms(gradients),
            lambda factors: [sum_examples(g, factors) for g in gradients],
        )
