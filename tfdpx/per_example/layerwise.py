"""Per-example gradients by book-keeping: one run forward, one back over activations, then rules."""

from __future__ import annotations

import copy
import functools
from typing import Any

import keras
import tensorflow as tf

from tfdpx._keras import model_internals, step_context, tensorflow_internals
from tfdpx.per_example._result import EngineOutput
from tfdpx.per_example._update import Update
from tfdpx.per_example.capture import Recorder
from tfdpx.per_example.cost_model import Cost, LayerChoice, choose
from tfdpx.per_example.invalid_values import invalid_as_nan, invalid_left_out
from tfdpx.per_example.layout import find_layout
from tfdpx.per_example.losses import row_losses
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.randomness import keyed
from tfdpx.per_example.rounding import add_up, squared_norms
from tfdpx.per_example.rows import along
from tfdpx.per_example.rules.base import sum_each, zero_excluded


class LayerwiseEngine:
    """Captures what each layer saw and forms norms and clipped sums layer by layer.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of tensors [rows, ...] like those to come; only shapes and dtypes are read.
        num_views: Int K, rows of the batch per example.

    Attributes:
        choices: The `LayerChoice` of each layer, from the last call.
        work: The `Work` of one row.

    Raises:
        UnexplainedVariables: If the gradient of a trainable variable is not known by example.
    """

    def __init__(self, model, x, num_views):
        self._model = model
        self._num_views = num_views
        self._variables = model.trainable_variables
        self._layout, self.work = find_layout(model, x)
        self.choices = []

    @property
    def suits_any_number(self):
        """Whether no rule of a user's is taken: it may depend on the number that it gets."""
        return all(each.rule.__module__.split(".")[0] == "tfdpx" for each in self._layout)

    def with_views(self, num_views):
        """The same engine for another number of rows an example."""
        other = copy.copy(self)
        other._num_views = num_views
        return other

    def update(self):
        """The `Update` that the passes of one update share."""
        return Update((each.layer, each.rule) for each in self._layout)

    def __call__(self, x, y, sample_weight, update=None, key=None, shares=None):
        """An `EngineOutput` for rows [B * K, ...] of `x`, `y` and `sample_weight`.

        With an `Update`, its `finished` is left to do to the sums, once for all passes. Random
        layers draw by `key`, int64 [2], of no other pass; without one, by Keras's seeds. The
        gradient of an example is that of its rows' losses times `shares`, float32 [B * K], added
        up; without them, their mean.
        """
        model, shared = self._model, update or self.update()
        recorder = self.recorder(shared)
        with recorder.taping(), invalid_as_nan():
            with step_context.recording(recorder), keyed(model, key):
                y_pred = model_internals.call_model(model, x)
            losses = row_losses(model, x, y, y_pred, sample_weight)
        if shares is None:
            cotangents = [c / self._num_views for c in losses.cotangents]
        else:
            cotangents = [c * tf.cast(along(shares, c), c.dtype) for c in losses.cotangents]
        with invalid_left_out():  # As gradients of `tf.sort` scatter.
            groups = self.rules(recorder, losses.predictions, cotangents)
        small, norms = [], [tf.zeros_like(losses.losses[:: self._num_views])]
        for group in groups:
            # Not before the gradients are there: what follows from the layers' inputs alone would
            # be computed on the way forward, and kept.
            with tf.control_dependencies(group.output_gradients):
                small += group.small_gradients
                norms += [group.squared_norms()] if group.large_variables else []
        variables, gradients = [v for v, _ in small], [g for _, g in small]
        norms = add_up(norms + ([squared_norms(gradients)] if small else []))
        self.choices = [choice for group in groups for choice in group.choices]

        def clipped(factors):
            with tf.control_dependencies([factors]):
                finite = tf.reduce_all(tf.math.is_finite(norms))
                sums = dict(zip(map(id, variables), sum_each(gradients, factors), strict=True))
                summed = [group for group in groups if group.large_variables]
                unmasked = [t for group in summed for t in group.inputs_to_mask]
                masked = iter(zero_excluded(unmasked, factors, finite))
                for group in summed:
                    own = [next(masked) for _ in group.inputs_to_mask]
                    sums_of_group = group.clipped_sum(factors, *([own] if own else []))
                    sums.update(zip(map(id, group.large_variables), sums_of_group, strict=True))
                    shared.add_post_sum_transforms(group.layer, group.post_sum_transforms)
            sums = [
                sums[id(v)] if id(v) in sums else tf.zeros(v.shape, "float32")
                for v in self._variables
            ]
            return sums if update else shared.finished(self._variables, sums)

        of_rows = [*Outputs(y_pred).tensors, *(t for call in recorder.calls for t in call.outputs)]
        alone = [call.alone for call in recorder.calls if call.alone is not None]
        return EngineOutput(
            losses.losses, losses.output_losses, y_pred, norms, clipped, of_rows, alone
        )

    def recorder(self, update=None):
        """A `Recorder` for one run of the model, with what the passes of an update share."""
        update = update or self.update()
        compiled = tensorflow_internals.is_for_xla(self._model)
        return Recorder(self._variables, self._layout, self._num_views, update, compiled)

    def rules(self, recorder, predictions, cotangents):
        """The rules, grouped, for the calls that `recorder` saw.

        Args:
            recorder: The `Recorder` of one run of the model.
            predictions: List of tensors, what it gave.
            cotangents: List of tensors, the gradients at `predictions`.
        """
        gradients = recorder.gradients(predictions, cotangents)
        return _groups(
            [
                call.rule(call, output_gradients, self._num_views, self._trained_by(call))
                for call, output_gradients in zip(recorder.calls, gradients, strict=True)
            ]
        )

    def _trained_by(self, call):
        wanted = {id(v) for v in self._variables}
        return [v for v in call.layer.trainable_variables if id(v) in wanted]


