"""Records the calls that a model makes to its layers, with the inputs of each call.

A *unit* is a layer with a rule for its class, together with all layers inside of it. A layer inside
of a unit is no unit. An active `Recorder` *captures* each call of a unit: it keeps the inputs, and
its tape watches the outputs. One backward pass over activations then gives the gradient at every
unit's output. No rule forms the gradient of a variable that is read outside of captured calls. For
such a variable, the same tape computes the whole gradient.
"""

from __future__ import annotations

import contextlib
import inspect

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals, tensorflow_internals
from tfdpx.per_example.rows import Rows
from tfdpx.per_example.rule import Call, GenericRule, find_rules


class ReadOutside(Exception):
    """Raised if trainable variables are read outside of every captured call.

    Args:
        variables: List of the `keras.Variable`s.
        reason: Str, a clause that says why no rule can form the gradients of these variables.
    """

    def __init__(self, variables, reason):
        super().__init__(reason)
        self.variables, self.reason = variables, reason


class UnitRecorder:
    """Passes every call of a unit to a function, except calls inside of another unit.

    Args:
        variables: The model's trainable variables.
        call_unit: Function `call_unit(layer, rule, args, kwargs)` that calls the layer. `rule` is
            the layer's rule class.
    """

    def __init__(self, variables, call_unit):
        self._trainable = {id(v) for v in variables}
        self._call_unit = call_unit
        self._inside = False

    def observe(self, operation, args, kwargs):
        """Returns `operation(*args, **kwargs)`, and passes a call of a unit to `call_unit`.

        The wrapper in `tfdpx._keras.hook` runs this method in place of each call of an operation.
        """
        rule = None if self._inside else self._rule(operation, args, kwargs)
        if rule is None:
            return layer_internals.call_operation(operation, args, kwargs)
        if not args:  # Rules read the first argument by its position.
            first, kwargs = next(iter(inspect.signature(operation.call).parameters)), dict(kwargs)
            args = (kwargs.pop(first),) if first in kwargs else ()
        self._inside = True
        try:
            return self._call_unit(operation, rule, args, kwargs)
        finally:
            self._inside = False

    def _rule(self, operation, args, kwargs):
        """Returns the rule class for a call of a unit; None for any other call.

        The result is also None for a symbolic call, on `keras.KerasTensor`s.
        """
        if not isinstance(operation, keras.Layer) or any(
            isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten((args, kwargs))
        ):
            return None
        if not any(id(v) in self._trainable for v in operation.trainable_variables):
            return None
        rules, registered_class = find_rules(operation)
        matching = (rule for rule in rules if rule.handles(operation, registered_class))
        return next(matching, GenericRule) if rules else None


