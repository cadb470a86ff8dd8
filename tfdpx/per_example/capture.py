"""What each trainable layer saw and produced in one run of the model.

A *unit* is the outermost layer that owns trainable variables itself (or whose class is registered),
with its subtree. While a `Recorder` is active, each call of a unit is kept with its inputs, and its
outputs are watched by the recorder's tape, so that going back once over activations alone gives
the gradient at every unit's output for every example.
"""

import contextlib
import dataclasses
import inspect

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, step_context
from tfdpx.per_example import registry
from tfdpx.per_example.invalid_values import invalid_as_nan
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.randomness import RngReplay, example_seeds
from tfdpx.per_example.rows import Rows, merge_views, split_views
from tfdpx.per_example.rules.generic import GenericRule
from tfdpx.per_example.vectorize import vectorized_map


class UnexplainedVariables(ValueError):
    """Trainable variables whose per-example gradient no captured call explains."""


@dataclasses.dataclass(frozen=True)
class CallLayout:
    """What a call looks like whatever the batch size, found by `layout.find_layout`.

    Attributes:
        layer: The `keras.Layer`.
        rule: The `Rule` class that serves it.
        batched: A flag for each leaf of the call's (args, kwargs): has it a batch axis?
        draws: Whether the call draws random numbers.
    """

    layer: keras.Layer
    rule: type
    batched: tuple
    draws: bool


class Call:
    """One call of one unit.

    Attributes:
        layer: The `keras.Layer`.
        rule: The `Rule` class that serves it.
        args, kwargs: What the layer was called with.
        outputs: The watched tensors, in order; those that `run` selects, unless the rule has a
            `forward` of its own.
        kept: Dict, for what a rule's `forward` saves for later.
        shared: What the rule gives as `Rule.shared`.
        jit_compile: Whether the step is compiled by XLA.
        alone: See `EngineOutput.alone`; None where the layer was called on all examples at once.
    """

    def __init__(self, layout, args, kwargs, num_views, shared, jit_compile=False):
        self.layer = layout.layer
        self.rule = layout.rule
        self.args = args
        self.kwargs = kwargs
        self.outputs = []
        self.kept = {}
        self.shared = shared
        self.jit_compile = jit_compile
        self._rows = Rows((args, kwargs), layout.batched)
        self.alone = None
        self._num_views = num_views
        self._draws = RngReplay(layout.layer) if layout.draws else None

    def forward(self, tape):
        """Makes the call and watches its outputs; returns them as the layer would."""

        def watch(nest):
            outputs = Outputs(nest)
            # An identity parts what the loss does to a tensor from what the layer does inside.
            tensors = [tf.identity(t) for t in outputs.tensors]
            watched = outputs.select(tensors)
            for tensor in watched:
                tape.watch(tensor)
            self.outputs.extend(watched)
            return outputs.rebuild(tensors)

        if self._draws is not None:
            return watch(self._forward_by_example())
        return self.rule.forward(self, watch)

    def examples(self):
        """The batched arguments, each [B, K, ...]."""
        return [split_views(tensor, self._num_views) for tensor in self._rows.tensors]

    @property
    def description(self):
        """The layer in the words of an error."""
        return f"Layer '{self.layer.name}' (of type {type(self.layer).__name__})"

    def seeds(self, count):
        """int64 [count, ...]: what `run` takes for each example, to draw the same again."""
        return example_seeds([], count) if self._draws is None else self._draws.seeds(count)

    def run(self, rows, seeds):
        """The `Outputs` of the call made again on the `rows` of one example, with its `seeds`.

        Random draws are the same again. Tensors are [K, ...].
        """
        args, kwargs = self._rows.pack(rows)
        draws = self._draws.of_example(seeds) if self._draws else contextlib.nullcontext()
        with step_context.recording(None), draws, invalid_as_nan():
            return Outputs(self.layer(*args, **kwargs))

    def _forward_by_example(self):
        made = []

        def one(inputs):
            made.append(self.run(inputs[1], inputs[0]))
            return made[-1].tensors

        examples = self.examples()
        seeds = self.seeds(tf.shape(examples[0])[0])
        tensors = vectorized_map(one, (seeds, examples), self.description, self.jit_compile)
        tensors = [merge_views(t) for t in tensors]
        self.alone = self._rows.tensors, tensors
        return made[-1].rebuild(tensors)


