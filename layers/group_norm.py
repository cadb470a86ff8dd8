"""Group normalization with the group number of the DP-SGD literature."""

from __future__ import annotations

from typing import Any

import keras


@keras.saving.register_keras_serializable(package="tfdpx")
class GroupNorm(keras.layers.GroupNormalization):
    """Group normalization with 16 groups by default.

    Normalises each example over positions and the channels of a group, so that no example's
    output depends on another's: the replacement for batch normalization under differential
    privacy. It is `keras.layers.GroupNormalization` but for the default of `groups` (Keras's is
    32) and an error that says which group numbers fit.

    Args:
        groups: Integer, number of groups; it must divide the channels. -1 stands for one channel
            a group (instance normalization).
        **kwargs: Arguments of `keras.layers.GroupNormalization`: `axis`, `epsilon`, `center`,
            `scale`, initializers, regularizers, constraints, `name`, `dtype`.

    Input and output shape: `[batch, ..., channels]`, or the channels at `axis`.

    Raises:
        ValueError: When built, if `groups` does not divide the channels.

    Example:
    >>> images = np.random.default_rng(0).normal(size=(2, 8, 8, 32))
    >>> normalized = GroupNorm()(images)
    >>> alone = GroupNorm()(images[:1])
    >>> bool(np.allclose(normalized[:1], alone, atol=1e-5))
    True

    References:
        - [Wu & He, 2018](https://arxiv.org/abs/1803.08494).
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.1 and appendix C.1, for
          the 16 groups.
    """

    def __init__(self, groups: int = 16, **kwargs: Any) -> None:
        super().__init__(groups=groups, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Creates `gamma` and `beta` after checking that `groups` divides the channels."""
        channels = input_shape[self.axis]
        if channels is not None and self.groups != -1 and channels % self.groups:
            fitting = [groups for groups in range(1, channels + 1) if channels % groups == 0]
            raise ValueError(
                f"Argument `groups` must divide the channels of the input of layer {self.name!r}. "
                f"Received: groups={self.groups}, {channels} channels "
                f"(input shape {tuple(input_shape)}). Use one of groups={fitting}."
            )
        super().build(input_shape)
