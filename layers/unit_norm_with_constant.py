"""Features of unit norm with a constant among them, for a private linear classifier."""

from __future__ import annotations

import math
from typing import Any

import keras
from keras import ops

from tfdpx._arguments import is_number, require


@keras.saving.register_keras_serializable(package="tfdpx")
class UnitNormWithConstant(keras.layers.Layer):
    """Scales each example to norm one, appends a constant, and scales to norm one again.

    For a `keras.layers.Dense(classes, use_bias=False)` with a softmax after it, the constant doing
    the work of the bias. Rows `x` of norm one are good for private training:

    - The gradient of the cross-entropy is `x (p - y)^T`, whose norm is at most `sqrt(2)` whatever
      the weights. So the clip is known beforehand: with `l2_norm_clip=math.sqrt(2)` no example
      loses anything.
    - Noise of standard deviation `s` on each weight moves each logit by `s`, however many features
      there are.

    An example of zeros becomes the constant alone, scaled to one. Each example is treated alone,
    and there are no weights.

    Args:
        constant: Positive number, appended to features of norm one.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Input shape: `[batch, ...]`, all known but the batch.
    Output shape: `[batch, features + 1]`, flattened. It is computed in float32 (float64 where the
    layer's `dtype` is) and has the compute dtype, to whose precision the norms are one.

    Raises:
        ValueError: If `constant` is not a positive number, or if a size of the input but the batch
            is unknown.

    Example:
    >>> rows = UnitNormWithConstant()(np.array([[3.0, 4.0], [0.0, 0.0]]))
    >>> np.round(rows, 3)
    array([[0.597, 0.796, 0.1  ],
           [0.   , 0.   , 1.   ]], dtype=float32)
    """

    def __init__(self, constant: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        fits = is_number(constant) and 0 < constant < math.inf
        require(fits, "constant", constant, "be a positive, finite number", " Use 0.1.")
        self.constant = float(constant)

    def call(self, inputs: Any) -> Any:
        """The rows of `inputs`, with the constant, at norm one."""
        num_features = self.compute_output_shape(inputs.shape)[-1] - 1
        rows = ops.reshape(inputs, (-1, num_features))
        rows = ops.cast(rows, keras.backend.result_type(self.compute_dtype, "float32"))
        constants = ops.full_like(rows[:, :1], self.constant)
        rows = _unit(ops.concatenate([_unit(rows), constants], axis=-1))
        return ops.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """`(batch, features + 1)`."""
        if None in input_shape[1:]:
            raise ValueError(
                f"Layer {self.name!r} needs inputs [batch, ...] of known sizes. Received: input "
                f"shape {tuple(input_shape)}. Give keras.Input all sizes but the batch."
            )
        return (input_shape[0], math.prod(input_shape[1:]) + 1)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        return {**super().get_config(), "constant": self.constant}


def _unit(rows):
    """`rows` [batch, features] at norm one; rows of zeros as they are."""
    # Squares neither overflow nor vanish once the largest entry is one. The result does not depend
    # on this factor, so no gradient need pass through it.
    largest = ops.max(ops.abs(rows), axis=-1, keepdims=True)
    rows = rows / ops.stop_gradient(ops.maximum(largest, 1e-30))
    # The sum is at least one, but in a row of zeros, where the root's gradient would be infinite.
    squares = ops.sum(ops.square(rows), axis=-1, keepdims=True)
    return rows / ops.sqrt(ops.maximum(squares, 1.0))
