"""Defines the interface of rules for per-example gradients, and registers rules by layer class.

A rule gets one captured `Call` of a layer, and the *output gradients*: the gradients of the loss
with respect to the layer's outputs. The rule forms per-example gradients of the layer's weights, or
only their norms and clipped sums. `capture` explains units and captured calls. `engine` explains
the map, which forms all gradients without a rule.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost, LayerChoice, choose
from tfdpx.per_example.rows import Outputs, Rows, sum_examples, zero_excluded

_RULES: dict[type, type] = {}
_VARIANTS: dict[type, list[type]] = {}


def register(*layer_classes: type) -> Callable[[type], type]:
    """Registers the decorated rule for the per-example gradients of `layer_classes`.

    The rule then serves calls of layers of these classes, together with all sublayers. For example,
    `register(MyLayer)(tfdpx.per_example.GenericRule)` forms the whole gradient of each example.

    Args:
        *layer_classes: Subclasses of `keras.Layer`. The rule also serves layers of their
            subclasses. If the rule's `handles(layer, registered_class)` returns False for a layer,
            `GenericRule` serves this layer instead.

    Returns:
        The decorator, which takes and returns a subclass of `tfdpx.per_example.Rule`.

    Raises:
        TypeError: If one of `layer_classes` is not a subclass of `keras.Layer`.
    """
    for layer_class in layer_classes:
        if not (isinstance(layer_class, type) and issubclass(layer_class, keras.Layer)):
            raise TypeError(
                "`register` takes subclasses of keras.Layer. "
                f"Received: {layer_class!r} (of type {type(layer_class)})"
            )

    def decorate(rule):
        if not (isinstance(rule, type) and hasattr(rule, "per_example_gradients")):
            raise TypeError(
                "`register(...)` decorates a subclass of tfdpx.per_example.Rule. "
                f"Received: {rule!r} (of type {type(rule)})"
            )
        for layer_class in layer_classes:
            _RULES[layer_class] = rule
        return rule

    return decorate


def variant_of(layer_class):
    """Registers the decorated rule for layers of a class that the first rule does not handle.

    Args:
        layer_class: Subclass of `keras.Layer` for which `register` registered the first rule.
    """

    def decorate(rule):
        _VARIANTS.setdefault(layer_class, []).append(rule)
        return rule

    return decorate


def find_rules(layer):
    """Returns a list of the rules that may serve a layer, and the class they are registered for.

    This class is the layer's class or its nearest registered base class. If there is none, the
    function returns an empty list and None.
    """
    for ancestor in type(layer).__mro__:
        if ancestor in _RULES:
            return [_RULES[ancestor], *_VARIANTS.get(ancestor, ())], ancestor
    return [], None


@dataclasses.dataclass(frozen=True)
class CallLayout:
    """The parts of a unit's call that do not depend on the batch size.

    Attributes:
        layer: The `keras.Layer`.
        rule: The `Rule` class that serves the layer.
        batched: Tuple with a bool for each leaf of the call's (args, kwargs): whether the leaf has
            a batch axis.
        is_captured: Bool, whether the rule forms the gradients. Otherwise the map of `engine` does.
    """

    layer: keras.Layer
    rule: type
    batched: tuple
    is_captured: bool


class Call:
    """One captured call of one unit.

    Attributes:
        layer: The `keras.Layer`.
        rule: The `Rule` class that serves the layer.
        args, kwargs: The arguments of the call. After the forward pass, None takes the place of
            tensors without a batch axis, because such a tensor may differ between examples.
        kept: Dict in which a rule's `forward` may save tensors [B * K, ...].
        shared: The result of `Rule.shared`.
        jit_compile: Bool, whether XLA compiles the step.
        outputs: List of the output tensors that the tape watches.
    """

    def __init__(self, layout, args, kwargs, shared, jit_compile=False):
        self.layer, self.rule = layout.layer, layout.rule
        self.args, self.kwargs = args, kwargs
        self.kept: dict[str, Any] = {}
        self.shared, self.jit_compile = shared, jit_compile
        self.outputs: list[tf.Tensor] = []
        self._batched = layout.batched

    def forward(self, tape, watching_reads):
        """Calls the layer, watches the outputs, and returns them.

        Args:
            tape: The `tf.GradientTape` that watches the outputs.
            watching_reads: Function that returns a context manager. Variables that are read within
                the context are left to the map, even if they belong to this layer.
        """
        self._watching_reads = watching_reads

        def watch(nest):
            outputs = Outputs(nest)
            # With an identity, the gradient counts only uses of the tensor after the layer.
            tensors = [tf.identity(t) for t in outputs.tensors]
            differentiable = outputs.select(tensors)
            for tensor in differentiable:
                tape.watch(tensor)
            self.outputs.extend(differentiable)
            return outputs.rebuild(tensors)

        return self.rule.forward(self, watch)

    def activate(self, outputs):
        """Applies the layer's activation to `outputs`.

        No rule forms the gradients of variables that the activation reads, so these variables are
        left to the map.
        """
        if self.layer.activation is None:
            return outputs
        with self._watching_reads():
            return self.layer.activation(outputs)

    @property
    def tensors(self):
        """Returns a list of the tensors with a batch axis that the rule may read."""
        return [*self._rows.tensors, *Rows(self.kept).tensors]

    def with_tensors(self, tensors):
        """Returns this call with new tensors in place of `self.tensors`."""
        twin, tensors = copy.copy(self), iter(tensors)
        twin.args, twin.kwargs = self._rows.pack(tensors, keep_others=False)
        twin.kept = Rows(self.kept).map(lambda _: next(tensors))
        return twin

    @property
    def _rows(self):
        return Rows((self.args, self.kwargs), self._batched)


class Rule:
    """The base class of rules, which form the per-example gradients of one call of one layer.

    The batch of a layer contains K consecutive rows for each example, one for each augmented view.
    The gradient of an example is the sum over its rows and positions, not the mean: the output
    gradients already contain the factor 1/K (De et al. 2022, Eq. 4).

    A subclass must define `per_example_gradients`. It may also define `ghost_squared_norms` and
    `ordinary_clipped_sum`, which need no array of per-example gradients. In this case it also
    defines `costs`, and the cheapest way is chosen. All arithmetic is in float32.

    Attributes:
        call: The captured `Call`.
        layer: The `keras.Layer`.
        output_gradients: List of float32 tensors [B * K, ...], the gradients of the loss with
            respect to the tensors that `forward` watched. If a tensor does not affect the loss, the
            gradient is zero.
        num_views: Int K, the number of views of an example.
        variables: List of the `keras.Variable`s for which this rule forms gradients.
    """

    # The rule is not used if a subclass of the registered layer overrides one of these names.
    assumes: tuple[str, ...] = ("call",)
    # Whether `forward` keeps the random numbers that a layer draws. Then the rule can serve layers
    # with dropout.
    keeps_draws: bool = False

    @classmethod
    def handles(cls, layer: keras.Layer, registered_class: type) -> bool:
        """Returns whether this rule is right for a layer of `registered_class` or of a subclass.

        By default, a layer must meet three conditions. Its class overrides nothing that `assumes`
        lists. It has neither LoRA nor quantization. It has no sublayer with weights, such as a
        `PReLU` as its activation.

        Args:
            layer: The `keras.Layer`.
            registered_class: The class that the rule was registered for.
        """
        layer_class = type(layer)
        is_changed = getattr(layer, "lora_enabled", False) or getattr(
            layer, "quantization_mode", None
        )
        own_ids = {id(v) for v in layer_internals.own_trainable_variables(layer)}
        is_changed = is_changed or any(id(v) not in own_ids for v in layer.trainable_variables)
        return not is_changed and all(
            getattr(layer_class, name, None) is getattr(registered_class, name, None)
            for name in cls.assumes
        )

    @classmethod
    def forward(cls, call: Call, watch: Callable[[Any], Any]) -> Any:
        """Calls the layer while the model's calls are captured.

        Args:
            call: The `Call`.
            watch: Function that takes a nest of outputs and returns a nest with the same values.
                It adds the differentiable tensors of the new nest to `call.outputs`. The rule gets
                the gradients with respect to these tensors.

        Returns:
            The outputs of the layer.
        """
        return watch(layer_internals.call_operation(call.layer, call.args, call.kwargs))

    @classmethod
    def shared(cls, layer: keras.Layer) -> Any:
        """Returns tensors that depend only on the weights, computed once per update.

        `forward` and the rule read the result from `call.shared`. The default is None: no tensors.

        Args:
            layer: The `keras.Layer`.
        """
        del layer
        return None

    @classmethod
    def joined(cls, rules: list[Rule]) -> Rule | None:
        """Returns one rule for several calls of one layer, or None if there is no such rule.

        If the method returns None, the per-example gradients of the calls are added up.

        Args:
            rules: List of rules of this class, with the same layer and variables.
        """
        del rules
        return None

    def __init__(
        self,
        call: Call,
        output_gradients: list[tf.Tensor],
        num_views: int,
        variables: list[keras.Variable],
    ) -> None:
        self.call = call
        self.layer = call.layer
        self.output_gradients = [tf.cast(g, "float32") for g in output_gradients]
        self.num_views = num_views
        self.variables = variables

    @property
    def small_gradients(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns pairs of a variable and its gradients, for small variables such as biases.

        The gradients are a float32 tensor [B, *variable.shape]. They are always formed, and the
        engine computes their norms and sums for all layers at once.
        """
        return []

    @property
    def large_variables(self) -> list[keras.Variable]:
        """Returns a list of those `variables` that are not in `small_gradients`."""
        return [v for v in self.variables if not any(v is w for w, _ in self.small_gradients)]

    @property
    def post_sum_transforms(self) -> dict[int, Callable]:
        """Returns a dict from the id of a variable to a function that transforms its clipped sum.

        Such a function has two arguments: the sum over all microbatches, and the result of
        `shared`. It must be linear in the sum, and must not read a tensor of a microbatch.
        """
        return {}

    def per_example_gradients(self) -> list[tf.Tensor]:
        """Returns the gradients of each example.

        Returns:
            List of float32 tensors [B, *variable.shape], in the order of `variables`.
        """
        raise NotImplementedError

    def ghost_squared_norms(self) -> Any:
        """Returns the result of `squared_norms`, without forming per-example gradients.

        A subclass must define this method if its `costs` contain "ghost".
        """
        raise NotImplementedError

    @property
    def inputs_to_mask(self) -> list[tf.Tensor]:
        """Returns a list of float32 tensors [B * n, ...] that `clipped_sum` reads.

        For examples with the factor zero, the engine sets these tensors to zero, and passes them to
        `clipped_sum` as `masked`. A product with the factor is not enough: 0 * inf is not zero.
        """
        return []

    def ordinary_clipped_sum(self, factors: tf.Tensor, masked: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the result of `clipped_sum`, without forming per-example gradients.

        A subclass must define this method if its `costs` contain "ordinary".

        Args:
            factors: As for `clipped_sum`.
            masked: As for `clipped_sum`, never None.
        """
        raise NotImplementedError

    def costs(self) -> dict[str, Cost]:
        """Returns the predicted `Cost` of each way to form norms and sums that the rule supports.

        The engine uses the cheapest. The result is a dict. Its keys are names in `cost_model.NORMS`
        and `cost_model.SUMS`. Only the ratios of the costs matter.
        """
        return {"instantiate": Cost(), "contract": Cost()}

    def allows_ordinary_sum(self) -> bool:
        """Returns whether `ordinary_clipped_sum` may follow norms of instantiated gradients.

        The sum may follow if the norms cover the rounding errors of the sum. See
        `tfdpx.per_example.rounding`.
        """
        return False

    @functools.cached_property
    def choice(self) -> LayerChoice:
        """Returns the `LayerChoice` that `squared_norms` and `clipped_sum` follow."""
        costs = self.costs() if self.large_variables else Rule.costs(self)
        name = type(self).__name__
        return choose(self.layer.name, name, costs, self.allows_ordinary_sum())

    @property
    def choices(self) -> list[LayerChoice]:
        """Returns a list of the `LayerChoice`s of this rule, by default only `choice`."""
        return [self.choice]

    def squared_norms(self) -> Any:
        """Returns the squared l2 norm of each example's gradient over all of `large_variables`.

        The result is an upper bound that includes rounding errors. It is never less than the
        squared norm of the array that `clipped_sum` adds for an example with the factor one. See
        `tfdpx.per_example.rounding`.

        Returns:
            float32 [B], or a `rounding.Measured`, to which the engine adds the allowance for
            rounding.
        """
        if self.choice.norm == "ghost":
            return self.ghost_squared_norms()
        return self.instantiated_squared_norms()

    def clipped_sum(
        self, factors: tf.Tensor, masked: list[tf.Tensor] | None = None
    ) -> list[tf.Tensor]:
        """Multiplies the gradient of each example by its factor, and returns the sum.

        Args:
            factors: float32 [B]. An example with the factor zero contributes exactly zero, even if
                its gradient is not finite.
            masked: List of the tensors in `inputs_to_mask`, with zeros for examples with the factor
                zero. By default, this method sets the zeros.

        Returns:
            List of float32 tensors, one for each of `large_variables`, before
            `post_sum_transforms`.
        """
        if masked is None:
            masked = zero_excluded(self.inputs_to_mask, factors)
        if self.choice.sum == "ordinary":
            return self.ordinary_clipped_sum(factors, masked)
        return self.contracted_clipped_sum(factors, masked)

    def instantiated_squared_norms(self) -> Any:
        """Returns the result of `squared_norms`, computed from `instances`."""
        return rounding.squared_norms(self.instances)

    def contracted_clipped_sum(
        self, factors: tf.Tensor, masked: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the result of `clipped_sum`, computed from `instances`.

        Args:
            factors: As for `clipped_sum`.
            masked: As for `clipped_sum`, never None.
        """
        del masked
        return [sum_examples(g, factors) for g in self.instances]

    @functools.cached_property
    def instances(self) -> list[tf.Tensor]:
        """Returns the per-example gradients of `large_variables`, a list of tensors.

        The gradients are computed once, for both norm and sum.
        """
        pairs = zip(self.variables, self.per_example_gradients(), strict=True)
        return [g for v, g in pairs if any(v is w for w in self.large_variables)]

    def explains(self, variable: Any) -> bool:
        """Returns whether this rule forms the gradients of a variable.

        Args:
            variable: `keras.Variable` or None.
        """
        return any(variable is v for v in self.variables)

    def in_order(self, by_variable: list[tuple[Any, Any]]) -> list:
        """Sorts values into the order of `variables`, and drops the values of other variables.

        Args:
            by_variable: List of pairs of a `keras.Variable` and a value, such as its gradient.
        """
        return [next(value for w, value in by_variable if w is v) for v in self.variables]


class BeforeActivation(Rule):
    """A base class for rules that need the gradient before the layer's `activation` is applied."""

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`."""
        linear = layer_internals.without(call.layer, activation=None)
        return call.activate(watch(layer_internals.call_operation(linear, call.args, call.kwargs)))


class RuleOfParts(Rule):
    """The base class of rules for layers with several kernels. Each kernel has a rule, a *part*.

    Attributes:
        parts: List of `Rule`s for the same call, which a subclass fills. Each has one kernel as its
            only large variable.
    """

    parts: list[Rule]

    @property
    def large_variables(self):
        """See `Rule.large_variables`. Returns the kernels of all parts."""
        return [v for part in self.parts for v in part.large_variables]

    @property
    def choices(self):
        """See `Rule.choices`. The list has one `LayerChoice` for each kernel."""
        name = type(self).__name__
        return [dataclasses.replace(part.choice, rule=name) for part in self.parts]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        pairs = [
            pair
            for part in self.parts
            for pair in zip(part.variables, part.per_example_gradients(), strict=True)
        ]
        return self.in_order([*pairs, *self.small_gradients])

    def squared_norms(self):
        """See `Rule.squared_norms`."""
        return rounding.add_up([part.squared_norms() for part in self.parts])

    @property
    def inputs_to_mask(self):
        """See `Rule.inputs_to_mask`."""
        return [tensor for part in self.parts for tensor in part.inputs_to_mask]

    def clipped_sum(self, factors, masked=None):
        """See `Rule.clipped_sum`."""
        if masked is None:
            masked = zero_excluded(self.inputs_to_mask, factors)
        masked, sums = iter(masked), []
        for part in self.parts:
            sums += part.clipped_sum(factors, [next(masked) for _ in part.inputs_to_mask])
        return sums


# `TimeDistributed` calls its sublayer in a loop, where inputs cannot be captured one by one.
@register(keras.layers.TimeDistributed)
class GenericRule(Rule):
    """Leaves a layer and its sublayers to the map of `engine`, which forms whole gradients.

    The rule is right for any layer, but needs memory for the whole gradient of each example.
    """

    @classmethod
    def handles(cls, layer: keras.Layer, registered_class: type) -> bool:
        """Returns True, because the rule assumes nothing about the layer."""
        del layer, registered_class
        return True
