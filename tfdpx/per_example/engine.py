"""Computes per-example gradients by mapping a function of one example over a batch.

The function runs the model's forward pass, the loss and the backward pass over activations on the K
rows of one example. *The map* applies it to all examples with `tf.vectorized_map`. The function
cannot reach another example, so no example can influence another's gradient, whatever the model and
the loss do. For layers with a rule, the map returns their inputs and output gradients, and the rule
forms norms and clipped sums from these. For all other variables, the map returns the whole gradient
of each example.

If all parts of a model are listed in `rowwise`, the model treats each row by itself. Then the
function runs on all rows at once, and tracing takes a third of the time.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context, tensorflow_internals
from tfdpx.per_example import rowwise
from tfdpx.per_example.capture import ReadOutside, Recorder
from tfdpx.per_example.cost_model import Choices, Cost, LayerChoice, choose
from tfdpx.per_example.layout import find_layout
from tfdpx.per_example.loss import row_losses, sum_of_outputs
from tfdpx.per_example.random_layers import seeds, starting_from
from tfdpx.per_example.rounding import add_up, squared_norms
from tfdpx.per_example.rows import (
    Outputs,
    Rows,
    along,
    merge_views,
    split_views,
    sum_each,
    zero_excluded,
)
from tfdpx.per_example.vectorize import vectorized_map


@dataclasses.dataclass(frozen=True)
class EngineOutput:
    """The output of the engine for one microbatch of B examples with K views each.

    Attributes:
        losses: float32 [B * K], the loss of each row.
        tracked: List of float32 [B * K], as in `RowLosses`.
        y_pred: The model's output, a nest of tensors [B * K, ...].
        squared_norms: float32 [B], the squared l2 norm of each example's gradient with respect to
            all trainable variables. The gradient is the mean over the views of the example.
        clipped_sums: Function that takes a factor for each example, float32 [B]. It multiplies each
            example's gradient by its factor and returns the sum over examples, a list of float32
            tensors in the order of `model.trainable_variables`. An example with the factor zero
            contributes exactly zero.
    """

    losses: tf.Tensor
    tracked: list
    y_pred: Any
    squared_norms: tf.Tensor
    clipped_sums: Callable


class Engine:
    """Forms norms and clipped sums of per-example gradients.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of tensors [rows, ...] with the shapes and dtypes of later inputs. The values are
            not read.
        num_views: Int K, the number of rows of an example.

    Attributes:
        choices: List with a `LayerChoice` for each layer, set by the last call of the engine.
        work: The `Work` of one row. Its `elements` include the whole gradients that the map forms.
        loops: Bool, whether a loop computes one example after the other. The loop is necessary if
            TensorFlow cannot vectorize the model.
    """

    def __init__(self, model, x, num_views):
        self._model, self._num_views = model, num_views
        self._not_rowwise = rowwise.find_obstacle(model)
        self._layout, self.work = find_layout(model, x, is_rowwise=self._not_rowwise is None)
        num_whole = sum(math.prod(v.shape) for v in self._layout.whole)
        # An example's whole gradients are divided equally among its rows.
        elements = self.work.elements + num_whole / num_views
        self.work = dataclasses.replace(self.work, elements=elements)
        self.choices: list[LayerChoice] = []
        self.loops = False

    @property
    def obstacle(self):
        """Returns a str, the reason why examples are mapped; None if all rows run at once."""
        return self._not_rowwise or self._layout.reason

    @property
    def mode(self):
        """Returns "mapped" or "batched", followed by the reason, as one str."""
        if self.obstacle is None:
            return "batched: every layer treats each example by itself"
        return f"mapped: each example is computed by itself, because {self.obstacle}"

    @property
    def suits_any_number(self):
        """Returns whether microbatches may differ in their number of rows.

        The result is True if tfdpx defines all rules. A user's rule may need a known number of
        rows.
        """
        calls = (call for call in self._layout.calls if call.is_captured)
        return all(call.rule.__module__.split(".")[0] == "tfdpx" for call in calls)

    def update(self):
        """Returns the `Update` that all microbatches of one update share."""
        return Update((call.layer, call.rule) for call in self._layout.calls if call.is_captured)

    def __call__(self, x, y, sample_weight, update=None, key=None, shares=None):
        """Returns an `EngineOutput` for rows [B * K, ...] of `x`, `y` and `sample_weight`.

        Args:
            x: Nest of tensors [B * K, ...].
            y: As `x`, or None.
            sample_weight: As `x`, or None.
            update: Optional `Update`. If passed, the caller must call its `apply_transforms` once,
                on the sums over all microbatches.
            key: Optional int64 tensor [2], the secret key for the random numbers that layers draw.
                No other call may get the same key.
            shares: Optional float32 [B * K], the weight of each row's loss in the loss of its
                example. The default is 1 / K.
        """
        shared_update = update or self.update()
        pass_ = self.differentiate((x, y, sample_weight), shared_update, key, shares)
        groups = self._groups(pass_)
        variables, gradients = list(self._layout.whole), list(pass_.whole)
        norms = [tf.zeros_like(pass_.losses[:: self._num_views])]
        for group in groups:
            # The norms must wait for the output gradients. Otherwise products of the layers' inputs
            # would be computed in the forward pass, and stay in memory.
            with tf.control_dependencies(group.output_gradients):
                variables += [v for v, _ in group.small_gradients]
                gradients += [g for _, g in group.small_gradients]
                norms += [group.squared_norms()] if group.large_variables else []
        norms = add_up(norms + ([squared_norms(gradients)] if gradients else []))

        def form_clipped_sums(factors):
            with tf.control_dependencies([factors]):
                finite = tf.reduce_all(tf.math.is_finite(norms))
                sums = dict(zip(map(id, variables), sum_each(gradients, factors), strict=True))
                large_groups = [group for group in groups if group.large_variables]
                unmasked = [t for group in large_groups for t in group.inputs_to_mask]
                masked = iter(zero_excluded(unmasked, factors, finite))
                for group in large_groups:
                    inputs_of_group = [next(masked) for _ in group.inputs_to_mask]
                    sums_of_group = group.clipped_sum(
                        factors, *([inputs_of_group] if inputs_of_group else [])
                    )
                    sums.update(zip(map(id, group.large_variables), sums_of_group, strict=True))
                    shared_update.add_post_sum_transforms(group.layer, group.post_sum_transforms)
            sums = [
                sums[id(v)] if id(v) in sums else tf.zeros(v.shape, "float32")
                for v in self._layout.variables
            ]
            return sums if update else shared_update.apply_transforms(self._layout.variables, sums)

        return EngineOutput(pass_.losses, pass_.tracked, pass_.outputs, norms, form_clipped_sums)

    def explain(self, x):
        """Sets `choices` for rows with the shapes of `x`. The model is traced, but not run."""
        update = self.update()
        pass_ = self.differentiate((x, None, None), update, None, None, has_loss=False)
        self._groups(pass_)

    def _groups(self, pass_):
        """Returns the rules of the calls in a pass. Rules that share a variable are joined."""
        rules = [
            call.rule(call, output_gradients, self._num_views, self._layout.trained_by(call))
            for call, output_gradients in zip(pass_.calls, pass_.output_gradients, strict=True)
        ]
        groups = _join_shared(rules)
        choices = [choice for group in groups for choice in group.choices]
        choices += self._layout.choices_of_whole(self._model, pass_.whole)
        names = [call.layer.name for call in self._layout.calls]
        order = {name: place for place, name in reversed(list(enumerate(names)))}
        self.choices = sorted(choices, key=lambda choice: order.get(choice.layer, len(order)))
        return groups

    def differentiate(self, data, update, key, shares, has_loss=True):
        """Runs a forward and a backward pass over `data`, and returns a `_Pass`.

        `data` is `(x, y, sample_weight)`, nests of tensors [B * K, ...]. If `has_loss` is False,
        the sum of the model's outputs takes the place of the loss. The other arguments are as for
        `__call__`.
        """
        # The model may have changed after the layout was made.
        self._not_rowwise = self._not_rowwise or rowwise.find_obstacle(self._model)
        batch, num_views = Rows(data), self._num_views
        rows = tf.shape(batch.tensors[0])[0]
        is_batched = self.obstacle is None
        examples = 1 if is_batched else rows // num_views
        key = tf.zeros([2], tf.int64) if key is None else key
        num_generators = len(layer_internals.seed_generators(self._model))
        states = seeds(key, [examples + rows, num_generators])
        if shares is None:
            shares = tf.fill([rows], 1.0 / num_views)
        row_tensors = batch.tensors, shares, states[examples:]
        while True:
            try:
                return self._map(batch, row_tensors, states[:examples], update, has_loss)
            except ReadOutside as error:
                self._layout = self._layout.without(error.variables, error.reason)
                if is_batched:  # The examples are mapped from now on, and each needs a state.
                    return self.differentiate(data, update, key, shares, has_loss)

    def _map(self, batch, row_tensors, states, update, has_loss):
        """Calls `_one` for each example by `vectorized_map`, or once for all rows."""
        passes = []

        def run_pass(element):
            (tensors, shares, loss_states), forward_states = element
            pass_ = self._one(
                batch.pack(tensors), shares, forward_states, loss_states, update, has_loss
            )
            passes.append(pass_)
            return pass_.row_tensors, pass_.whole

        if self.obstacle is None:
            tensors, whole = run_pass((row_tensors, states[0]))
            return passes[-1].with_tensors(tensors, whole)
        examples = tf.nest.map_structure(lambda t: split_views(t, self._num_views), row_tensors)
        tensors, whole = vectorized_map(
            run_pass,
            (examples, states),
            f"Model '{self._model.name}'",
            tensorflow_internals.is_for_xla(self._model),
            loop=self.loops,
            shared=update.tensors,
        )
        return passes[-1].with_tensors(tf.nest.map_structure(merge_views, tensors), whole)

    def _one(self, data, shares, forward_states, loss_states, update, has_loss):
        """Returns the `_Pass` over one example's rows, or over all rows if they run at once."""
        model, (x, y, sample_weight) = self._model, data
        recorder = Recorder(self._layout, update, tensorflow_internals.is_for_xla(model))
        without_cudnn = layer_internals.without_cudnn(model)
        with recorder.taping(), step_context.masking_invalid(), without_cudnn:
            with step_context.recording(recorder), starting_from(model, forward_states):
                y_pred = model_internals.call_model(model, x)
            if has_loss:
                losses = row_losses(
                    *(model, x, y, y_pred, sample_weight, loss_states),
                    *(self._layout.whole, update.tensors, self.obstacle is None),
                )
            else:
                losses = sum_of_outputs(y_pred, self._layout.whole)
        cotangents = [c * tf.cast(along(shares, c), c.dtype) for c in losses.cotangents]
        recorder.check_shapes(data)
        at_outputs, whole = recorder.gradients(losses.predictions, cotangents)
        whole = [
            g + tf.tensordot(shares, direct, 1)
            for g, direct in zip(whole, losses.direct, strict=True)
        ]
        y_pred = Outputs(y_pred)
        return _Pass(losses.losses, losses.tracked, y_pred, recorder.calls, at_outputs, whole)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The results of a forward and a backward pass over n rows.

    Attributes:
        losses: float32 [n], the loss of each row.
        tracked: List of float32 [n], as in `RowLosses`.
        outputs: `Outputs` of the model.
        calls: List of the captured `Call`s.
        output_gradients: List that contains, for each call, a list of the gradients [n, ...] at its
            outputs.
        whole: List of float32 tensors, the whole gradients of variables without a rule. A gradient
            is [*variable.shape] in the function of one example, and [B, *variable.shape] after the
            map.
    """

    losses: tf.Tensor
    tracked: list
    outputs: Any
    calls: list
    output_gradients: list
    whole: list

    @property
    def row_tensors(self):
        """Returns all tensors [n, ...] of this pass, as a nest."""
        inputs = [call.tensors for call in self.calls]
        return self.losses, self.tracked, self.outputs.tensors, inputs, self.output_gradients

    def with_tensors(self, row_tensors, whole):
        """Returns a copy of this pass with `row_tensors` and `whole` in place of its tensors.

        The copy's `outputs` is a nest of tensors, as the model returns it.
        """
        tf.nest.map_structure(
            lambda t, former: t.set_shape([None, *former.shape[1:]]), row_tensors, self.row_tensors
        )
        losses, tracked, outputs, inputs, output_gradients = row_tensors
        calls = [c.with_tensors(t) for c, t in zip(self.calls, inputs, strict=True)]
        outputs = self.outputs.rebuild(outputs)
        return _Pass(losses, tracked, outputs, calls, output_gradients, whole)


def explain(model: keras.Model, x: Any, views: int = 1) -> list[LayerChoice]:
    """Shows how the private step would clip each layer of `model`, without running it.

    Args:
        model: A built, compiled `keras.Model`.
        x: Nest of arrays or tensors [B * K, ...], like one microbatch. Only shapes and dtypes
            matter.
        views: Int K, the number of rows of an example.

    Returns:
        List of `LayerChoice`, which prints as a table. Each call of a trainable layer with a rule
        has one entry (a recurrent cell has one for each kernel). Each layer without a rule also has
        one, which states the bytes of its whole gradients.
    """
    x = tf.nest.map_structure(tf.convert_to_tensor, x)
    engine = Engine(model, x, views)
    function = tf.function(engine.explain, autograph=False)
    function.get_concrete_function(x)
    return Choices(engine.choices)


class _Joint:
    """A rule for calls that share variables. It takes norms of the sum of the calls' gradients."""

    layer, post_sum_transforms, small_gradients, inputs_to_mask = None, {}, (), ()

    def __init__(self, rules):
        self._rules = rules
        self.large_variables = list({id(v): v for rule in rules for v in rule.variables}.values())
        self.output_gradients = [g for rule in rules for g in rule.output_gradients]

    @property
    def choices(self):
        """Returns a list with a `LayerChoice` for each call. All calls instantiate gradients."""
        costs = {"instantiate": Cost(), "contract": Cost()}
        return [choose(rule.layer.name, type(rule).__name__, costs) for rule in self._rules]

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


