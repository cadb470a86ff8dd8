"""Generates images without any data. Training on such images costs no privacy."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdpx import _keras as _keras  # First: it raises an error if Keras has another backend.

# isort: split

import keras
import tensorflow as tf

from tfdpx import account
from tfdpx._arguments import check_positive_integer, is_integer, is_number, require
from tfdpx._keras import layer_internals, origins

__all__ = ["DeadLeaves", "Strokes", "warm_start"]

# `DeadLeaves` draws leaves in rounds. On average, this many leaves of one round cover a pixel. Most
# images need one or two rounds.
_COVERINGS_A_ROUND = 6
_MOST_STROKES = 3
# The smallest and largest width of the pen, as parts of the shorter side of the image.
_WIDTHS = (0.06, 0.13)
# The distance between neighbouring points of a stroke, in pixels and in widths of the pen. With
# this distance, the outline looks smooth.
_SPACING, _SPACING_IN_WIDTHS = 0.5, 0.1
_FEWEST_CONTROLS, _MOST_CONTROLS = 4, 7
# Margin around the control points, as a part of the image's height and width.
_MARGIN = 0.1


# The settings of a warm start: the number of generated images (each is a class), the number of
# updates, the number of views in a batch, and the learning rate.
_IMAGES, _UPDATES, _VIEWS, _RATE = 300, 2000, 64, 1e-3


class Generator:
    """The base class of generators, which make images without any data.

    Image `i` depends only on the arguments, the seed and `i`: its random numbers come from NumPy's
    `default_rng([seed, i])`. So a request for more images begins with the same images. The random
    numbers may change with the version of NumPy, so save results instead of computing them again.

    No argument takes data, so statistics, features and pre-trained weights that are computed from
    the images cost no privacy. However, if you tune the arguments on private data, they leak
    information about these data, like any hyperparameter.

    For a new kind of images, write a subclass and define `draw`.

    Args:
        image_size: Int >= 1, or a pair of these: height and width in pixels.
        channels: Int >= 1, the number of channels: 1 for gray images, 3 for colour.
        seed: Int >= 0. It need not be secret.

    Raises:
        ValueError: If an argument is invalid; the error names it.
    """

    def __init__(
        self, image_size: int | Sequence[int] = 32, channels: int = 1, seed: int = 0
    ) -> None:
        size: Any = [image_size] * 2 if is_integer(image_size, 1) else image_size
        is_pair = isinstance(size, (list, tuple)) and len(size) == 2
        is_pair = is_pair and all(is_integer(length, 1) for length in size)
        must = "be an int >= 1 or a pair of them, (height, width)"
        require(is_pair, "image_size", image_size, must, " Use, e.g., 32.")
        check_positive_integer("channels", channels, " Use 1 for gray images, 3 for colour.")
        require(is_integer(seed, 0), "seed", seed, "be an int >= 0", " Use 0.")
        self.image_size = tuple(map(int, size))
        self.channels = int(channels)
        self.seed = int(seed)
        self.image_shape = (*self.image_size, self.channels)

    def images(self, num_images: int, start: int = 0) -> np.ndarray:
        """Returns the images with the numbers `start` to `start + num_images - 1`.

        Args:
            num_images: Int >= 0, the number of images.
            start: Int >= 0, the number of the first image.

        Returns:
            float32 array `[num_images, height, width, channels]` in [0, 1].

        Raises:
            ValueError: If an argument is not an int >= 0.
        """
        for name, value in (("num_images", num_images), ("start", start)):
            require(is_integer(value, 0), name, value, "be an int >= 0")
        images = np.empty([num_images, *self.image_shape], "float32")
        for row in range(num_images):
            images[row] = self.draw(np.random.default_rng([self.seed, start + row]))
        return images

    def draw(self, rng: np.random.Generator) -> Any:
        """Draws one image.

        Args:
            rng: `np.random.Generator`, the only source of randomness.

        Returns:
            Float array `[height, width, channels]` in [0, 1].
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `draw`.")

    def get_config(self) -> dict[str, Any]:
        """Returns a dict of the constructor's arguments and their values."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}


class DeadLeaves(Generator):
    """A generator of images that are filled by overlapping discs ("leaves"), each of one colour.

    The centres of the discs have a uniform distribution. The radii have a density proportional to
    `r^-3` between `r_min` and `r_max`, so a scene looks the same at every scale, as photographs do
    (Lee, Mumford & Huang 2001). Features that were learned only from such images are useful for
    photographs, too (Baradad et al. 2021).

    The images are exact samples of this distribution. Each new leaf is placed behind the earlier
    ones until every pixel is covered, so there is no number of leaves to choose. A leaf may have
    its centre outside of the image, so the border of an image looks like its middle.

    Args:
        image_size: Int >= 1, or a pair of these: height and width in pixels.
        channels: Int >= 1, the number of channels. The brightness of a leaf in each channel is
            uniform in [0, 1].
        seed: Int >= 0.
        r_min: Number >= 0.5, the smallest radius in pixels.
        r_max: Finite number >= `r_min`, the largest radius in pixels. Defaults to half the shorter
            side, or `r_min` if that is larger.

    Raises:
        ValueError: If an argument is invalid; the error names it.

    Example:
    >>> leaves = DeadLeaves(image_size=16, channels=3)
    >>> leaves.images(5).shape
    (5, 16, 16, 3)
    >>> bool((leaves.images(5)[:2] == leaves.images(2)).all())
    True

    References:
        - [Lee, Mumford & Huang, 2001](https://doi.org/10.1023/A:1011109015675), "Occlusion models
          for natural images".
        - [Baradad et al., 2021](https://arxiv.org/abs/2106.05963), "Learning to see by looking at
          noise".
        - Kendall & Thönnes, 1999, "Perfect simulation in stochastic geometry", for placing new
          leaves behind earlier ones.
    """

    def __init__(
        self,
        image_size: int | Sequence[int] = 32,
        channels: int = 1,
        seed: int = 0,
        r_min: float = 1.0,
        r_max: float | None = None,
    ) -> None:
        super().__init__(image_size, channels, seed)
        must = "be a finite number >= 0.5 (pixels), because smaller leaves cover none"
        require(is_number(r_min) and 0.5 <= r_min < math.inf, "r_min", r_min, must, " Use 1.")
        if r_max is None:
            r_max = max(r_min, min(self.image_size) / 2)
        is_valid = is_number(r_max) and r_min <= r_max < math.inf
        require(is_valid, "r_max", r_max, f"be a finite number >= r_min={r_min} (pixels)")
        self.r_min, self.r_max = float(r_min), float(r_max)

    def draw(self, rng: np.random.Generator) -> Any:
        """Draws one image `[height, width, channels]`; see `Generator.draw`."""
        height, width = self.image_size
        image = np.empty([height * width, self.channels])
        is_open = np.ones(height * width, bool)
        window = (height + 2 * self.r_max) * (width + 2 * self.r_max)
        num_leaves = math.ceil(_COVERINGS_A_ROUND * window / self._mean_area())
        while is_open.any():
            rows, columns, radii = self._leaves(rng, num_leaves)
            colours = rng.random([num_leaves, self.channels])
            front = _front_leaf(rows, columns, radii, height, width)
            is_new = is_open & (front < num_leaves)
            image[is_new] = colours[front[is_new]]
            is_open &= ~is_new
        return image.reshape(self.image_shape)

    def _leaves(self, rng, num_leaves):
        """Draws leaves, ordered from front to back. Some lie outside of the image.

        Args:
            rng: `np.random.Generator`.
            num_leaves: Int.

        Returns:
            Three float64 arrays `[num_leaves]`: the rows and columns of the centres, and the radii,
            all in pixels. The centre of the first pixel is (0, 0).
        """
        height, width = self.image_size
        u = rng.random([3, num_leaves])
        # Centres are drawn from the image and a margin of `r_max` around it, so all leaves that
        # could reach the image on an infinite plane can occur.
        rows = u[0] * (height + 2 * self.r_max) - self.r_max - 0.5
        columns = u[1] * (width + 2 * self.r_max) - self.r_max - 0.5
        radii = (self.r_min**-2 - u[2] * (self.r_min**-2 - self.r_max**-2)) ** -0.5
        return rows, columns, radii

    def _mean_area(self):
        if self.r_min == self.r_max:
            return math.pi * self.r_min**2
        mass = (self.r_min**-2 - self.r_max**-2) / 2
        return math.pi * math.log(self.r_max / self.r_min) / mass


def _front_leaf(rows, columns, radii, height, width):
    """Returns, for each pixel, the index of the first leaf that covers it.

    Args:
        rows: Float array [n], the rows of the leaves' centres, in pixels.
        columns: Float array [n], the columns of the centres.
        radii: Float array [n].
        height: Int, the height of the image in pixels.
        width: Int, the width of the image in pixels.

    Returns:
        int64 array [height * width]; n for a pixel that no leaf covers.
    """
    first = np.maximum(np.ceil(rows - radii), 0)
    last = np.minimum(np.floor(rows + radii), height - 1)
    leaf, row = _integers_between(first, last)
    # The maximum is needed because of rounding errors: a row could lie just outside of its leaf.
    half = np.sqrt(np.maximum(radii[leaf] ** 2 - (row - rows[leaf]) ** 2, 0))
    first = np.maximum(np.ceil(columns[leaf] - half), 0)
    last = np.minimum(np.floor(columns[leaf] + half), width - 1)
    span, column = _integers_between(first, last)
    front = np.full(height * width, len(radii))
    np.minimum.at(front, row[span] * width + column, leaf[span])
    return front


def _integers_between(first, last):
    """Returns all integers in n intervals, one interval after the other.

    For example, the intervals [0, 1] and [5, 6] give `[0, 0, 1, 1]` and `[0, 1, 5, 6]`.

    Args:
        first: Float array [n], the first integer of each interval.
        last: Float array [n], the last integer of each interval. If it is less than `first`, the
            interval is empty.

    Returns:
        Two int64 arrays [m]: for each integer, the index of its interval and its value.
    """
    counts = np.maximum(last - first + 1, 0).astype("int64")
    interval = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return interval, first.astype("int64")[interval] + np.arange(len(interval)) - before[interval]


class Strokes(Generator):
    """A generator of images of pen strokes along smooth random curves. They resemble handwriting.

    A stroke is a cubic B-spline. Its control points are a random walk that keeps turning in the
    same direction, so strokes form hooks, arcs and loops. The stroke becomes a little wider and
    narrower along its way, as if the pressure on the pen changed. An image has one to three
    strokes, and the pen's width is 0.06 to 0.13 of the image's shorter side. With one channel the
    ink has value 1 and the paper 0, as in MNIST. With more channels, ink and paper have random
    colours. All strokes of an image have the same colour.

    Args:
        image_size: Int >= 1, or a pair of these: height and width in pixels.
        channels: Int >= 1, the number of channels.
        seed: Int >= 0.

    Raises:
        ValueError: If an argument is invalid; the error names it.

    Example:
    >>> images = Strokes(image_size=28).images(5)
    >>> images.shape, float(images.min()), float(images.max())
    ((5, 28, 28, 1), 0.0, 1.0)

    References:
        - [Lake, Salakhutdinov & Tenenbaum, 2015](https://doi.org/10.1126/science.aab3050), where a
          model of handwriting draws strokes as B-splines, too.
    """

    def draw(self, rng: np.random.Generator) -> Any:
        """Draws one image `[height, width, channels]`; see `Generator.draw`."""
        width = rng.uniform(*_WIDTHS) * min(self.image_size)
        number = rng.integers(1, _MOST_STROKES + 1)
        strokes = [self._stroke(rng, width) for _ in range(number)]
        points, radii = map(np.concatenate, zip(*strokes, strict=True))
        ink = _stamped(points, radii, *self.image_size)[..., None]
        if self.channels == 1:
            return ink
        dark, bright = rng.random([2, self.channels])
        return dark + ink * (bright - dark)

    def _stroke(self, rng, width):
        """Draws one stroke.

        Args:
            rng: `np.random.Generator`.
            width: Float, the average width of the pen in pixels.

        Returns:
            Two float arrays: points [n, 2] along the stroke, as (row, column) in pixels, and the
            radius [n] of the pen at each point.
        """
        controls = _controls(rng) * (np.array(self.image_size) - 1)
        points = _spline(controls, max(_SPACING, _SPACING_IN_WIDTHS * width))
        # Pressure rises and falls once or twice along the stroke.
        phase = rng.uniform(0, 2 * np.pi) + rng.uniform(3, 9) * np.linspace(0, 1, len(points))
        return points, width / 2 * (1 + 0.2 * np.sin(phase))


def _controls(rng):
    """Returns a random walk in the unit square, the control points of a stroke.

    The walk tends to turn in the same direction, and does not enter the margin of the square.

    Returns:
        Float array [n, 2], n from 4 to 7.
    """
    number = rng.integers(_FEWEST_CONTROLS, _MOST_CONTROLS + 1)
    heading, turn = rng.uniform(0, 2 * np.pi), rng.normal(0, 0.9)
    steps = rng.uniform(0.15, 0.5, size=number - 1)
    headings = heading + turn * np.arange(number - 1) + rng.normal(0, 0.6, size=number - 1)
    walk = np.cumsum(steps[:, None] * np.stack([np.sin(headings), np.cos(headings)], -1), axis=0)
    walk = np.concatenate([np.zeros([1, 2]), walk])
    walk -= walk.min(axis=0)
    # Shrinks the walk if it is too large, and moves it to a random place between the margins.
    walk /= max(walk.max() / (1 - 2 * _MARGIN), 1)
    return walk + _MARGIN + rng.random(2) * (1 - 2 * _MARGIN - walk.max(axis=0))


def _spline(controls, spacing):
    """Returns points along a uniform cubic B-spline, a curve with a continuous second derivative.

    Args:
        controls: Float array [k, 2], the control points, k >= 2.
        spacing: Float, the largest distance between neighbouring points of the result.

    Returns:
        float64 array [n, 2], from the first control point to the last.
    """
    # At both ends a control point is added, on the line through the last two points there. Then the
    # curve begins at the first of `controls` and ends at the last.
    outer = [2 * controls[0] - controls[1], *controls, 2 * controls[-1] - controls[-2]]
    legs = np.linalg.norm(np.diff(outer, axis=0), axis=1)
    pieces = []
    for i, (a, b, c, d) in enumerate(zip(outer, outer[1:], outer[2:], outer[3:], strict=False)):
        # The speed of the curve is a mean of the lengths of three legs, so it is at most the
        # longest.
        number = max(int(np.ceil(legs[i : i + 3].max() / spacing)), 1)
        t = np.arange(number)[:, None] / number
        left, right = b * (4 - 6 * t**2 + 3 * t**3), c * (1 + 3 * t + 3 * t**2 - 3 * t**3)
        pieces.append((a * (1 - t) ** 3 + left + right + d * t**3) / 6)
    return np.concatenate([*pieces, controls[-1:]])


def _stamped(points, radii, height, width):
    """Returns an image of discs with smooth edges.

    Args:
        points: Float array [n, 2]: the row and column of each disc's centre, in pixels.
        radii: Float array [n], the radius of each disc in pixels.
        height: Int, the height of the image in pixels.
        width: Int, the width of the image in pixels.

    Returns:
        float64 array [height, width] in [0, 1]. A pixel is 1 if its centre is at least half a pixel
        inside of a disc, and 0 if it is at least half a pixel outside of all discs. In between, its
        value is linear in the distance.
    """
    reach = int(np.ceil(radii.max() + 1))
    offset = np.arange(-reach, reach + 1)
    nearest = np.rint(points).astype("int64")
    rows, columns = (nearest[:, axis, None] + offset for axis in range(2))
    across, along = (rows - points[:, :1]) ** 2, (columns - points[:, 1:]) ** 2
    distance = np.sqrt(across[:, :, None] + along[:, None, :])
    covered = np.clip(radii[:, None, None] + 0.5 - distance, 0, 1)
    # Pixels outside of the image are moved to a border of one pixel, which is cut off at the end.
    rows = np.clip(rows, -1, height) + 1
    columns = np.clip(columns, -1, width) + 1
    canvas = np.zeros((height + 2) * (width + 2))
    flat = rows[:, :, None] * (width + 2) + columns[:, None, :]
    np.maximum.at(canvas, flat.ravel(), covered.ravel())
    return canvas.reshape(height + 2, width + 2)[1:-1, 1:-1]


def warm_start(model: keras.Model, images: Generator | str = "auto") -> keras.Model:
    """Pre-trains an image classifier, except for its last layer, on generated images.

    Each generated image is a class. The model learns to recognise it in views that are rotated,
    shifted and zoomed at random (Tang et al. 2023). No data are read, so the pre-training costs no
    privacy. Afterwards train the model on private data. With a small privacy budget, train only the
    last layer: `tfdpx.layers.trainable(model, "last")`.

    Args:
        model: A built Functional or Sequential `keras.Model`. Its input is images `[batch, height,
            width, channels]` with a fixed height, width and number of channels, and its output is
            logits or probabilities. The weights must be new, or come from an earlier warm start.
            The function changes the weights.
        images: `Strokes` or `DeadLeaves` with the shape of the model's input, for example
            `Strokes(28)`; or "auto" for `Strokes` with one channel and `DeadLeaves` with more. The
            values of these images are scaled to [0, 255] if the model takes integers or begins with
            a `Rescaling` by 1/100 or less, and to [0, 1] otherwise.

    Returns:
        The changed `model`.

    Raises:
        ValueError: If the model takes other inputs, has been trained on data, has weights of
            unknown origin, has frozen layers, has statistics of `adapt`, or does not end in a layer
            with weights.

    References:
        - [Tang et al., 2023](https://arxiv.org/abs/2306.06076), DP-RandP.
    """
    inputs, outputs = (getattr(model, name, None) or [] for name in ("inputs", "outputs"))
    shape = tuple(inputs[0].shape[1:]) if len(inputs) == len(outputs) == 1 else ()
    is_valid = isinstance(model, keras.Model) and len(shape) == 3 and all(shape)
    must = "be a Functional or Sequential keras.Model of one input (batch, height, width, channels)"
    require(is_valid, "model", model, f"{must}, with one output")
    source: Any = images
    if isinstance(images, str) and images == "auto":
        source = (Strokes if shape[2] == 1 else DeadLeaves)(shape[:2], shape[2])
    is_valid = type(source) in (Strokes, DeadLeaves) and tuple(source.image_shape) == shape
    must = f'be Strokes or DeadLeaves with images of shape {shape}, or "auto"'
    require(is_valid, "images", images, must)
    # A new generator is made, because a user may have changed attributes of the old one.
    source = type(source)(**type(source).get_config(source))
    _check_untouched(model)
    features = _before_last_layer(model)
    logits = keras.layers.Dense(_IMAGES)(keras.layers.Flatten()(features.output))
    trained = keras.Model(features.inputs, logits)
    rate = keras.optimizers.schedules.CosineDecay(_RATE, _UPDATES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    print(f"Warm start: {_IMAGES} generated images, each a class.")
    scale = 255.0 if _takes_bytes(model) else 1.0
    views = _random_views(source, scale, inputs[0].dtype)
    trained.fit(views, steps_per_epoch=_UPDATES, shuffle=False)
    # The origin of the weights was known before, and the training has not read any data.
    origins.mark_known(trained.variables)
    return model


def _random_views(source, scale, dtype):
    """Returns an endless dataset of random views of generated images.

    Args:
        source: `Generator` of the images.
        scale: Float, the factor that multiplies the images, which have values in [0, 1].
        dtype: String, the dtype of the model's input.

    Returns:
        `tf.data.Dataset` of batches (views, labels). The label is the number of the image.
    """
    layers = keras.layers
    views = [layers.RandomRotation(0.08), layers.RandomTranslation(0.1, 0.1)]
    views += [layers.RandomZoom(0.15)]

    def batch(image, label):
        for layer in views:
            image = layer(image, training=True)
        return tf.cast(image * scale, dtype), label

    generated = tf.data.Dataset.from_tensor_slices((source.images(_IMAGES), np.arange(_IMAGES)))
    generated = generated.cache().shuffle(_IMAGES).repeat().batch(_VIEWS, drop_remainder=True)
    return generated.map(batch).prefetch(4)


def _check_untouched(model):
    """Raises ValueError unless the weights are new. Other weights could contain private data."""
    ledger = account.ledger_of(model.weights)
    layers = layer_internals.flatten_layers(model)
    adapted = [x.name for x in layers if layer_internals.adapted_statistics(x) is not None]
    is_frozen = any(layer_internals.own_weights(x) and not x.trainable for x in layers)
    problem = (
        (ledger.entries and "was trained privately before")
        or (not ledger.is_complete and "has weights of unknown origin")
        or (adapted and f"has the adapted layer {adapted[0]!r}")
        or (is_frozen and "has frozen layers")
        or (any(hasattr(v.value, "values") for v in model.weights) and "has replicas")
    )
    if problem:
        raise ValueError(
            f"Argument `model` {problem}, and a warm start is for new models on one device. Build "
            "the model again, start it before it sees data, and freeze layers afterwards."
        )


def _before_last_layer(model):
    """Returns a `keras.Model` of all layers of `model` before the last layer with weights."""
    tensor = model.outputs[0]
    while True:
        layer, inputs = layer_internals.made_by(tensor)
        if len(inputs) != 1:
            raise ValueError(
                f"Argument `model` must end in a layer with weights, and {model.name!r} ends in "
                f"{layer.name!r} with {len(inputs)} inputs. Add a Dense layer."
            )
        if getattr(layer, "outputs", None) and layer.weights:
            tensor = _before_last_layer(layer)(inputs[0])
            break
        tensor = inputs[0]
        if getattr(layer, "weights", None):
            break
    return keras.Model(model.inputs, tensor)


def _takes_bytes(model):
    """Returns whether a model expects pixels with values from 0 to 255."""
    layers = [x for x in model.layers if not isinstance(x, keras.layers.InputLayer)]
    first = layers[0] if layers else None
    is_scaled = isinstance(first, keras.layers.Rescaling) and np.max(np.abs(first.scale)) <= 0.01
    return is_scaled or not model.inputs[0].dtype.startswith(("float", "bfloat"))
