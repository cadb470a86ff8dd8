"""The rule of layers without a rule of their own: the map forms their whole gradient."""

from __future__ import annotations

import keras

from tfdpx.per_example.registry import register
from tfdpx.per_example.rules.base import Rule


# These call sublayers inside loops, where inputs cannot be captured one by one.
@register(keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)
class GenericRule(Rule):
    """Leaves a layer, with its sublayers, to the function of one example that the engine maps.

    Right for any layer. Costs the memory of one whole gradient an example.
    """

    @classmethod
    def handles(cls, layer: keras.Layer, registered_class: type) -> bool:
        """True: nothing about the layer is assumed."""
        del layer, registered_class
        return True