def _join_shared(rules):
    """Returns a list of the rules, where rules that share a variable are joined into one."""
    groups = []
    for rule in rules:
        variable_ids = {id(v) for v in rule.variables}
        sharing = [g for g in groups if any(variable_ids & {id(v) for v in r.variables} for r in g)]
        groups = [g for g in groups if g not in sharing]
        groups.append([r for g in sharing for r in g] + [rule])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(rules):
    first = rules[0]
    are_of_one_layer = all(type(r) is type(first) and r.layer is first.layer for r in rules)
    return (first.joined(rules) if are_of_one_layer else None) or _Joint(rules)


class Update:
    """The tensors that are computed once for all microbatches of an update.

    These tensors depend only on the weights, so all microbatches can share them.

    Args:
        units: Iterable of pairs of a layer and its rule class.
    """

    def __init__(self, units=()):
        self._units = list(units)
        self._shared = {id(layer): rule.shared(layer) for layer, rule in self._units}
        self._post_sum_transforms = {}

    def again(self):
        """Returns a new `Update` for the same layers, computed from the current weights."""
        return Update(self._units)

    @property
    def tensors(self):
        """Returns a list of the shared tensors."""
        return [t for t in tf.nest.flatten(self._shared) if t is not None]

    def with_tensors(self, tensors):
        """Returns a copy of this update with other shared tensors, such as inputs of a graph."""
        twin, replacements = copy.copy(self), iter(tensors)
        twin._shared = tf.nest.map_structure(
            lambda t: None if t is None else next(replacements), self._shared
        )
        return twin

    def shared(self, layer):
        """Returns the result of `Rule.shared` for a layer."""
        return self._shared[id(layer)]

    def add_post_sum_transforms(self, layer, transforms):
        """Stores a layer's `Rule.post_sum_transforms`, which are the same in all microbatches."""
        for key, function in transforms.items():
            self._post_sum_transforms[key] = layer, function

    def apply_transforms(self, variables, sums):
        """Applies the rules' `post_sum_transforms` to the clipped sums of an update.

        Args:
            variables: The trained `keras.Variable`s.
            sums: List of float32 tensors, for each variable the sum over all microbatches.

        Returns:
            List of float32 tensors, the transformed `sums`.
        """
        results = list(sums)
        for place, variable in enumerate(variables):
            if id(variable) in self._post_sum_transforms:
                layer, function = self._post_sum_transforms[id(variable)]
                results[place] = function(sums[place], self.shared(layer))
        return results
