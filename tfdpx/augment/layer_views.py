"""Views by an augmentation layer of Keras or keras_cv."""

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tfdpx")
class LayerViews:
    """Views from any Keras or keras_cv augmentation layer.

    The layer draws from its own seed generator for all views at once, so unlike those of
    `RandomCropFlip` the views depend on how the batch is cut into microbatches. It receives 8-bit
    images as float32, in [0, 255]: some layers take no other. Keras' and keras_cv's layers that
    interpolate (translation, rotation, zoom) need `jit_compile=False`, the rest compile under XLA.

    Args:
        layer: A `keras.Layer` that maps images [N, ...] to images [N, ...] independently.
    """

    def __init__(self, layer):
        if not isinstance(layer, keras.Layer):
            raise ValueError(
                "Argument `augment` must be a tfdpx.augment object or a keras.Layer. Received: "
                f"augment={layer!r}"
            )
        self.layer = layer

    def draw(self, batch_size, augmult, seed):
        """Only the number of views: int32 tensor [batch_size, K]; the layer draws when applied."""
        del seed
        return tf.zeros(tf.stack([batch_size, augmult]), tf.int32)

    def apply(self, images, choices):
        """Tensor [B, K, ...]: the layer's output on K copies of each of `images` [B, ...]."""
        augmult = choices.shape[1]
        if images.dtype == tf.uint8:
            images = tf.cast(images, "float32")
        views = self.layer(tf.repeat(images, augmult, axis=0), training=True)
        return tf.reshape(views, [-1, augmult, *views.shape[1:]])

    def get_config(self):
        """Returns the configuration as a JSON-serialisable dict."""
        return {"layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config):
        """Builds the wrapper from `get_config()`."""
        return cls(keras.saving.deserialize_keras_object(config["layer"]))


def get(augment):
    """`augment` as an object with `draw` and `apply`; a `keras.Layer` is wrapped."""
    if augment is None or (hasattr(augment, "draw") and hasattr(augment, "apply")):
        return augment
    return LayerViews(augment)
