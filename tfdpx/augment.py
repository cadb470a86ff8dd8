"""Augmentation multiplicity: K independent views of each example, made on the device.

An augmentation draws its random choices for the whole logical batch at once and applies them to any
part of it. So the views do not depend on `microbatch_size`, and (seed, step) replays them.

Reference: De et al. 2022 (arXiv:2204.13650), section 3.1 and appendix C.2.
"""

import keras
import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.per_example.rows import Rows, synthetic


@keras.saving.register_keras_serializable(package="tfdpx")
class RandomCropFlip:
    """Random crops of the mirror-padded image, and random horizontal flips.

    Each view shifts the image by up to `padding` pixels along each axis, filling the border by
    reflection, and flips it left to right with probability one half: the CIFAR-10 augmentation of
    De et al. 2022, appendix C.2.

    Args:
        padding: Int. Pixels of mirror padding on each edge. Must be smaller than the image.
        flip: Bool. Whether to flip. Turn it off where left and right mean something, as in digits.
    """

    def __init__(self, padding=4, flip=True):
        if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
            raise ValueError(
                f"Argument `padding` must be an int >= 0 (pixels). Received: padding={padding!r}"
            )
        self.padding = padding
        self.flip = bool(flip)

    def draw(self, batch_size, augmult, seed):
        """Random choices for `augmult` views of each of `batch_size` examples.

        Args:
            batch_size: Int or int tensor.
            augmult: Int, K.
            seed: int64 tensor of shape [2].

        Returns:
            int32 tensor [batch_size, K, 3]: row offset, column offset, flip.
        """
        bits = tf.random.stateless_uniform(
            tf.stack([batch_size, augmult, 3]),
            seed,
            minval=0,
            maxval=2**31 - 1,
            dtype=tf.int32,
            alg="philox",
        )
        return bits % tf.constant([2 * self.padding + 1, 2 * self.padding + 1, 2])

    def apply(self, images, choices):
        """The views of `images` that `choices` describe.

        Args:
            images: Tensor [B, H, W, C] of any dtype; 8-bit images stay 8-bit.
            choices: int32 tensor [B, K, 3] from `draw`.

        Returns:
            Tensor [B, K, H, W, C] of the dtype of `images`.
        """
        if images.shape.rank != 4:
            raise ValueError(
                "RandomCropFlip needs images of shape [batch, height, width, channels]. Received: "
                f"shape={tuple(images.shape)}"
            )
        height, width = images.shape[1:3]
        if self.padding >= min(height, width):
            raise ValueError(
                f"Argument `padding` of RandomCropFlip must be smaller than the image. Received: "
                f"padding={self.padding} for images of {height} x {width} pixels."
            )
        rows = _reflect(choices[..., 0:1] - self.padding + tf.range(height), height)
        columns = _reflect(choices[..., 1:2] - self.padding + tf.range(width), width)
        if self.flip:
            columns = tf.where(choices[..., 2:3] == 1, tf.reverse(columns, [-1]), columns)
        views = tf.gather(images, rows, axis=1, batch_dims=1)
        return tf.gather(views, columns, axis=3, batch_dims=2)

    def get_config(self):
        """Returns the configuration as a JSON-serialisable dict."""
        return {"padding": self.padding, "flip": self.flip}

    @classmethod
    def from_config(cls, config):
        """Builds the augmentation from `get_config()`."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfdpx")
class LayerViews:
    """Views from any Keras or keras_cv augmentation layer.

    The layer draws from its own seed generator for all views at once, so unlike `RandomCropFlip`
    the views depend on how the batch is cut into microbatches.

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
        views = self.layer(tf.repeat(images, augmult, axis=0), training=True)
        return tf.reshape(views, [-1, augmult, *views.shape[1:]])

    def get_config(self):
        """Returns the configuration as a JSON-serialisable dict."""
        return {"layer": keras.saving.serialize_keras_object(self.layer)}

    @classmethod
    def from_config(cls, config):
        """Builds the wrapper from `get_config()`."""
        return cls(keras.saving.deserialize_keras_object(config["layer"]))


class Views:
    """Makes the K rows of each example: by augmentation, from data [B, K, ...], or one as it is.

    Args:
        augment: An augmentation, or None.
        augmult: Int. 0: the examples as they are.
        x: Nest of tensors [B, ...]; only shapes are read.

    Attributes:
        augment: The augmentation, None if there is none to do.
        count: Int, rows an example.

    Raises:
        ValueError: If `x` has not the shape that the first two need.
    """

    def __init__(self, augment, augmult, x):
        self.augment = augment if augmult else None
        self.count = augmult or 1
        self._given = bool(augmult) and augment is None
        if self.augment is not None and len(tf.nest.flatten(x)) != 1:
            raise ValueError(
                "`augment` works on models of a single input. Received inputs: "
                f"{tf.nest.map_structure(lambda t: t.shape, x)}. Put the views into the data, of "
                "shape [batch, augmult, ...], and leave `augment` out."
            )
        if self._given:
            wrong = [t.shape for t in tf.nest.flatten(x) if t.shape[1:2] != [self.count]]
            if wrong:
                raise ValueError(
                    f"With `augmult={self.count}` and no `augment`, inputs must have shape "
                    f"[batch, {self.count}, ...]. Received: shape={wrong[0]}. Give the optimizer "
                    "an `augment`, such as tfdpx.augment.RandomCropFlip(), or `augmult=0`."
                )

    def draw(self, batch_size, seed):
        """The random choices for the whole batch, or None."""
        if self.augment is None:
            return None
        return self.augment.draw(batch_size, self.count, seed)

    def rows(self, x, choices):
        """`x` [B, ...] or [B, K, ...] as rows [B * K, ...]."""
        if self.augment is not None:
            x = tf.nest.map_structure(lambda t: self.augment.apply(t, choices), x)
        elif not self._given:
            return x
        return tf.nest.map_structure(
            lambda t: tf.reshape(t, tf.concat([[-1], tf.shape(t)[2:]], axis=0)), x
        )

    def example_rows(self, x):
        """Made-up rows with the shapes and dtypes that the model will see; no data is read."""
        return keras_hook.eagerly(self._example_rows, x)

    def _example_rows(self, x):
        return self.rows(synthetic(x, rows=1, seed=0), self.draw(1, tf.zeros([2], tf.int64)))

    def repeat(self, nest):
        """`nest` [B, ...] repeated for each view, [B * K, ...]."""
        if self.count == 1:
            return nest
        return Rows(nest).map(lambda t: tf.repeat(t, self.count, axis=0))


def get(augment):
    """`augment` as an object with `draw` and `apply`; a `keras.Layer` is wrapped."""
    if augment is None or (hasattr(augment, "draw") and hasattr(augment, "apply")):
        return augment
    return LayerViews(augment)


def _reflect(index, size):
    """Mirrors indices in (-size, 2*size-1) back into [0, size) without repeating the edge."""
    index = tf.abs(index)
    return tf.minimum(index, 2 * (size - 1) - index)
