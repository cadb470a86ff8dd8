"""Per-example rules of layers: which rule serves which class, and the interface of a rule.

A rule is given one captured `Call` of a layer and the gradients at its outputs, and forms norms and
clipped sums of the gradients of the layer's weights.
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
    """Class decorator: the rule that gives per-example gradients for `layer_classes`.

    Registering a class also makes its layers atomic: such a layer is captured as a whole, with its
    sublayers. `register(MyLayer)(tfdpx.per_example.GenericRule)` forms its whole gradients.

    Args:
        *layer_classes: Subclasses of `keras.Layer`. A subclass of a registered class uses the same
            rule if the rule's `handles(layer, registered_class)` says so, else the generic rule.

    Returns:
        The decorator, which takes and returns a subclass of `tfdpx.per_example.Rule`.

    Raises:
        TypeError: If one of `layer_classes` is no layer class.
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
    """Class decorator: a rule for layers of a registered class that its first rule does not handle.

    Args:
        layer_class: Subclass of `keras.Layer`.
    """

    def decorate(rule):
        _VARIANTS.setdefault(layer_class, []).append(rule)
        return rule

    return decorate


def find_rules(layer):
    """The rules registered nearest to the class of `layer`, a list, and that class, or None."""
    for ancestor in type(layer).__mro__:
        if ancestor in _RULES:
            return [_RULES[ancestor], *_VARIANTS.get(ancestor, ())], ancestor
    return [], None


@dataclasses.dataclass(frozen=True)
class CallLayout:
    """The parts of a unit's call that do not depend on the batch size.

    Attributes:
        layer: The `keras.Layer`.
        rule: The `Rule` class that serves it.
        batched: A flag for each leaf of the call's (args, kwargs): does it have a batch axis?
        is_captured: Whether the rule forms the gradients. Otherwise the map does.
    """

    layer: keras.Layer
    rule: type
    batched: tuple
    is_captured: bool


class Call:
    """One captured call of one unit.

    Attributes:
        layer: The `keras.Layer`.
        rule: The `Rule` class that serves it.
        args, kwargs: The arguments of the call. Tensors without a batch axis are None after the
            forward pass, because they belong to one example.
        kept: Dict in which a rule's `forward` may save tensors [B * K, ...].
        shared: The result of `Rule.shared`.
        jit_compile: Whether the step is compiled by XLA.
        outputs: List of the watched tensors.
    """

    def __init__(self, layout, args, kwargs, shared, jit_compile=False):
        self.layer, self.rule = layout.layer, layout.rule
        self.args, self.kwargs = args, kwargs
        self.kept: dict[str, Any] = {}
        self.shared, self.jit_compile = shared, jit_compile
        self.outputs: list[tf.Tensor] = []
        self._batched = layout.batched

    def forward(self, tape):
        """Makes the call and watches its outputs; returns them as the layer would."""

        def watch(nest):
            outputs = Outputs(nest)
            # An identity separates the effect of the loss on a tensor from the layer's own.
            tensors = [tf.identity(t) for t in outputs.tensors]
            watched = outputs.select(tensors)
            for tensor in watched:
                tape.watch(tensor)
            self.outputs.extend(watched)
            return outputs.rebuild(tensors)

        return self.rule.forward(self, watch)

    @property
    def tensors(self):
        """List of the tensors with a batch axis that the rule may read."""
        return [*self._rows.tensors, *Rows(self.kept).tensors]

    def with_tensors(self, tensors):
        """The same call with others in place of `tensors`."""
        twin, tensors = copy.copy(self), iter(tensors)
        twin.args, twin.kwargs = self._rows.pack(tensors, keep_others=False)
        twin.kept = Rows(self.kept).map(lambda _: next(tensors))
        return twin

    @property
    def _rows(self):
        return Rows((self.args, self.kwargs), self._batched)


