"""Makes views by an augmentation layer of Keras or keras_cv, for example `RandomZoom`."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdpx._arguments import shortened
from tfdpx.augment.each_alone import EachAlone, keys
from tfdpx.per_example.random_layers import drawing_from_key


@keras.saving.register_keras_serializable(package="tfdpx")
class LayerViews:
    """Makes views by any augmentation layer of Keras or keras_cv.

    The layer makes each view separately, as a batch of one image, with separate random numbers. So
    a view cannot depend on other examples, on its position in the batch, or on the microbatches.
    `keras.utils.set_random_seed` and the `seed` of the layer have no effect. The layer receives
    8-bit images as float32 in [0, 255], because some layers accept nothing else. Layers that
    interpolate (translation, rotation, zoom) need `jit_compile=False`; XLA compiles the others.

    Args:
        layer: A `keras.Layer` that maps images [1, ...] to images [1, ...].

    Raises:
        ValueError: If `layer` is not a `keras.Layer`.
    """

    def __init__(self, layer: keras.Layer) -> None:
        if not isinstance(layer, keras.Layer):
            raise ValueError(
                "Argument `augment` must be a tfdpx.augment object or a keras.Layer. Received: "
                f"augment={shortened(layer)}"
            )
        self.layer = layer
        self._alone = EachAlone(self._view)

    def __getstate__(self):
        return {"layer": self.layer}

    def __setstate__(self, state):
        self.__init__(**state)

    def draw(self, batch_size: int, augmult: int, seed: tf.Tensor) -> tf.Tensor:
        """Returns a random key for each view, from which the layer draws its choices in `apply`.

        Args:
            batch_size: Int or int tensor, the number of examples.
            augmult: Int, the number K of views of each example.
            seed: int64 tensor of shape [2].

        Returns:
            int64 tensor [batch_size, K, 2].
        """
        return keys([batch_size, augmult], seed)

    def apply(self, images: tf.Tensor, choices: Any) -> tf.Tensor:
        """Returns the layer's outputs for K copies of each image.

        Args:
            images: Tensor [B, ...].
            choices: int64 tensor [B, K, 2] from `draw`.

        Returns:
            Tensor [B, K, ...].
        """
        augmult = choices.shape[1]
        if images.dtype == tf.uint8:
            images = tf.cast(images, "float32")
        views = self._alone(tf.repeat(images, augmult, axis=0), tf.reshape(choices, [-1, 2]))
        return tf.reshape(views, [-1, augmult, *views.shape[1:]])

    def graphs(self) -> list:
        """Returns a list of the `tf.Graph`s that were traced so far. Each graph makes one view."""
        return self._alone.graphs()

    def _view(self, image, key):
        with drawing_from_key(self.layer, key):
            return self.layer(image[tf.newaxis], training=True)[0]

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        return {"layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LayerViews:
        """Builds the object from `get_config()`."""
        return cls(keras.saving.deserialize_keras_object(config["layer"]))


def get(augment):
    """Returns `augment` as an object with `draw` and `apply`.

    Args:
        augment: Augmentation with `draw` and `apply`, or None, which are returned unchanged; or a
            `keras.Layer`, for which `LayerViews` is returned.
    """
    if augment is None or (hasattr(augment, "draw") and hasattr(augment, "apply")):
        return augment
    return LayerViews(augment)
