"""Runs a model on dummy rows to find out which calls of its layers can be captured.

If a call is captured (see `capture`), the layer's rule forms the gradients of its variables. The
gradients of all other variables are formed one example at a time by `tf.vectorized_map` (see
`engine`).

The model runs on a batch of two rows and on a batch of three. A tensor has a batch axis if the
length of its first axis is the number of rows in both runs. If the model is known to treat each row
by itself, all tensors have a batch axis, and a run on two rows is enough. The module reads no data:
`probe_batch` and `probe_targets` make up rows with plausible values.
"""

import contextlib
import dataclasses
import math
import typing

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context, tensorflow_internals
from tfdpx.per_example.capture import OutsideReads, UnitRecorder
from tfdpx.per_example.cost_model import Cost, Work, choose
from tfdpx.per_example.rows import Rows
from tfdpx.per_example.rowwise import has_plain_cells
from tfdpx.per_example.rule import CallLayout, GenericRule


@dataclasses.dataclass(frozen=True)
class Layout:
    """Lists the calls that are captured in a model, and the variables that are left to the map.

    Attributes:
        variables: List of the trainable `keras.Variable`s of the model.
        calls: List with a `CallLayout` for each call of a unit in a forward pass, in order.
        whole: List of the variables that are left to the map. The map forms the whole gradient of
            each example for them.
        reason: Str, why variables are left to the map; None if `whole` is empty.
    """

    variables: list
    calls: list
    whole: list
    reason: str | None

    def without(self, variables, reason):
        """Returns this layout with more variables left to the map.

        If one variable of a layer is left to the map, all variables of the layer are, and no rule
        serves the layer. Otherwise a rule and the map could each form a part of one gradient, and
        compute separate norms of the parts.

        Args:
            variables: List of the `keras.Variable`s to leave to the map.
            reason: Str, a clause that says why. It becomes `reason` if the layout has none yet.
        """
        whole_ids = {id(v) for v in [*self.whole, *variables]}
        size = -1
        while size != len(whole_ids):
            size = len(whole_ids)
            for call in self.calls:
                call_ids = {id(v) for v in call.layer.trainable_variables}
                whole_ids |= call_ids if call_ids & whole_ids or not call.is_captured else set()
        calls = [
            dataclasses.replace(
                call,
                is_captured=not any(id(v) in whole_ids for v in call.layer.trainable_variables),
            )
            for call in self.calls
        ]
        whole = [v for v in self.variables if id(v) in whole_ids]
        return Layout(self.variables, calls, whole, self.reason or (reason if whole else None))

    def trained_by(self, call):
        """Returns a list of the model's variables that belong to the layer of a captured call."""
        ids_of_layer = {id(v) for v in call.layer.trainable_variables}
        return [v for v in self.variables if id(v) in ids_of_layer]

    def choices_of_whole(self, model, gradients):
        """Returns a list with a `LayerChoice` for each layer that is left to the map.

        Args:
            model: The `keras.Model`.
            gradients: List of tensors [B, *variable.shape], one for each variable in `whole`.
        """
        owners, bytes_read = {}, {}
        for layer in reversed(layer_internals.flatten_layers(model)):
            owners.update((id(v), layer) for v in layer_internals.own_trainable_variables(layer))
        for call in self.calls:
            owners.update((id(v), call.layer) for v in call.layer.trainable_variables)
        for variable, gradient in zip(self.whole, gradients, strict=True):
            name = owners[id(variable)].name
            examples = gradient.shape[0] or 1
            size = 4.0 * examples * math.prod(variable.shape)
            bytes_read[name] = bytes_read.get(name, 0.0) + size
        return [
            choose(name, "GenericRule", {"instantiate": Cost(bytes=size), "contract": Cost()})
            for name, size in bytes_read.items()
        ]