class Rule:
    """Per-example gradients of one call of one layer.

    The batch that a layer sees holds K rows for each example, one a view, one after the other. The
    gradient of an example is the sum over its rows and positions: the factor 1/K of augmentation
    multiplicity (De et al. 2022, Eq. 4) is already in the output gradients.

    A subclass gives `per_example_gradients`: that is enough. It may add `ghost_squared_norms` and
    `ordinary_clipped_sum`, which do without an array of one gradient an example, and `costs`, by
    which the cheaper way is taken. All arithmetic is float32.

    Attributes:
        call: The `tfdpx.per_example.capture.Call`: `layer`, `args`, `kwargs`, `outputs`, `kept`.
        layer: The `keras.Layer`.
        output_gradients: Gradients at what `forward` watched, a list of float32 tensors
            [B * K, ...]. One is zero where the loss does not depend on that tensor.
        num_views: Int, K.
        variables: The trainable `keras.Variable`s that this call explains.
    """

    # What a subclass of the registered layer must not have overridden for the rule to hold.
    assumes: tuple[str, ...] = ("call",)
    # Whether `forward` keeps what the layer draws, so that a layer with dropout has this rule.
    keeps_draws: bool = False

    @classmethod
    def handles(cls, layer: keras.Layer, registered_class: type) -> bool:
        """Whether this rule is right for `layer`, whose class derives from `registered_class`.

        It is if the subclass overrides nothing that `assumes` lists, and has neither LoRA nor
        quantization, nor a sublayer with weights (a `PReLU` as its activation).

        Args:
            layer: The `keras.Layer`.
            registered_class: The class that the rule was registered for.
        """
        mine = type(layer)
        changed = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None)
        own = {id(v) for v in layer_internals.own_trainable_variables(layer)}
        changed = changed or any(id(v) not in own for v in layer.trainable_variables)
        return not changed and all(
            getattr(mine, name, None) is getattr(registered_class, name, None)
            for name in cls.assumes
        )

    @classmethod
    def forward(cls, call: Call, watch: Callable[[Any], Any]) -> Any:
        """Makes the layer's call while the model is captured.

        Args:
            call: The `Call`.
            watch: Function from a nest of outputs to an equal nest, whose differentiable tensors
                join `call.outputs`: the rule gets the gradients at these.

        Returns:
            What the layer returns.
        """
        return watch(layer_internals.call_operation(call.layer, call.args, call.kwargs))

    @classmethod
    def shared(cls, layer: keras.Layer) -> Any:
        """What `forward` and the rule need of the weights alone: made once for all passes.

        It is `call.shared`. None where there is nothing to share.

        Args:
            layer: The `keras.Layer`.
        """
        del layer
        return None

    @classmethod
    def joined(cls, rules: list[Rule]) -> Rule | None:
        """One rule for several calls of one layer, or None where their gradients are just added.

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
        """Pairs (variable, float32 [B, *variable.shape]) of what is formed in any case, and small.

        The engine takes norms and sums of these, those of all layers at once: for biases, gains.
        """
        return []

    @property
    def large_variables(self) -> list[keras.Variable]:
        """Those of `variables` that `small_gradients` does not hold."""
        return [v for v in self.variables if not any(v is w for w, _ in self.small_gradients)]

    @property
    def post_sum_transforms(self) -> dict[int, Callable]:
        """`{id(variable): function}`: what is left to do to `clipped_sum`, added up.

        A function takes the sum over all microbatches and what `shared` gives. It is linear in the
        sum, and reads no tensor of a microbatch.
        """
        return {}

    def per_example_gradients(self) -> list[tf.Tensor]:
        """A list of float32 tensors [B, *variable.shape], in the order of `variables`."""
        raise NotImplementedError

    def ghost_squared_norms(self) -> Any:
        """`squared_norms` without any per-example gradient; only where `costs` has "ghost"."""
        raise NotImplementedError

    @property
    def inputs_to_mask(self) -> list[tf.Tensor]:
        """List of float32 [B * n, ...] that `clipped_sum` multiplies with what it has scaled.

        The engine gives them back with zeros for examples of factor zero: 0 * inf is not zero.
        """
        return []

    def ordinary_clipped_sum(self, factors: tf.Tensor, masked: list[tf.Tensor]) -> list[tf.Tensor]:
        """`clipped_sum` without any per-example gradient; only where `costs` has "ordinary".

        Args:
            factors: As for `clipped_sum`.
            masked: As for `clipped_sum`, never None.
        """
        raise NotImplementedError

    def costs(self) -> dict[str, Cost]:
        """`{method: Cost}` of those of `cost_model.NORMS` and `cost_model.SUMS` that the rule has.

        Only ratios matter, and only where there is a choice.
        """
        return {"instantiate": Cost(), "contract": Cost()}

    def allows_ordinary_sum(self) -> bool:
        """Whether `instantiated_squared_norms` allows for the rounding of `ordinary_clipped_sum`.

        See `tfdpx.per_example.rounding`.
        """
        return False

    @functools.cached_property
    def choice(self) -> LayerChoice:
        """The `LayerChoice` that `squared_norms` and `clipped_sum` follow."""
        costs = self.costs() if self.large_variables else Rule.costs(self)
        name = type(self).__name__
        return choose(self.layer.name, name, costs, self.allows_ordinary_sum())

    @property
    def choices(self) -> list[LayerChoice]:
        """`choice`, as a list."""
        return [self.choice]

    def squared_norms(self) -> Any:
        """Squared l2 norm of each example's gradient over all of `large_variables`.

        Never less than the norm of what `clipped_sum` adds at factor one, rounding included: see
        `tfdpx.per_example.rounding`.

        Returns:
            float32 [B], or `rounding.Measured`, for which the engine allows with other layers'.
        """
        if self.choice.norm == "ghost":
            return self.ghost_squared_norms()
        return self.instantiated_squared_norms()

    def clipped_sum(
        self, factors: tf.Tensor, masked: list[tf.Tensor] | None = None
    ) -> list[tf.Tensor]:
        """The sum over examples of `factors[i]` times gradient i.

        Args:
            factors: float32 [B]. Where it is zero the example contributes exactly zero, also if
                its gradient is not finite.
            masked: List of tensors: `inputs_to_mask`, with zeros for examples of factor zero. By
                default they are made here.

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
        """`squared_norms` from `instances`."""
        return rounding.squared_norms(self.instances)

    def contracted_clipped_sum(
        self, factors: tf.Tensor, masked: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """`clipped_sum` from `instances`.

        Args:
            factors: As for `clipped_sum`.
            masked: As for `clipped_sum`, never None.
        """
        del masked
        return [sum_examples(g, factors) for g in self.instances]

    @functools.cached_property
    def instances(self) -> list[tf.Tensor]:
        """`per_example_gradients` of `large_variables`, computed once for norm and sum."""
        made = zip(self.variables, self.per_example_gradients(), strict=True)
        return [g for v, g in made if any(v is w for w in self.large_variables)]

    def explains(self, variable: Any) -> bool:
        """Whether a variable is trained through this call.

        Args:
            variable: `keras.Variable` or None.
        """
        return any(variable is v for v in self.variables)

    def in_order(self, by_variable: list[tuple[Any, Any]]) -> list:
        """The values in the order of `variables`, without those of variables that are not trained.

        Args:
            by_variable: List of pairs of a `keras.Variable` and a value.
        """
        return [next(value for w, value in by_variable if w is v) for v in self.variables]


class BeforeActivation(Rule):
    """A rule that wants the gradient before the layer's `activation`, which is applied outside."""

    @classmethod
    def forward(cls, call, watch):
        """See `Rule.forward`."""
        if call.layer.activation is None:
            return super().forward(call, watch)
        linear = layer_internals.without(call.layer, activation=None)
        outputs = watch(layer_internals.call_operation(linear, call.args, call.kwargs))
        return call.layer.activation(outputs)


# It calls its sublayer inside a loop, where inputs cannot be captured one by one.
@register(keras.layers.TimeDistributed)
class GenericRule(Rule):
    """Leaves a layer, with its sublayers, to the function of one example that the engine maps.

    Right for any layer. Costs the memory of one whole gradient an example.
    """

    @classmethod
    def handles(cls, layer: keras.Layer, registered_class: type) -> bool:
        """True: nothing about the layer is assumed."""
        del layer, registered_class
        return True
