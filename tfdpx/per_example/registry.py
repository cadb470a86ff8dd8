"""Which per-example rule serves which layer class."""

from __future__ import annotations

from collections.abc import Callable

import keras

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


def find(layer):
    """The rules registered nearest to the class of `layer`, a list, and that class, or None."""
    for ancestor in type(layer).__mro__:
        if ancestor in _RULES:
            return [_RULES[ancestor], *_VARIANTS.get(ancestor, ())], ancestor
    return [], None
