"""Makes views that are mixtures of two views of the same example.

Reference: Bao, Pittaluga, Kumar & Bindschaedler 2023, "DP-Mix: Mixup-based Data Augmentation for
Differentially Private Learning" (arXiv:2311.01295), where the method is called DP-Mix_Self.
"""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import scipy.special
import tensorflow as tf

from tfdpx import noise
from tfdpx._arguments import is_integer, is_number, require
from tfdpx.augment._draws import draw_below
from tfdpx.augment.layer_views import get

# XLA cannot compile an exact sampler of the Beta distribution. So weights are drawn from this
# number of equally likely quantiles, which is precise enough for 8-bit images.
_QUANTILES = 4096
_MIXING = 1


@keras.saving.register_keras_serializable(package="tfdpx")
class MixViews:
    """Makes views by another augmentation, and mixtures of two of these views.

    Of the `augmult` views of an example, the first are ordinary views, made by `augment`. The last
    `mixed_views` views are mixtures `w * a + (1 - w) * b`, where `a` and `b` are two different
    ordinary views, chosen at random, and the weight `w` has the distribution Beta(alpha, alpha).
    All views come from the same example. So they have its label, and clipping bounds their
    contribution together. Neither would be true for ordinary mixup, which mixes different examples.

    Mixtures are computed in float32 and converted to the dtype of the ordinary views.

    Args:
        augment: A `tfdpx.augment` object or a Keras augmentation layer that makes ordinary views.
        mixed_views: Int >= 1, the number of mixtures among the `augmult` views. At least two views
            must be ordinary ones.
        alpha: Float > 0. With 1, all weights are equally likely. With less, most mixtures are close
            to one of the two views.

    Raises:
        ValueError: If an argument is out of range.

    Example:
    >>> import tfdpx
    >>> augment = MixViews(tfdpx.augment.RandomCropFlip(padding=4), mixed_views=18)
    >>> choices = augment.draw(batch_size=2, augmult=34, seed=tf.constant([1, 2], tf.int64))
    >>> augment.apply(tf.zeros([2, 32, 32, 3], tf.uint8), choices).shape
    TensorShape([2, 34, 32, 32, 3])
    """

    def __init__(self, augment: Any, mixed_views: int, alpha: float = 0.2) -> None:
        require(augment is not None, "augment", augment, "make the views to mix")
        require(is_integer(mixed_views, 1), "mixed_views", mixed_views, "be an int >= 1")
        is_valid = is_number(alpha) and 0 < alpha < math.inf
        require(is_valid, "alpha", alpha, "be a positive and finite float")
        self.augment = get(augment)
        self.mixed_views = mixed_views
        self.alpha = float(alpha)
        middles = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        self._weights = scipy.special.betaincinv(alpha, alpha, middles).astype("float32")

    def draw(self, batch_size: int, augmult: int, seed: tf.Tensor) -> Any:
        """Draws random choices for `augmult` views of each of `batch_size` examples.

        Args:
            batch_size: Int or int tensor, the number of examples.
            augmult: Int, the number K of views of each example.
            seed: int64 tensor of shape [2].

        Returns:
            A pair. First, the choices of `augment` for the ordinary views. Second, an int32 tensor
            [batch_size, mixed_views, 3] for the mixtures: the indices of the two views, and the
            index of the weight among quantiles of the Beta distribution.

        Raises:
            ValueError: If there are fewer than two views to mix.
        """
        views = augmult - self.mixed_views
        if views < 2:
            raise ValueError(
                "Argument `mixed_views` of MixViews must leave at least 2 of the `augmult` views "
                f"to mix. Received: mixed_views={self.mixed_views}, augmult={augmult}."
            )
        counts = [views, views - 1, _QUANTILES]
        drawn = draw_below(counts, batch_size, self.mixed_views, noise.fold_in(seed, _MIXING))
        first, steps, weight = tf.unstack(drawn, axis=-1)
        mixing = tf.stack([first, (first + 1 + steps) % views, weight], axis=-1)
        return self.augment.draw(batch_size, views, seed), mixing

    def apply(self, images: tf.Tensor, choices: Any) -> tf.Tensor:
        """Returns the views of `images` that `choices` describe.

        Args:
            images: Tensor [B, ...] that `augment` accepts.
            choices: The pair from `draw`.

        Returns:
            Tensor [B, K, ...] with the dtype of the ordinary views.
        """
        drawn, mixing = choices
        views = self.augment.apply(images, drawn)
        first, second = (
            tf.cast(tf.gather(views, mixing[..., i], axis=1, batch_dims=1), "float32")
            for i in (0, 1)
        )
        weights = tf.gather(tf.constant(self._weights), mixing[..., 2])
        inner = [1] * (views.shape.rank - 2)
        weights = tf.reshape(weights, [-1, self.mixed_views, *inner])
        mixed = weights * first + (1.0 - weights) * second
        mixed = tf.round(mixed) if views.dtype.is_integer else mixed
        return tf.concat([views, tf.cast(mixed, views.dtype)], axis=1)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        return {
            "augment": keras.saving.serialize_keras_object(self.augment),
            "mixed_views": self.mixed_views,
            "alpha": self.alpha,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MixViews:
        """Builds the augmentation from `get_config()`."""
        augment = keras.saving.deserialize_keras_object(config["augment"])
        return cls(**{**config, "augment": augment})
