"""The trainable scalar at the end of a residual branch."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdpx.per_example import Rule, register
from tfdpx.per_example.rows import sum_rows


@keras.saving.register_keras_serializable(package="tfdpx")
class SkipInit(keras.layers.Layer):
    """Multiplies a residual branch by one trainable scalar: `scale * gain * inputs`.

    De & Smith (2020) start the scalar at zero, so that a residual network is the identity at
    initialisation and trains without normalization. It treats every example alone.

    Args:
        scale: Float, a constant factor besides the trainable one, such as the `alpha` of Brock et
            al. (2021a).
        initializer: Initializer of `gain`, a weight of shape `[]`. De et al. (2022, C.1) start
            NF-ResNets that are trained privately from scratch at one.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Input and output shape: any, the same.

    References:
        - [De & Smith, 2020](https://arxiv.org/abs/2002.10444).
    """

    def __init__(self, scale: float = 1.0, initializer: Any = "zeros", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape: Any) -> None:
        """Creates `gain`."""
        del input_shape
        self.gain = self.add_weight(name="gain", shape=(), initializer=self.initializer)

    def call(self, inputs: Any) -> Any:
        """Scales `inputs` by the constant and the trainable factor."""
        return inputs * (self.scale * self.gain)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the input."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        initializer = keras.initializers.serialize(self.initializer)
        return {**super().get_config(), "scale": self.scale, "initializer": initializer}


@register(SkipInit)
class SkipInitRule(Rule):
    """The gain's gradient is `scale` times the inner product of inputs and output gradients."""

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        products = tf.cast(self.call.args[0], "float32") * self.output_gradients[0]
        summed = sum_rows(products, self.num_views, range(1, products.shape.rank))
        return [self.layer.scale * summed]