def find_layout(model, x, is_rowwise=False):
    """Returns the `Layout` of a model, and the `Work` of one row.

    The model runs twice, outside of any graph: on two rows, and on three. A batch axis has length
    two in the first run, and three in the second. With only one run, another axis could have the
    length of the batch by chance.

    Args:
        model: A built `keras.Model`.
        x: Nest of tensors [rows, ...]. Only shapes and dtypes are read.
        is_rowwise: Bool, whether the model is known to treat each row by itself. If so, all
            tensors have a batch axis, and one run is enough.
    """
    variables = model.trainable_variables
    empty = Layout(variables, [], [], None)
    try:
        runs = step_context.eagerly(_run_on_rows, model, x, (2,) if is_rowwise else (2, 3))
    except tf.errors.OpError as error:  # Made-up inputs do not fit.
        weights = model.count_params()
        work = Work(2.0 * weights, weights, weights, len(model.layers))
        reason = f"the model raises {type(error).__name__} for made-up inputs"
        return empty.without(variables, reason), work
    (first_calls, outside), (last_calls, _) = runs[0], runs[-1]
    if [c.layer.name for c in first_calls] != [c.layer.name for c in last_calls]:
        reason = "the model calls other layers for another batch size"
        return empty.without(variables, reason), _work(first_calls)
    calls = [_compare(sightings) for sightings in zip(*(run for run, _ in runs), strict=True)]
    mapped_layers = [call.layer for call in calls if not call.is_captured]
    inside = [v for layer in mapped_layers for v in layer.trainable_variables]
    names = list(dict.fromkeys([layer.name for layer in mapped_layers] + [v.path for v in outside]))
    reason = f"no rule explains the gradients of {names}"
    layout = Layout(variables, calls, [], None).without([*inside, *outside], reason)
    return layout, _work(first_calls)


def _run_on_rows(model, x, numbers):
    with restoring(model.non_trainable_variables):
        return [_record(model, probe_batch(model, x, rows, seed=rows)) for rows in numbers]


@contextlib.contextmanager
def restoring(variables):
    """Context manager that restores the values of `variables` at its end. It needs eager mode."""
    values = [(v, v.numpy()) for v in variables]
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)


class _Sighting(typing.NamedTuple):
    """A record of one call of a unit in a run. To save memory, it stores shapes, not tensors."""

    layer: keras.layers.Layer
    rule: type
    looks_up: bool  # whether the first input has integers, as in an embedding
    arguments: list  # a shape for each argument, or None if it is not a tensor
    outputs: list  # a shape for each output, or None
    draws: bool  # whether the layer drew random numbers
    is_plain: bool  # whether all inputs are `tf.Tensor`s, and the model uses no tape for the call


def _record(model, x):
    """Runs a model. Returns its `_Sighting`s, and the variables read outside of units' calls."""
    sightings, outside = [], OutsideReads(model.trainable_variables)

    def record_call(layer, rule, args, kwargs):
        generators = layer_internals.seed_generators(layer)
        states_before = [g.state.numpy() for g in generators]
        with outside.watching(layer.trainable_variables):
            result = layer_internals.call_operation(layer, args, kwargs)
        states_after = [g.state.numpy() for g in generators]
        draws = any(
            (before != after).any()
            for before, after in zip(states_before, states_after, strict=True)
        )
        first_tensor = next(filter(tf.is_tensor, tf.nest.flatten((args, kwargs))), None)
        looks_up = first_tensor is not None and not first_tensor.dtype.is_floating
        tensors = [leaf for leaf in tf.nest.flatten((args, kwargs)) if tf.is_tensor(leaf)]
        # If the model has a tape, its backward pass reads the layer's weights outside of the call.
        is_plain = not tensorflow_internals.is_taping()
        is_plain = is_plain and all(isinstance(tensor, tf.Tensor) for tensor in tensors)
        shapes = _shapes((args, kwargs)), _shapes(result)
        sightings.append(_Sighting(layer, rule, looks_up, *shapes, draws, is_plain))
        return result

    recorder = UnitRecorder(model.trainable_variables, record_call)
    recording, without_cudnn = (
        step_context.recording(recorder),
        layer_internals.without_cudnn(model),
    )
    with recording, outside.watching(), without_cudnn:
        model_internals.call_model(model, x)
    return sightings, outside.variables


def _compare(sightings):
    """Returns the `CallLayout` of a call. `sightings` holds the call's `_Sighting` in each run."""
    first, draws = sightings[0], any(sighting.draws for sighting in sightings)
    batched = tuple(map(_grows, zip(*(sighting.arguments for sighting in sightings), strict=True)))
    grows = [_grows(shapes) for shapes in zip(*(s.outputs for s in sightings), strict=True)]
    # A rule needs a batch axis in the first input and in all outputs. If a rule runs a random layer
    # again, the layer draws other numbers, unless the rule keeps the draws.
    is_captured = not issubclass(first.rule, GenericRule) and all(grows) and batched[:1] == (True,)
    is_captured = is_captured and first.is_plain and (first.rule.keeps_draws or not draws)
    return CallLayout(first.layer, first.rule, batched, is_captured)