class UnitRecorder:
    """Hands over every call of a unit, but for those inside another unit.

    Args:
        variables: The model's trainable variables.
        call_unit: Function of a layer, its rule class, args and kwargs that calls the layer.
    """

    def __init__(self, variables, call_unit):
        self._trainable = {id(v) for v in variables}
        self._call_unit = call_unit
        self._inside = False

    def observe(self, operation, args, kwargs):
        """Called by the hook in place of `operation(*args, **kwargs)`."""
        rule = None if self._inside else self._rule(operation, args, kwargs)
        if rule is None:
            return layer_internals.call_operation(operation, args, kwargs)
        if not args:  # Rules read what a layer is called with first by its position.
            first, kwargs = next(iter(inspect.signature(operation.call).parameters)), dict(kwargs)
            args = (kwargs.pop(first),) if first in kwargs else ()
        self._inside = True
        try:
            return self._call_unit(operation, rule, args, kwargs)
        finally:
            self._inside = False

    def _rule(self, operation, args, kwargs):
        """The rule class if `operation` is a unit, else None; symbolic calls are never captured."""
        if not isinstance(operation, keras.Layer) or any(
            isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten((args, kwargs))
        ):
            return None
        if not any(id(v) in self._trainable for v in operation.trainable_variables):
            return None
        rules, registered_class = registry.find(operation)
        if rules:
            fits = (rule for rule in rules if rule.handles(operation, registered_class))
            return next(fits, GenericRule)
        owned = layer_internals.own_trainable_variables(operation)
        return GenericRule if any(id(v) in self._trainable for v in owned) else None


class Recorder(UnitRecorder):
    """Captures every call of a unit of a model in one training-mode run.

    Args:
        variables: The model's trainable variables.
        layout: List of `CallLayout`, what the calls will be.
        num_views: Int, rows of the batch per example.
        update: The `tfdpx.per_example._update.Update`.
        jit_compile: Whether the step is compiled by XLA.

    Attributes:
        calls: List of `Call`, in order.
    """

    def __init__(self, variables, layout, num_views, update, jit_compile=False):
        super().__init__(variables, self._capture)
        self.calls = []
        self._variables = list(variables)
        self._layout = layout
        self._num_views = num_views
        self._update = update
        self._jit_compile = jit_compile
        self._tape = tf.GradientTape(watch_accessed_variables=False)
        # Watches what is read outside of captured calls: its recording stops during them.
        self._detector = tf.GradientTape()
        self._graph = None

    @contextlib.contextmanager
    def taping(self):
        """Within it, operations are differentiable; it spans the model and the loss."""
        self._graph = _graph()
        with self._tape, self._detector:
            yield

    def _capture(self, layer, _, args, kwargs):
        if _graph() is not self._graph:
            raise UnexplainedVariables(
                f"Layer '{layer.name}' (of type {type(layer).__name__}) is called inside a "
                "loop, a tf.function or a vectorized_map, where its inputs cannot be captured. "
                "Make the layer around that loop one unit with "
                "`tfdpx.per_example.register(TheOuterLayer)(tfdpx.per_example.GenericRule)`, or "
                'use `per_example_engine="vmap"`.'
            )
        shared = self._update.shared(layer)
        call = Call(
            self._layout_of(layer), args, kwargs, self._num_views, shared, self._jit_compile
        )
        self.calls.append(call)
        with self._detector.stop_recording():
            return call.forward(self._tape)

    def gradients(self, targets, cotangents):
        """Gradients at each call's outputs: a list of lists of tensors.

        Args:
            targets: List of tensors, what the model gave.
            cotangents: List of tensors, the gradients at `targets`.

        Raises:
            UnexplainedVariables: If a trainable variable was read outside every captured call.
        """
        values = {id(v.value): v for v in self._variables}
        outside = [v for v in self._detector.watched_variables() if id(v) in values]
        if outside:
            raise UnexplainedVariables(
                "These trainable variables are read outside of any layer's call, so the gradient "
                f"of a single example is not known: {[values[id(v)].path for v in outside]}. Use "
                "them inside the `call` of the layer that owns them (a loss must not read them), "
                'or compute gradients with `per_example_engine="vmap"`.'
            )
        outputs = [call.outputs for call in self.calls]
        return self._tape.gradient(
            targets, outputs, cotangents, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )

    def _layout_of(self, layer):
        position = len(self.calls)
        if position >= len(self._layout) or self._layout[position].layer is not layer:
            names = [layout.layer.name for layout in self._layout]
            raise UnexplainedVariables(
                f"The model calls its layers differently from one forward pass to the next: call "
                f"{position} is of layer '{layer.name}', but a trial run made the calls "
                f'{names}. Use `per_example_engine="vmap"`.'
            )
        return self._layout[position]


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
