"""What all image generators share: sizes, seeds, configuration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpx._arguments import check_positive_integer, is_integer, is_number, require


class Generator:
    """Makes images from nothing but its arguments and a seed.

    Image `i` depends on the arguments, the seed and `i` alone, through NumPy's
    `default_rng([seed, i])`. So whoever asks for more images gets the same first ones. NumPy may
    change its random numbers with its version, so keep what was computed from the images.

    No argument takes data, so what is computed from the images (statistics, features, pre-trained
    weights) costs no privacy. Arguments tuned on private data would be a leak like any other
    hyperparameter that is.

    A kind of images is a subclass with `draw`, and with `get_config` if it has more arguments.

    Args:
        image_size: Positive int, or a pair of them: height and width in pixels.
        channels: Positive int: 1 for gray, 3 for colour.
        seed: Int >= 0. It protects nothing, so it need not be secret.

    Raises:
        ValueError: If an argument does not fit; the error names it.
    """

    def __init__(
        self, image_size: int | Sequence[int] = 32, channels: int = 1, seed: int = 0
    ) -> None:
        size: Any = [image_size] * 2 if is_integer(image_size, 1) else image_size
        fits = isinstance(size, (list, tuple)) and len(size) == 2
        fits = fits and all(is_integer(length, 1) for length in size)
        must = "be an int >= 1 or a pair of them, (height, width)"
        require(fits, "image_size", image_size, must, " Use, e.g., 32.")
        check_positive_integer("channels", channels, " Use 1 for gray images, 3 for colour.")
        require(is_integer(seed, 0), "seed", seed, "be an int >= 0", " Use 0.")
        self.image_size = tuple(map(int, size))
        self.channels = int(channels)
        self.seed = int(seed)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """`(height, width, channels)` of an image."""
        return (*self.image_size, self.channels)

    def images(self, num_images: int, start: int = 0) -> np.ndarray:
        """Images `start` to `start + num_images - 1`.

        Args:
            num_images: Int >= 0.
            start: Int >= 0, the first one.

        Returns:
            float32 array `[num_images, height, width, channels]` in [0, 1].

        Raises:
            ValueError: If an argument is not an int >= 0.
        """
        for name, value in (("num_images", num_images), ("start", start)):
            require(is_integer(value, 0), name, value, "be an int >= 0")
        made = np.empty([num_images, *self.image_shape], "float32")
        for row in range(num_images):
            made[row] = self.draw(np.random.default_rng([self.seed, start + row]))
        return made

    def dataset(self, batch_size: int) -> tf.data.Dataset:
        """An endless data set of images, in order.

        Args:
            batch_size: Positive int.

        Returns:
            `tf.data.Dataset` of float32 tensors `[batch_size, height, width, channels]`.

        Raises:
            ValueError: If `batch_size` is not a positive int.
        """
        check_positive_integer("batch_size", batch_size)

        def batches():
            for start in itertools.count(0, batch_size):
                yield self.images(batch_size, start)

        batch = tf.TensorSpec([batch_size, *self.image_shape], "float32")
        return tf.data.Dataset.from_generator(batches, output_signature=batch)

    def draw(self, rng: np.random.Generator) -> Any:
        """One image.

        Args:
            rng: `np.random.Generator`, the only source of chance.

        Returns:
            Float array `[height, width, channels]` in [0, 1].
        """
        raise NotImplementedError(f"{type(self).__name__} does not define `draw`.")

    def get_config(self) -> dict[str, Any]:
        """Arguments of the constructor, as a JSON-serialisable dict."""
        return {"image_size": list(self.image_size), "channels": self.channels, "seed": self.seed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Generator:
        """The generator of `get_config()`."""
        return cls(**config)


def range_of(name, value, example, least, most=np.inf, whole=False):
    """The argument `name` as a pair `(low, high)`; one number stands for both.

    Args:
        name: String, of the argument.
        value: A number or a pair of numbers.
        example: A value that fits, for the error.
        least: What `low` must be at least.
        most: What `high` must be at most.
        whole: Whether both must be integers.

    Raises:
        ValueError: Unless it is one, finite and in order.
    """
    pair = value if isinstance(value, (list, tuple)) else (value, value)
    fits = len(pair) == 2 and all(map(is_number, pair)) and least <= pair[0] <= pair[1] <= most
    fits = fits and all(map(np.isfinite, pair))
    fits = fits and (not whole or all(is_integer(bound, least) for bound in pair))
    limits = f">= {least}" if most == np.inf else f"between {least} and {most}"
    kind = "an int" if whole else "a number"
    must = f"be {kind} {limits}, or a pair (low, high) of them in order"
    require(fits, name, value, must, f" Use, e.g., {name}={example}.")
    return tuple(map(int if whole else float, pair))
