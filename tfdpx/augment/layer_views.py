"""Views by an augmentation layer of Keras or keras_cv."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdpx._arguments import shortened
from tfdpx.augment.each_alone import EachAlone, keys
from tfdpx.per_example.random_layers import drawing_from_key


@keras.saving.register_keras_serializable(package="tfdpx")
class LayerViews:
    """Views from any Keras or keras_cv augmentation layer.

    The layer makes each view separately, as a batch of one, with separate random numbers. So no
    view depends on another example, on its place or on the division of the batch into microbatches,
    for every layer. Neither `keras.utils.set_random_seed` nor a `seed` of the layer has an effect.
    The layer receives 8-bit images as float32 in [0, 255]: some layers accept nothing else.
    Layers of Keras and keras_cv that interpolate (translation, rotation, zoom) need
    `jit_compile=False`; the others compile under XLA.

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
        """Returns a key for each view, with which the layer draws when it is applied.

        Args:
            batch_size: Int or int tensor.
            augmult: Int, K.
            seed: int64 tensor of shape [2].

        Returns:
            int64 tensor [batch_size, K, 2].
        """
        return keys([batch_size, augmult], seed)

    def apply(self, images: tf.Tensor, choices: Any) -> tf.Tensor:
        """Returns the layer's outputs for K copies of each image.

        Args:
            images: Tensor [B, ...].
            choices: The result of `draw`.

        Returns:
            Tensor [B, K, ...].
        """
        augmult = choices.shape[1]
        if images.dtype == tf.uint8:
            images = tf.cast(images, "float32")
        views = self._alone(tf.repeat(images, augmult, axis=0), tf.reshape(choices, [-1, 2]))
        return tf.reshape(views, [-1, augmult, *views.shape[1:]])

    def graphs(self) -> list:
        """Returns a list of the `tf.Graph`s that make a view, as far as they were needed."""
        return self._alone.graphs()

    def _view(self, image, key):
        with drawing_from_key(self.layer, key):
            return self.layer(image[tf.newaxis], training=True)[0]

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        return {"layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LayerViews:
        """Builds the wrapper from `get_config()`."""
        return cls(keras.saving.deserialize_keras_object(config["layer"]))


def get(augment):
    """Returns `augment` as an object with `draw` and `apply`; a `keras.Layer` is wrapped."""
    if augment is None or (hasattr(augment, "draw") and hasattr(augment, "apply")):
        return augment
    return LayerViews(augment)
