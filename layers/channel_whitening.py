"""Whitening of channels by statistics of images that know no private data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tfdpx import synthetic
from tfdpx._arguments import check_positive_integer, is_number, require

_SYNTHETIC_IMAGES = 1500


@keras.saving.register_keras_serializable(package="tfdpx")
class ChannelWhitening(keras.layers.Layer):
    """Subtracts the mean of each feature and whitens the channels, by fixed statistics.

    `outputs = (inputs - mean) @ V (D + regularization * mean(D))^exponent V^T`

    where `mean` has an entry for each feature (position and channel), and `V D V^T` is the
    covariance of the channels, pooled over images and positions. With the exponent -0.5 this is ZCA
    whitening. It helps linear classifiers on fixed features: a few steps of gradient descent, all
    that a small budget allows, get further where no direction is much longer than the others.

    The statistics come from `adapt`, before training. They stay in the model as they are, without
    noise, so those of private data would void the guarantee; `adapt` takes images of
    `tfdpx.synthetic`, which know no data, and nothing else unless declared public. The
    layer treats every example alone, and none of its weights is trainable.

    Args:
        regularization: Positive number, added to the eigenvalues `D` as a part of their mean: it
            keeps directions of hardly any variance from being blown up.
        exponent: Number from -1 to 0. -0.5 whitens, 0 only subtracts the mean.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Input and output shape: `[batch, ..., channels]`, all known but the batch. The statistics are
    float32 and the layer computes in that, also under mixed precision; float64 where its `dtype`
    is.

    Raises:
        ValueError: If an argument does not fit, if a size of the input but the batch is unknown, or
            if the layer is called on data before `adapt` or loading.

    Example:
    >>> from tfdpx.synthetic import DeadLeaves
    >>> layer = ChannelWhitening(regularization=1e-6)
    >>> layer.adapt(DeadLeaves(8, channels=3), num_images=500)
    >>> whitened = layer(DeadLeaves(8, channels=3).images(500))
    >>> covariance = np.cov(np.reshape(whitened, (-1, 3)), rowvar=False)
    >>> bool(np.allclose(covariance, np.eye(3), atol=0.05))
    True

    References:
        - [Coates, Ng & Lee, 2011](https://proceedings.mlr.press/v15/coates11a.html), for what
          whitening does for fixed features and a linear classifier.
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), who normalize features of
          scattering for private training, at the cost of some of the budget.
    """

    def __init__(self, regularization: float = 0.03, exponent: float = -0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        fits = is_number(regularization) and 0 < regularization < math.inf
        must = "be a positive, finite number"
        require(fits, "regularization", regularization, must, " Use 0.03.")
        fits = is_number(exponent) and -1 <= exponent <= 0
        require(fits, "exponent", exponent, "be a number from -1 to 0", " Use -0.5.")
        self.regularization = float(regularization)
        self.exponent = float(exponent)

    def build(self, input_shape: Any) -> None:
        """Creates the weights `mean` `[..., channels]` and `matrix` `[channels, channels]`."""
        shape = tuple(input_shape[1:])
        if not shape or None in shape:
            raise ValueError(
                f"Layer {self.name!r} needs inputs [batch, ..., channels] of known sizes, since "
                f"each feature has a mean of its own. Received: input shape {tuple(input_shape)}. "
                "Give keras.Input all sizes but the batch."
            )
        dtype = keras.backend.result_type(self.variable_dtype, "float32")
        kept = dict(initializer="zeros", dtype=dtype, trainable=False, autocast=False)
        self.mean = self.add_weight(name="mean", shape=shape, **kept)
        # A matrix of zeros stands for "not adapted": no covariance gives it.
        self.matrix = self.add_weight(name="matrix", shape=(shape[-1],) * 2, **kept)

    def adapt(
        self,
        source: Any,
        num_images: int | None = None,
        features: Callable[[Any], Any] | None = None,
        *,
        public: bool = False,
        batch_size: int = 64,
    ) -> None:
        """Computes the statistics, in float64, and replaces those that were there.

        Args:
            source: A `tfdpx.synthetic` generator. With `public=True` also one of your own class, an
                array `[n, ...]`, or a `tf.data.Dataset` of batches `[n, ...]`, of images.
            num_images: Positive int, at most so many. By default 1,500 of a generator, all of
                public data.
            features: Optional layer, model or function from a batch of images to the features
                `[n, ..., channels]` that enter this layer; the images themselves if left out.
                Nothing in it may have seen private data but by private training.
            public: Whether you vouch that `source` may be published.
            batch_size: Positive int, images that `features` gets at once.

        Raises:
            ValueError: If `source` may be private, if an argument does not fit, if the features
                have another shape than the layer was built for, are not finite or do not vary.
        """
        if num_images is not None:
            check_positive_integer("num_images", num_images)
        check_positive_integer("batch_size", batch_size)
        must = "be a layer, model or function of a batch of images"
        require(features is None or callable(features), "features", features, must)
        if isinstance(features, keras.Layer):
            # Run as a graph, which saves most of the time.
            features = tf.function(features, autograph=False, reduce_retracing=True)
        mean, covariance = _moments(
            images if features is None else features(images)
            for images in _batches(_vouched_for(source, public), num_images, batch_size)
        )
        if not self.built:
            self.build((None, *mean.shape))
        if tuple(self.mean.shape) != mean.shape:
            raise ValueError(
                f"Layer {self.name!r} was built for features of shape {tuple(self.mean.shape)}. "
                f"Received: features of shape {mean.shape} in `adapt`. Give the generator the "
                "image size of your data, and as `features` what comes before this layer."
            )
        self.mean.assign(mean)
        self.matrix.assign(self._whitening(covariance))

    def call(self, inputs: Any) -> Any:
        """Whitens `inputs`, each position by itself."""
        with tf.init_scope():
            matrix = tf.convert_to_tensor(self.matrix)
        if not tf.is_symbolic_tensor(matrix) and not np.any(matrix):
            raise ValueError(
                f"Layer {self.name!r} has no statistics yet. Call adapt(...) before, e.g. with "
                "tfdpx.synthetic.DeadLeaves(...), or load weights that have them."
            )
        centered = ops.cast(inputs, self.mean.dtype) - self.mean
        return ops.cast(ops.matmul(centered, self.matrix), self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the input."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        own = {"regularization": self.regularization, "exponent": self.exponent}
        return {**super().get_config(), **own}

    def _whitening(self, covariance):
        """float64 [channels, channels]."""
        if not np.isfinite(covariance).all():
            raise ValueError(
                f"Layer {self.name!r} cannot adapt to features that are not finite. Look at what "
                "`features` gives for the images of `source`."
            )
        values, vectors = np.linalg.eigh(covariance)
        values = np.maximum(values, 0)  # Rounding leaves some slightly negative.
        if not values.mean() > 0:
            raise ValueError(
                f"Layer {self.name!r} cannot adapt to features that do not vary. Use more images, "
                "or look at what `features` gives for the images of `source`."
            )
        scales = (values + self.regularization * values.mean()) ** self.exponent
        return (vectors * scales) @ vectors.T


def _vouched_for(source, public):
    """`source`, unless it may hold private data."""
    if public:
        return source
    if type(source) not in [getattr(synthetic, name) for name in synthetic.__all__]:
        kinds = ", ".join(synthetic.__all__)
        # Its type alone is shown: an error may be logged where private data must not be.
        raise ValueError(
            f"Argument `source` must be a generator of tfdpx.synthetic ({kinds}). Received: source "
            f"of type {type(source).__name__}. The statistics stay in the model without noise, and "
            "those of private data would void the guarantee of whatever is trained on them. Use, "
            "e.g., adapt(tfdpx.synthetic.DeadLeaves(32, channels=3)); if the data are public, say "
            "so by adapt(..., public=True)."
        )
    # Made anew: what somebody may have set on the object does not count.
    return type(source)(**type(source).get_config(source))


def _batches(source, num_images, batch_size):
    """Tensors [at most `batch_size`, ...] of the first `num_images` images."""
    if isinstance(source, tf.data.Dataset):
        if not isinstance(source.element_spec, tf.TensorSpec):
            raise ValueError(
                "Argument `source` must be a data set of batches of images alone. Received: "
                f"elements {source.element_spec}. Use source.map(lambda image, label: image)."
            )
        yield from source.unbatch().take(num_images or -1).batch(batch_size)
        return
    is_generator = isinstance(source, synthetic.Generator)
    fits = is_generator or hasattr(source, "__len__")
    require(fits, "source", source, "be a generator, an array or a tf.data.Dataset of images")
    number = num_images or (_SYNTHETIC_IMAGES if is_generator else len(source))
    if not is_generator:
        number = min(number, len(source))
    for start in range(0, number, batch_size):
        end = min(start + batch_size, number)
        images = source.images(end - start, start) if is_generator else source[start:end]
        yield tf.convert_to_tensor(images)


def _moments(batches):
    """Means [..., channels] of features, and covariance [channels, channels] of their channels."""
    count, origin = 0, None
    for batch in batches:
        values = np.asarray(batch).astype("float64")
        if origin is None:
            # Sums of what lies around zero lose no digits where the mean is large.
            origin = values.mean(axis=0)
            total, products = np.zeros_like(origin), 0.0
        rows = (values - origin).reshape(-1, origin.shape[-1])
        count += len(values)
        total += (values - origin).sum(axis=0)
        products += rows.T @ rows
    if origin is None:
        raise ValueError("Argument `source` must hold an image at least. Received: none.")
    shift = total / count
    flat = shift.reshape(-1, shift.shape[-1])
    return origin + shift, (products / count - flat.T @ flat) / len(flat)