def _work(calls):
    """Returns the `Work` of one row, computed from the calls in a run on two rows."""
    flops = elements = 0
    for call in calls:
        if has_plain_cells(call.layer):  # The kernels of recurrent cells multiply at each step.
            for kernel in (v for v in call.layer.variables if len(v.shape) > 1):
                elements += call.arguments[0][1] * kernel.shape[-1]
                flops += 2.0 * call.arguments[0][1] * math.prod(kernel.shape)
            continue
        outputs = [shape for shape in call.outputs if shape]
        num_outputs = sum(math.prod(shape) for shape in outputs) / 2
        elements += num_outputs
        # A lookup in an embedding table multiplies nothing.
        kernels = [] if call.looks_up else [v for v in call.layer.variables if len(v.shape) > 1]
        for kernel in kernels:
            flops += 2.0 * math.prod(kernel.shape) * num_outputs / outputs[0][-1]
    weights = {id(v): v for call in calls for v in call.layer.trainable_variables}
    return Work(flops, elements, sum(math.prod(v.shape) for v in weights.values()), len(calls))


def _shapes(nest):
    return [tuple(t.shape) if tf.is_tensor(t) else None for t in tf.nest.flatten(nest)]


def _grows(shapes):
    """Returns whether the first axis of a tensor is a batch axis.

    `shapes` has the shape of the tensor in the run on two rows, and in the run on three if there is
    one. A shape is None if the value is not a tensor.
    """
    return all(shape and shape[0] == rows for shape, rows in zip(shapes, (2, 3), strict=False))


def probe_batch(model, specs, rows, seed=0):
    """Returns dummy inputs of a model in plausible ranges, a nest of tensors [rows, ...].

    Floats are uniform in [0, 1]. Integers are from 0 to 255 if they could be pixels: a layer
    rescales its inputs, or the inputs have as many axes as images. Other integers are 0 or 1, and
    strings are "0" or "1". If the model has a lookup layer, integers or strings are drawn from its
    vocabulary instead. An axis of unknown length gets the length 32.

    Args:
        model: A built `keras.Model`, or None.
        specs: Nest of tensors or `tf.TensorSpec`s. Only shapes and dtypes are read.
        rows: Int, the number of rows.
        seed: Int, the seed of the values.
    """
    generator = np.random.default_rng(seed)
    layers = [] if model is None else layer_internals.flatten_layers(model)
    rescales = any(isinstance(layer, keras.layers.Rescaling) for layer in layers)
    words = _find_vocabulary(layers, keras.layers.StringLookup)
    tokens = _find_vocabulary(layers, keras.layers.IntegerLookup)

    def make(leaf):
        shape = [rows, *(32 if size is None else size for size in leaf.shape[1:])]
        if leaf.dtype == tf.string:
            return tf.constant(generator.choice(words or ["0", "1"], shape))
        if leaf.dtype.is_floating:
            return tf.constant(generator.uniform(size=shape), leaf.dtype)
        if tokens:
            return tf.cast(tf.constant(generator.choice(tokens, shape)), leaf.dtype)
        pixels = leaf.dtype in (tf.uint8, tf.int32, tf.int64) and (rescales or len(shape) == 4)
        highest = 256 if pixels or leaf.dtype == tf.uint8 and len(shape) > 2 else 2
        return tf.cast(tf.constant(generator.integers(0, highest, shape)), leaf.dtype)

    return Rows(specs).map(make)


def probe_targets(specs, rows):
    """Returns dummy targets and sample weights, a nest of tensors [rows, ...].

    Integers are the classes 0 and 1. Floats are uniform in [0.1, 1].
    """
    generator = np.random.default_rng(1)

    def make(leaf):
        shape = [rows, *(32 if size is None else size for size in leaf.shape[1:])]
        if leaf.dtype.is_floating:
            return tf.constant(generator.uniform(0.1, 1.0, size=shape), leaf.dtype)
        return tf.cast(tf.constant(generator.integers(0, 2, shape)), leaf.dtype)

    return Rows(specs).map(make)


def _find_vocabulary(layers, kind):
    """Returns the vocabulary of the first layer of class `kind`; [] if there is no such layer."""
    lookups = [layer for layer in layers if isinstance(layer, kind)]
    return list(lookups[0].get_vocabulary(include_special_tokens=False)) if lookups else []
