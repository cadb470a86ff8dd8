"""Two trial runs on made-up batches of different size, to learn what has a batch axis."""

import contextlib
import math
import typing

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context
from tfdpx.per_example.capture import CallLayout, UnexplainedVariables, UnitRecorder
from tfdpx.per_example.cost_model import Work
from tfdpx.per_example.probe_batches import probe_batch
from tfdpx.per_example.rules.generic import GenericRule


def find_layout(model, x):
    """The `CallLayout` of every unit call of the training-mode forward pass, and its `Work`.

    A length that merely equals the batch size looks like a batch axis within one run, so
    the model is run, outside of any graph, on two and on three rows.

    Args:
        model: A built `keras.Model`.
        x: Nest of tensors [rows, ...]; only shapes and dtypes are read.

    Raises:
        UnexplainedVariables: If a unit's output has no batch axis, or the runs make other calls.
    """
    try:
        two, three = step_context.eagerly(_two_runs, model, x)
    except tf.errors.OpError as error:
        raise UnexplainedVariables(
            f"the model raises {type(error).__name__} for made-up inputs"
        ) from error
    if [c.layer.name for c in two] != [c.layer.name for c in three]:
        raise UnexplainedVariables(
            "The model calls other layers for another batch size: "
            f"{[c.layer.name for c in two]} for 2 rows, {[c.layer.name for c in three]} for 3. Use "
            '`per_example_engine="vmap"`.'
        )
    return [_compare(*pair) for pair in zip(two, three, strict=True)], _work(two)


def measured_work(model, x):
    """The `Work` of a model that is not captured layer by layer.

    Args:
        model: As for `find_layout`.
        x: As for `find_layout`.
    """
    try:
        return _work(step_context.eagerly(_two_runs, model, x)[0])
    except tf.errors.OpError:  # Not for made-up inputs.
        weights = model.count_params()
        return Work(2.0 * weights, weights, weights, len(model.layers))


def _two_runs(model, x):
    with restored(model.non_trainable_variables):
        return [_record(model, probe_batch(model, x, rows, seed=rows)) for rows in (2, 3)]


@contextlib.contextmanager
def restored(variables):
    """Gives `variables` their values back afterwards, in eager mode."""
    kept = [(v, v.numpy()) for v in variables]
    try:
        yield
    finally:
        for variable, value in kept:
            variable.assign(value)


class _Sighting(typing.NamedTuple):
    """One unit call. Shapes alone: the tensors of all calls at once would need memory."""

    layer: keras.layers.Layer
    rule: type
    looks_up: bool  # whether its input is of integers
    arguments: list  # of shapes, None for what is no tensor
    outputs: list
    draws: bool  # whether it drew random numbers


def _record(model, x):
    seen = []

    def look(layer, rule, args, kwargs):
        generators = layer_internals.seed_generators(layer)
        before = [g.state.numpy() for g in generators]
        result = layer_internals.call_operation(layer, args, kwargs)
        after = [g.state.numpy() for g in generators]
        draws = any((a != b).any() for a, b in zip(before, after, strict=True))
        first = next(filter(tf.is_tensor, tf.nest.flatten((args, kwargs))), None)
        looks_up = first is not None and not first.dtype.is_floating
        seen.append(
            _Sighting(layer, rule, looks_up, _shapes((args, kwargs)), _shapes(result), draws)
        )
        return result

    with step_context.recording(UnitRecorder(model.trainable_variables, look)):
        model_internals.call_model(model, x)
    return seen


def _compare(two, three):
    grows = [_grows(a, b) for a, b in zip(two.outputs, three.outputs, strict=True)]
    if not all(grows):
        raise UnexplainedVariables(
            f"Layer '{two.layer.name}' (of type {type(two.layer).__name__}) owns trainable "
            "variables but returns an output without a batch axis, of shape "
            f"{two.outputs[grows.index(False)]}: the gradient of a single example cannot be seen "
            "there. Give the layer an input with a batch axis (for positions: tile them to "
            '[batch, length]), or use `per_example_engine="vmap"`.'
        )
    batched = tuple(_grows(a, b) for a, b in zip(two.arguments, three.arguments, strict=True))
    draws = two.draws or three.draws
    # Only the generic rule makes the same random draws again.
    return CallLayout(two.layer, GenericRule if draws else two.rule, batched, draws)


def _work(calls):
    """The `Work` of the calls of a run on two rows."""
    flops = elements = 0
    for call in calls:
        outputs = [shape for shape in call.outputs if shape]
        made = sum(math.prod(shape) for shape in outputs) / 2
        elements += made
        # A look-up in a table multiplies nothing.
        kernels = [] if call.looks_up else [v for v in call.layer.variables if len(v.shape) > 1]
        for kernel in kernels:
            flops += 2.0 * math.prod(kernel.shape) * made / outputs[0][-1]
    weights = {id(v): v for call in calls for v in call.layer.trainable_variables}
    return Work(flops, elements, sum(math.prod(v.shape) for v in weights.values()), len(calls))


def _shapes(nest):
    return [tuple(t.shape) if tf.is_tensor(t) else None for t in tf.nest.flatten(nest)]


def _grows(shape_of_two, shape_of_three):
    return bool(shape_of_two) and (shape_of_two[0], shape_of_three[0]) == (2, 3)