class Recorder(UnitRecorder):
    """Captures the calls of units while a model runs once in training mode.

    Args:
        layout: `tfdpx.per_example.layout.Layout`, which lists the expected calls.
        update: `tfdpx.per_example.engine.Update`, the tensors that all microbatches share.
        jit_compile: Bool, whether XLA compiles the step.

    Attributes:
        calls: List of `Call`, in order.
    """

    def __init__(self, layout, update, jit_compile=False):
        super().__init__(layout.variables, self._capture)
        self.calls = []
        self._layout, self._update, self._jit_compile = layout, update, jit_compile
        self._position = 0
        self._tape = tf.GradientTape(watch_accessed_variables=False)
        self.outside = OutsideReads(layout.variables)
        self._graph = None

    @contextlib.contextmanager
    def taping(self):
        """Returns a context manager in which the tape records operations, to differentiate them."""
        self._graph = _graph()
        with self._tape, self.outside.watching():
            for variable in self._layout.whole:
                self._tape.watch(variable.value)
            yield

    def _capture(self, layer, rule, args, kwargs):
        if len(self._layout.whole) == len(self._layout.variables):
            return layer_internals.call_operation(layer, args, kwargs)
        call_layout = self._next_layout(layer)
        if call_layout is None:  # The calls are not those that the layout lists.
            self.outside.add(self._layout.variables)
        if call_layout is None or not call_layout.is_captured:
            return layer_internals.call_operation(layer, args, kwargs)
        if _graph() is not self._graph:  # Tensors cannot leave a loop or a function.
            self.outside.add(layer.trainable_variables)
            return layer_internals.call_operation(layer, args, kwargs)
        call = Call(call_layout, args, kwargs, self._update.shared(layer), self._jit_compile)
        self.calls.append(call)
        with self.outside.watching(layer.trainable_variables):
            return call.forward(self._tape, self.outside.watching)

    def check_shapes(self, data):
        """Checks that the inputs of captured calls have equal shapes for all examples.

        If the shapes differ, no rule can serve the call. The variables of the layer then count as
        variables that are read outside of captured calls.

        Args:
            data: Nest of the tensors of one example.
        """
        if not all(t.shape.is_fully_defined() for t in Rows(data).tensors):
            return  # All examples of a batch have the same unknown length.
        for call in self.calls:
            if not all(t.shape[1:].is_fully_defined() for t in call.tensors):
                self.outside.add(call.layer.trainable_variables)

    def gradients(self, targets, cotangents):
        """Returns the output gradients of each call, and the gradients of variables without a rule.

        Args:
            targets: List of tensors, the outputs of the model.
            cotangents: List of tensors, the gradients of the loss with respect to `targets`.

        Returns:
            Two lists. The first contains, for each call, a list of the gradients with respect to
            the outputs of the call. The second contains the gradients of the variables in
            `layout.whole`.

        Raises:
            ReadOutside: If a trainable variable that is not in `layout.whole` was read outside of
                every captured call.
        """
        self.outside.check(self._layout.whole)
        outputs = [call.outputs for call in self.calls]
        values = [v.value for v in self._layout.whole]
        at_outputs, at_values = self._tape.gradient(
            targets,
            (outputs, values),
            cotangents,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        for gradients, tensors in zip(at_outputs, outputs, strict=True):
            for gradient, tensor in zip(gradients, tensors, strict=True):
                gradient.set_shape(tensor.shape)  # TensorFlow's gradient of a slice has no shape.
        return at_outputs, [tf.cast(tf.convert_to_tensor(g), "float32") for g in at_values]

    def _next_layout(self, layer):
        position, self._position = self._position, self._position + 1
        calls = self._layout.calls
        is_known = position < len(calls) and calls[position].layer is layer
        return calls[position] if is_known else None


class OutsideReads:
    """Finds out which trainable variables are read outside of captured calls.

    Args:
        variables: List of the trainable `keras.Variable`s.
    """

    def __init__(self, variables):
        self._owners = {}
        for variable in variables:
            value = variable.value
            for part in (value, *getattr(value, "values", ())):
                self._owners[id(part)] = variable
        self._read, self._watcher, self._explained = {}, None, None

    @contextlib.contextmanager
    def watching(self, explained=()):
        """Returns a context manager that records which variables are read.

        Variables in the list `explained` are not recorded, because a rule forms their gradients.
        """
        former = self._stop()
        self._start({id(v) for v in explained})
        try:
            yield
        finally:
            self._stop()
            if former is not None:
                self._start(former)

    def add(self, variables):
        """Records that `variables` were read."""
        self._read.update((id(v), v) for v in variables)

    def _start(self, explained):
        # A second tape would not do: TensorFlow cannot vectorize a loop that two tapes record.
        self._watcher, self._explained = tensorflow_internals.VariableWatcher(), explained
        self._watcher.__enter__()

    def _stop(self):
        if self._watcher is None:
            return None
        self._collect_reads()
        self._watcher.__exit__(None, None, None)
        self._watcher = None
        return self._explained

    def _collect_reads(self):
        owners = (self._owners.get(id(v)) for v in self._watcher.watched_variables())
        self.add(v for v in owners if v is not None and id(v) not in self._explained)

    @property
    def variables(self):
        """Returns a list of the variables that were read."""
        if self._watcher is not None:
            self._collect_reads()
        return list(self._read.values())

    def check(self, allowed):
        """Raises ReadOutside if a variable was read that is not in the list `allowed`."""
        allowed = {id(v) for v in allowed}
        unexpected = [v for v in self.variables if id(v) not in allowed]
        if unexpected:
            raise ReadOutside(
                unexpected, f"{[v.path for v in unexpected]} are read outside of layers' calls"
            )


def _graph():
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
