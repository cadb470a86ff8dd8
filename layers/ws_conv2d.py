"""Convolution with weight standardization."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfdpx._arguments import require


@keras.saving.register_keras_serializable(package="tfdpx")
class WSConv2D(keras.layers.Conv2D):
    """2D convolution whose kernel is standardized over the fan-in of each filter.

    A drop-in replacement for `keras.layers.Conv2D`. For each output channel `o` the convolution
    uses, in place of the raw kernel `w`,

    `w_hat[..., o] = gain[o] * (w[..., o] - mean[o]) / sqrt(max(fan_in * var[o], epsilon))`

    with `mean` and the population variance `var` taken over the `fan_in = kernel height * kernel
    width * input channels / groups` weights of the filter. The standardization is part of the
    layer's call and is differentiated through, so gradients (and per-example gradients) are those
    of the raw kernel. It reads weights only and never mixes examples, which is why it may take
    the place of batch normalization under differential privacy.

    Args:
        filters: Integer, number of output channels. As in `keras.layers.Conv2D`, like every other
            argument not listed here.
        kernel_size: Integer or pair of integers, size of the window.
        *args: More positional arguments of `keras.layers.Conv2D`: `strides` and so on.
        use_gain: Boolean, whether each filter has a learnable scale `gain` of shape `[filters]`,
            initialised to one (Brock et al., 2021a). Appendix C.1 of De et al. (2022) has none.
        epsilon: Float, lower bound of `fan_in * var`. Filters whose weights are nearly equal would
            otherwise be blown up; filters above the bound are unaffected. 1e-4 as in Brock et al.
        **kwargs: Arguments of `keras.layers.Conv2D`: `strides`, `padding`, `data_format`,
            `dilation_rate`, `groups`, `activation`, `use_bias`, initializers, regularizers,
            constraints, `name`, `dtype`. Regularizers and constraints act on the raw kernel.

    Call arguments and output shapes are those of `keras.layers.Conv2D`. Under a mixed-precision
    policy the statistics are computed in float32 and the convolution in the compute dtype.

    Raises:
        ValueError: If `epsilon` is not positive, or if a filter has a fan-in of one (the only
            standardized weight would then be zero whatever the kernel).

    Example:
    >>> layer = WSConv2D(4, 3, padding="same", activation="relu")
    >>> layer(np.zeros((2, 8, 8, 3))).shape
    TensorShape([2, 8, 8, 4])
    >>> float(np.abs(np.sum(layer.standardized_kernel(), axis=(0, 1, 2))).max()) < 1e-5
    True

    References:
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), appendix C.1.
        - [Brock et al., 2021a](https://arxiv.org/abs/2101.08692), section 3.
        - [Qiao et al., 2019](https://arxiv.org/abs/1903.10520).
    """

    def __init__(
        self,
        filters: int,
        kernel_size: int | tuple[int, int],
        *args: Any,
        use_gain: bool = False,
        epsilon: float = 1e-4,
        **kwargs: Any,
    ) -> None:
        super().__init__(filters, kernel_size, *args, **kwargs)
        require(epsilon > 0, "epsilon", epsilon, "be positive", " Use the default, 1e-4.")
        self.use_gain = use_gain
        self.epsilon = epsilon

    def build(self, input_shape: Any) -> None:
        """Creates `kernel`, `bias` and, with `use_gain`, `gain`."""
        channels = input_shape[-1 if self.data_format == "channels_last" else 1]
        if math.prod(self.kernel_size) * channels // self.groups < 2:
            raise ValueError(
                f"Layer {self.name!r} has a fan-in of one, and standardizing a single weight gives "
                f"zero. Received: kernel_size={self.kernel_size}, groups={self.groups}, "
                f"{channels} input channels. Use keras.layers.Conv2D here, a larger kernel or "
                "fewer groups."
            )
        super().build(input_shape)
        self.gain = None
        if self.use_gain:
            self.gain = self.add_weight(name="gain", shape=(self.filters,), initializer="ones")

    def add_weight(self, *args: Any, **kwargs: Any) -> keras.Variable:
        """Creates a weight; `kernel` and `gain` are exempt from autocasting.

        Under mixed precision Keras would hand them over in the compute dtype, and their statistics
        would be computed from rounded weights.
        """
        if kwargs.get("name") in ("kernel", "gain"):
            kwargs["autocast"] = False
        return super().add_weight(*args, **kwargs)

    def standardized_kernel(self) -> tf.Tensor:
        """Returns the kernel that the convolution uses.

        Returns:
            Tensor of shape `[kernel height, kernel width, input channels / groups, filters]` in
            float32, or float64 where the layer's weights are. Differentiable in `kernel` and
            `gain`.
        """
        return self._standardize(self.kernel)

    def convolution_op(self, inputs: Any, kernel: Any) -> tf.Tensor:
        """Convolves `inputs` with the standardized `kernel`, both in the compute dtype."""
        kernel = ops.cast(self._standardize(kernel), self.compute_dtype)
        return super().convolution_op(inputs, kernel)

    def _standardize(self, kernel):
        kernel = ops.cast(kernel, keras.backend.result_type(self.variable_dtype, "float32"))
        fan_in = math.prod(kernel.shape[:-1])
        centered = kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        variance = ops.mean(ops.square(centered), axis=(0, 1, 2), keepdims=True)
        scale = ops.rsqrt(ops.maximum(variance * fan_in, self.epsilon))
        if self.use_gain:
            scale = scale * ops.cast(self.gain, kernel.dtype)
        return centered * scale

    def save_own_variables(self, store: Any) -> None:
        """Stores the weights, as for any Keras layer."""
        super().save_own_variables(store)
        if self.built and self.use_gain:  # Conv2D stores its kernel and bias alone.
            store["gain"] = self.gain

    def load_own_variables(self, store: Any) -> None:
        """Restores the weights, as for any Keras layer."""
        super().load_own_variables(store)
        if self.built and self.use_gain:
            self.gain.assign(store["gain"])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        return {**super().get_config(), "use_gain": self.use_gain, "epsilon": self.epsilon}
