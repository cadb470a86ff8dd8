"""Layers that never mix examples: group normalization, SkipInit, unit norm and whitening."""

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
from tfdpx.per_example import Rule, register
from tfdpx.per_example.rows import sum_rows
from tfdpx.per_example.rowwise import over_rows, register_rowwise


@keras.saving.register_keras_serializable(package="tfdpx")
class GroupNorm(keras.layers.GroupNormalization):
    """Group normalization with 16 groups by default.

    The layer normalizes each example over all positions and over the channels of a group. So the
    output of an example does not depend on other examples, and the layer can replace batch
    normalization under differential privacy. There are two differences from
    `keras.layers.GroupNormalization`: the default of `groups` is 16 instead of 32, and the error
    for a wrong number of groups lists the possible numbers.

    Args:
        groups: Integer, the number of groups, which must divide the number of channels. -1 means
            one channel per group (instance normalization).
        **kwargs: Arguments of `keras.layers.GroupNormalization`: `axis`, `epsilon`, `center`,
            `scale`, initializers, regularizers, constraints, `name`, `dtype`.

    Input and output shape: `[batch, ..., channels]`. With `axis`, the channels are at this axis.

    Raises:
        ValueError: When built, if `groups` does not divide the number of channels.

    Example:
    >>> images = np.random.default_rng(0).normal(size=(2, 8, 8, 32))
    >>> normalized = GroupNorm()(images)
    >>> alone = GroupNorm()(images[:1])
    >>> bool(np.allclose(normalized[:1], alone, atol=1e-5))
    True

    References:
        - [Wu & He, 2018](https://arxiv.org/abs/1803.08494).
        - [De et al., 2022](https://arxiv.org/abs/2204.13650), section 3.1 and appendix C.1, who
          use 16 groups.
    """

    def __init__(self, groups: int = 16, **kwargs: Any) -> None:
        super().__init__(groups=groups, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Checks that `groups` divides the number of channels, and creates `gamma` and `beta`."""
        channels = input_shape[self.axis]
        if channels is not None and self.groups != -1:
            divisors = [groups for groups in range(1, channels + 1) if channels % groups == 0]
            must = f"divide the {channels} channels of the input of layer {self.name!r}"
            hint = f" Use one of groups={divisors}."
            require(self.groups in divisors, "groups", self.groups, must, hint)
        super().build(input_shape)


@keras.saving.register_keras_serializable(package="tfdpx")
class SkipInit(keras.layers.Layer):
    """Multiplies a residual branch by one trainable scalar: `scale * gain * inputs`.

    De & Smith (2020) initialize the scalar to zero. Before training, each residual block is then
    the identity, and the network trains without normalization. The layer keeps examples separate.

    Args:
        scale: Float, a constant factor in addition to the trainable factor, for example the
            `alpha` of Brock et al. (2021a).
        initializer: Initializer of the weight `gain`, a scalar. De et al. (2022, C.1) initialize it
            to one when they train NF-ResNets privately from scratch.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Input shape: any. The output has the same shape.

    References:
        - [De & Smith, 2020](https://arxiv.org/abs/2002.10444).
    """

    def __init__(self, scale: float = 1.0, initializer: Any = "zeros", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scale = scale
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape: Any) -> None:
        """Creates the scalar weight `gain`."""
        del input_shape
        self.gain = self.add_weight(name="gain", shape=(), initializer=self.initializer)

    def call(self, inputs: Any) -> Any:
        """Returns `inputs` multiplied by `scale` and `gain`."""
        return inputs * (self.scale * self.gain)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the output shape, which is the input shape."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        initializer = keras.initializers.serialize(self.initializer)
        return {**super().get_config(), "scale": self.scale, "initializer": initializer}


@register(SkipInit)
class SkipInitRule(Rule):
    """The rule for per-example gradients of `SkipInit`.

    For each example, the gradient of `gain` is the inner product of the inputs and the output
    gradients, times `scale`.
    """

    def per_example_gradients(self):
        """Returns the gradient of `gain` for each example, a list of one float32 tensor [B]."""
        products = tf.cast(self.call.args[0], "float32") * self.output_gradients[0]
        summed = sum_rows(products, self.num_views, range(1, products.shape.rank))
        return [self.layer.scale * summed]


@keras.saving.register_keras_serializable(package="tfdpx")
class UnitNormWithConstant(keras.layers.Layer):
    """Scales each example to norm one, appends a constant, and scales to norm one again.

    Put this layer before a `keras.layers.Dense(classes, use_bias=False)` with a softmax. The
    constant takes the place of a bias. Features `x` of norm one have two advantages in private
    training:

    - The gradient of the cross-entropy with respect to the kernel is `x (p - y)^T`, where `p` are
      the predicted probabilities and `y` the one-hot class. Its norm is at most `sqrt(2)`, so
      `l2_norm_clip=math.sqrt(2)` does not change any gradient.
    - If the noise on each weight has the standard deviation `s`, the noise on each logit also has
      the standard deviation `s`, for any number of features.

    If all features of an example are zero, its output is zeros and a one. The layer keeps examples
    separate and has no weights.

    Args:
        constant: Positive number to append to the features after they are scaled to norm one.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Input shape: `[batch, ...]`, where all sizes except the batch size are fixed.
    Output shape: `[batch, features + 1]`, because the layer flattens its input. The layer computes
    in float32 (in float64 if its `dtype` is float64), and casts the result to its compute dtype.
    The norm of each example is one, up to rounding in this dtype.

    Raises:
        ValueError: If `constant` is not a positive number, or if a size of the input is not fixed
            (except for the batch size).

    Example:
    >>> rows = UnitNormWithConstant()(np.array([[3.0, 4.0], [0.0, 0.0]]))
    >>> np.round(rows, 3)
    array([[0.597, 0.796, 0.1  ],
           [0.   , 0.   , 1.   ]], dtype=float32)
    """

    def __init__(self, constant: float = 0.1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        is_valid = is_number(constant) and 0 < constant < math.inf
        require(is_valid, "constant", constant, "be a positive, finite number", " Use 0.1.")
        self.constant = float(constant)

    def call(self, inputs: Any) -> Any:
        """Returns the features and the constant, scaled to norm one, `[batch, features + 1]`."""
        num_features = self.compute_output_shape(inputs.shape)[-1] - 1
        rows = ops.reshape(inputs, (-1, num_features))
        rows = ops.cast(rows, keras.backend.result_type(self.compute_dtype, "float32"))
        constants = ops.full_like(rows[:, :1], self.constant)
        rows = _unit(ops.concatenate([_unit(rows), constants], axis=-1))
        return ops.cast(rows, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the output shape, `(batch, features + 1)`."""
        _check_sizes(self, input_shape)
        return (input_shape[0], math.prod(input_shape[1:]) + 1)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        return {**super().get_config(), "constant": self.constant}


def _check_sizes(layer, input_shape):
    """Raises ValueError unless all sizes of the input except the batch size are fixed."""
    if None in input_shape[1:] or not input_shape[1:]:
        raise ValueError(
            f"Layer {layer.name!r} needs inputs [batch, ...] of known sizes. Received: input shape "
            f"{tuple(input_shape)}. Give keras.Input all sizes but the batch."
        )


def _unit(rows):
    """Divides each of `rows` [batch, features] by its norm. Rows of zeros do not change."""
    # Rows are first divided by their largest entry. Otherwise squares could overflow or underflow.
    # The result does not depend on this factor, so no gradient needs to pass through it.
    largest = ops.max(ops.abs(rows), axis=-1, keepdims=True)
    rows = rows / ops.stop_gradient(ops.maximum(largest, 1e-30))
    # The sum is at least one, except for a row of zeros. The maximum avoids the infinite gradient
    # of the square root at zero.
    squares = ops.sum(ops.square(rows), axis=-1, keepdims=True)
    return rows / ops.sqrt(ops.maximum(squares, 1.0))


_SYNTHETIC_IMAGES = 1500


register_rowwise(GroupNorm, problem_of=over_rows)
register_rowwise(SkipInit, UnitNormWithConstant)


@keras.saving.register_keras_serializable(package="tfdpx")
class ChannelWhitening(keras.layers.Layer):
    """Subtracts the mean of each feature and whitens the channels, with fixed statistics.

    `outputs = (inputs - mean) @ V (D + regularization * mean(D))^exponent V^T`

    `mean` has an entry for each feature (each channel at each position). `V D V^T` is the
    covariance matrix of the channels, over all images and positions. With the exponent -0.5, the
    layer does ZCA whitening. Whitening helps linear classifiers on fixed features. A small privacy
    budget allows only a few steps of gradient descent. A step makes more progress if the features
    have about the same variance in all directions.

    Call `adapt` before training to compute the statistics. The model stores them without noise, so
    statistics of private data would break the guarantee. `adapt` therefore accepts generated images
    (`tfdpx.synthetic`), and other images only if you declare them public. The layer keeps examples
    separate and has no trainable weights.

    Args:
        regularization: Positive number. The layer adds this multiple of the mean eigenvalue to all
            eigenvalues `D`, which limits how much it amplifies directions with little variance.
        exponent: Number from -1 to 0. -0.5 whitens, and 0 only subtracts the mean.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Input shape: `[batch, ..., channels]`, where all sizes except the batch size are fixed. The
    output has the same shape. Statistics and computations are in float32, even under mixed
    precision. If the layer's `dtype` is float64, they are in float64.

    Raises:
        ValueError: If an argument is invalid, if a size of the input is not fixed (except for the
            batch size), or if the layer is called on data before `adapt`.

    Example:
    >>> from tfdpx.synthetic import DeadLeaves
    >>> layer = ChannelWhitening(regularization=1e-6)
    >>> layer.adapt(DeadLeaves(8, channels=3), num_images=500)
    >>> whitened = layer(DeadLeaves(8, channels=3).images(500))
    >>> covariance = np.cov(np.reshape(whitened, (-1, 3)), rowvar=False)
    >>> bool(np.allclose(covariance, np.eye(3), atol=0.05))
    True

    References:
        - [Coates, Ng & Lee, 2011](https://proceedings.mlr.press/v15/coates11a.html), who measure
          the effect of whitening on a linear classifier with fixed features.
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), who normalize scattering
          features with noisy statistics of the private data. This costs a part of the budget.
    """

    def __init__(self, regularization: float = 0.03, exponent: float = -0.5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        is_valid = is_number(regularization) and 0 < regularization < math.inf
        must = "be a positive, finite number"
        require(is_valid, "regularization", regularization, must, " Use 0.03.")
        is_valid = is_number(exponent) and -1 <= exponent <= 0
        require(is_valid, "exponent", exponent, "be a number from -1 to 0", " Use -0.5.")
        self.regularization = float(regularization)
        self.exponent = float(exponent)

    def build(self, input_shape: Any) -> None:
        """Creates the weights `mean` `[..., channels]` and `matrix` `[channels, channels]`."""
        shape = tuple(input_shape[1:])
        _check_sizes(self, input_shape)
        dtype = keras.backend.result_type(self.variable_dtype, "float32")
        arguments = dict(initializer="zeros", dtype=dtype, trainable=False, autocast=False)
        self.mean = self.add_weight(name="mean", shape=shape, **arguments)
        # A matrix of zeros means that the layer was not adapted. `adapt` never computes one.
        self.matrix = self.add_weight(name="matrix", shape=(shape[-1],) * 2, **arguments)

    def adapt(
        self,
        source: Any,
        num_images: int | None = None,
        features: Callable[[Any], Any] | None = None,
        *,
        public: bool = False,
        batch_size: int = 64,
    ) -> None:
        """Computes the statistics in float64, and replaces the statistics of an earlier call.

        Args:
            source: A generator of `tfdpx.synthetic`. With `public=True`, it may also be a generator
                of a class that you wrote, an array of images `[n, ...]`, or a `tf.data.Dataset`
                that yields batches of images `[n, ...]`.
            num_images: Positive int, the largest number of images to use. Defaults to 1,500 for
                a generator, and to all images otherwise.
            features: Optional layer, model or function that computes this layer's inputs,
                `[n, ..., channels]`, from a batch of images. By default, the images themselves are
                the inputs. If `features` is a model that was trained on private data, this
                training must have been private.
            public: Bool. True declares that `source` contains no private data.
            batch_size: Positive int, the number of images in a batch for `features`.

        Raises:
            ValueError: If `source` may be private, if an argument is invalid, or if the features
                are not finite, do not vary, or do not have the shape that the layer was built for.
        """
        if num_images is not None:
            check_positive_integer("num_images", num_images)
        check_positive_integer("batch_size", batch_size)
        must = "be a layer, model or function of a batch of images"
        require(features is None or callable(features), "features", features, must)
        if isinstance(features, keras.Layer):
            # A traced function takes much less time than eager calls.
            features = tf.function(features, autograph=False, reduce_retracing=True)
        mean, covariance = _moments(
            images if features is None else features(images)
            for images in _batches(_checked_source(source, public), num_images, batch_size)
        )
        if not self.built:
            self.build((None, *mean.shape))
        if tuple(self.mean.shape) != mean.shape:
            raise ValueError(
                f"Layer {self.name!r} was built for features of shape {tuple(self.mean.shape)}. "
                f"Received: features of shape {mean.shape} in `adapt`. Give the generator the "
                "image size of your data, and pass the layers before this one as `features`."
            )
        self.mean.assign(mean)
        self.matrix.assign(self._whitening(covariance))

    def call(self, inputs: Any) -> Any:
        """Returns the whitened `inputs`, with the same shape."""
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
        """Returns the output shape, which is the input shape."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        arguments = {"regularization": self.regularization, "exponent": self.exponent}
        return {**super().get_config(), **arguments}

    def _whitening(self, covariance):
        """Returns the whitening matrix, float64 [channels, channels]."""
        if not np.isfinite(covariance).all() or np.trace(covariance) <= 0:
            raise ValueError(
                f"Layer {self.name!r} cannot adapt to features that do not vary or are not finite. "
                "Use more images, or check the output of `features` for the images of `source`."
            )
        values, vectors = np.linalg.eigh(covariance)
        values = np.maximum(values, 0)  # Because of rounding, some are slightly negative.
        scales = (values + self.regularization * values.mean()) ** self.exponent
        return (vectors * scales) @ vectors.T


def _checked_source(source, public):
    """Returns the source of images. Raises ValueError if it may contain private data."""
    if public:
        return source
    if type(source) not in (synthetic.DeadLeaves, synthetic.Strokes):
        # The error shows only the type, because errors may be logged.
        raise ValueError(
            "Argument `source` must be a generator of tfdpx.synthetic (DeadLeaves, Strokes), "
            "because the statistics stay in the model without noise. Received: source of type "
            f"{type(source).__name__}. Use, e.g., tfdpx.synthetic.DeadLeaves(32, channels=3). If "
            "the data are public, declare it by adapt(..., public=True)."
        )
    # A new generator is made, because a user may have changed attributes of the old one.
    return type(source)(**type(source).get_config(source))


def _batches(source, num_images, batch_size):
    """Yields the first `num_images` images in tensors of at most `batch_size` images."""
    if isinstance(source, tf.data.Dataset):
        spec, must = source.element_spec, "be a data set of batches of images alone"
        hint = " Use source.map(lambda image, label: image)."
        require(isinstance(spec, tf.TensorSpec), "source", spec, must, hint)
        yield from source.unbatch().take(num_images or -1).batch(batch_size)
        return
    is_generator = isinstance(source, synthetic.Generator)
    is_valid = is_generator or hasattr(source, "__len__")
    require(is_valid, "source", source, "be a generator, an array or a tf.data.Dataset of images")
    number = num_images or (_SYNTHETIC_IMAGES if is_generator else len(source))
    if not is_generator:
        number = min(number, len(source))
    for start in range(0, number, batch_size):
        end = min(start + batch_size, number)
        images = source.images(end - start, start) if is_generator else source[start:end]
        yield tf.convert_to_tensor(images)


def _moments(batches):
    """Returns the mean of each feature, and the covariance matrix of the channels.

    Args:
        batches: Iterable of tensors [n, ..., channels].

    Returns:
        Two float64 arrays: the mean [..., channels] and the covariance [channels, channels].
    """
    count, origin = 0, None
    for batch in batches:
        values = np.asarray(batch).astype("float64")
        if origin is None:
            # The mean of the first batch is subtracted. Otherwise sums of large values would lose
            # digits.
            origin = values.mean(axis=0)
            total, products = np.zeros_like(origin), 0.0
        rows = (values - origin).reshape(-1, origin.shape[-1])
        count += len(values)
        total += (values - origin).sum(axis=0)
        products += rows.T @ rows
    if origin is None:
        raise ValueError("Argument `source` must hold at least one image. Received: none.")
    shift = total / count
    flat = shift.reshape(-1, shift.shape[-1])
    return origin + shift, (products / count - flat.T @ flat) / len(flat)