def explain(model: keras.Model, x: Any, views: int = 1) -> list[LayerChoice]:
    """How the private step would clip each layer of `model`, without running it.

    Args:
        model: A built, compiled `keras.Model`.
        x: Nest of arrays or tensors [B * K, ...] like one pass; only shapes and dtypes matter.
        views: Int, K, rows of the batch per example.

    Returns:
        List of `LayerChoice`, one for each call of a trainable layer.
    """
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    engine = LayerwiseEngine(model, x, views)

    def outputs_and_rules(x):
        recorder = engine.recorder()
        with recorder.taping(), step_context.recording(recorder):
            y_pred = tf.nest.flatten(model_internals.call_model(model, x))
        y_pred = [t for t in y_pred if t.dtype.is_floating]
        groups = engine.rules(recorder, y_pred, [tf.ones_like(t) for t in y_pred])
        engine.choices = [choice for group in groups for choice in group.choices]
        return y_pred

    with step_context.recording(None):
        tf.function(outputs_and_rules, autograph=False).get_concrete_function(x)
    return engine.choices


class _Joint:
    """Several calls that share variables: their gradients are added before the norm is taken."""

    layer, post_sum_transforms, small_gradients, inputs_to_mask = None, {}, (), ()

    def __init__(self, rules):
        self._rules = rules
        self.large_variables = list({id(v): v for rule in rules for v in rule.variables}.values())
        self.output_gradients = [g for rule in rules for g in rule.output_gradients]

    @property
    def choices(self):
        """One a call: all are instantiated."""
        only = {"instantiate": Cost(), "contract": Cost()}
        return [choose(rule.layer.name, type(rule).__name__, only) for rule in self._rules]

    @functools.cached_property
    def _instances(self):
        totals = {}
        for rule in self._rules:
            for variable, gradient in zip(
                rule.variables, rule.per_example_gradients(), strict=True
            ):
                totals[id(variable)] = totals.get(id(variable), 0.0) + gradient
        return [totals[id(v)] for v in self.large_variables]

    def squared_norms(self):
        return squared_norms(self._instances)

    def clipped_sum(self, factors):
        return sum_each(self._instances, factors)


def _groups(rules):
    """Rules as they are, or joined where they share a variable."""
    groups = []
    for rule in rules:
        mine = {id(v) for v in rule.variables}
        sharing = [g for g in groups if any(mine & {id(v) for v in r.variables} for r in g)]
        groups = [g for g in groups if g not in sharing]
        groups.append([r for g in sharing for r in g] + [rule])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(rules):
    first = rules[0]
    alike = all(type(r) is type(first) and r.layer is first.layer for r in rules)
    return (first.joined(rules) if alike else None) or _Joint(rules)
