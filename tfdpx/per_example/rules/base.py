"""What every per-example rule offers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example import rounding
from tfdpx.per_example.cost_model import Cost, LayerChoice, choose

if TYPE_CHECKING:
    from tfdpx.per_example.capture import Call


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


def positions(tensor, num_views, groups=False):
    """[B * K, ..., d] as float32 [B, T, d]: all positions of all views of an example in line.

    Args:
        tensor: Tensor [B * K, ..., d].
        num_views: Int, K.
        groups: Whether to give [B, 1, T, d], with an axis for one group.
    """
    tensor = tf.cast(tensor, "float32")
    rows, *middle, last = tensor.shape
    count = None if None in middle else num_views * math.prod(middle)
    examples = None if rows is None else rows // num_views
    if examples is None and count is None:
        examples = tf.shape(tensor)[0] // num_views
    shape = (examples, *([1] if groups else []), count, last)
    return tf.reshape(tensor, [-1 if size is None else size for size in shape])


def sum_examples(tensor, factors):
    """`tensor` [B, ...] summed over examples with `factors` [B]; 0 * nan counts as 0."""
    return tf.reduce_sum(scale_examples(tensor, factors), axis=0)


def sum_each(tensors, factors):
    """`sum_examples` of each of a list of tensors: a list."""
    small, vectors, others = rounding.in_line(tensors)
    sums = iter([sum_examples(tensor, factors) for tensor in others])
    if vectors is None:
        return list(sums)
    shapes = [t.shape[1:] for t, flag in zip(tensors, small, strict=True) if flag]
    parts = tf.split(sum_examples(vectors, factors), [math.prod(shape) for shape in shapes])
    parts = iter([p if s.rank else tf.squeeze(p) for p, s in zip(parts, shapes, strict=True)])
    return [next(parts if flag else sums) for flag in small]


def scale_examples(tensor, factors):
    """`tensor` [B, ...] times `factors` [B], exactly zero where the factor is."""
    factors = tf.reshape(factors, [-1] + [1] * (tensor.shape.rank - 1))
    return tf.math.multiply_no_nan(tensor, factors)


def zero_excluded(tensors, factors, finite=None):
    """A list of tensors [B * n, ...] with zeros for the examples of factor zero.

    Args:
        tensors: List of float32 tensors; the n rows of an example stand one after the other.
        factors: float32 [B].
        finite: Scalar bool tensor: whether everything is finite, so that nothing need be done. None
            where that is not known, which only costs time.
    """

    def zeroed():
        flags = tf.cast(factors > 0, "float32")[:, tf.newaxis]
        flat = tf.stack([tf.shape(factors)[0], -1])
        return [
            tf.reshape(tf.math.multiply_no_nan(tf.reshape(t, flat), flags), tf.shape(t))
            for t in tensors
        ]

    if finite is None or not tensors:
        return zeroed()
    kept = tf.cond(finite, lambda: list(tensors), zeroed)
    for tensor, same in zip(tensors, kept, strict=True):
        same.set_shape(tensor.shape)
    return kept
