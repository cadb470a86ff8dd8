"""A layer without weights that computes the wavelet scattering transform of images."""

from __future__ import annotations

import itertools
import math
import typing
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdpx._arguments import check_choice, check_positive_integer, require

# The largest size of intermediate values in bytes. Larger values would not fit into the caches of a
# CPU, and smaller ones would not keep an accelerator busy.
_BYTES_ON_CPU, _BYTES_ON_ACCELERATOR = 2**25, 2**28
# This number is added under the square root of a modulus, so the gradient at zero is 0 instead of
# NaN. It is far smaller than the precision of any pixel.
_TINY = 1e-36


class ScatteringPath(typing.NamedTuple):
    """The wavelets of a feature of `Scattering2D`, in the order in which they are applied.

    Attributes:
        order: Int, the number of wavelets: 0, 1 or 2.
        scales: Tuple of `order` ints, the scale j of each wavelet, in ascending order.
        angles: Tuple of `order` ints from 0 to L - 1, the direction of each wavelet.
    """

    order: int
    scales: tuple
    angles: tuple


@keras.saving.register_keras_serializable(package="tfdpx")
class Scattering2D(keras.layers.Layer):
    """Computes fixed features of images: the scattering transform with Morlet wavelets.

    Let psi be wavelets of J scales and L directions, phi a Gaussian, and `*` the convolution. The
    layer computes these local averages for each colour channel x, and keeps every `2**J`-th pixel
    along each axis:

    - order 0: `x * phi`;
    - order 1: `|x * psi1| * phi`, for each of the J L wavelets;
    - order 2: `||x * psi1| * psi2| * phi`, for each pair of wavelets where psi2 has a coarser scale
      than psi1.

    Each position and colour thus has `num_paths = 1 + J L + L^2 J (J - 1) / 2` features, or
    `1 + J L` without order 2. The features hardly change if the image is shifted or distorted a
    little. So a linear model on the features classifies well, and only this linear model must be
    trained privately. Filters, padding and values are the same as in Kymatio 0.3.

    Privacy: the layer has no weights and keeps examples separate. You may compute the features of
    each example before the training, which does not change the guarantee.

    Args:
        J: Integer, the number of scales. Height and width of images must be at least `2**J`.
        L: Integer, the number of directions.
        max_order: 1 or 2, the highest order of features.
        padding: How to continue an image beyond its border: "reflect" mirrors the image, and
            "zeros" adds zeros. The padded image has `(size // 2**J + 2) * 2**J` pixels per axis.
            Features at positions in the padding are dropped.
        data_format: "channels_last" or "channels_first". Defaults to
            `keras.config.image_data_format()`.
        **kwargs: `name`, `dtype` and the other arguments of `keras.layers.Layer`.

    Attributes:
        num_paths: Int, the number of features per position and colour.
        paths: Tuple of `num_paths` `ScatteringPath(order, scales, angles)`, in the order of the
            output's channels. Direction t is the angle `(max(L // 2 - 1, 0) - t) * pi / L`, from
            the vertical axis toward the horizontal axis.

    Input shape: `[batch, height, width, channels]`, or `[batch, channels, height, width]` with
    "channels_first", of any real dtype.

    Output shape: `[batch, height // 2**J, width // 2**J, channels * num_paths]`, or
    `[batch, channels * num_paths, height // 2**J, width // 2**J]` with "channels_first", in the
    compute dtype. Channel `c * num_paths + p` is path p of colour c. The paths are sorted by order,
    then by scale and direction of the first wavelet, then by scale and direction of the second.

    The layer always computes in float32 (in float64 with `dtype="float64"`). On a TPU the Gaussian
    averages have the precision of XLA's float32 products. With J=2 and L=8, the intermediate values
    of one colour of an image take 1.6 MiB at 32x32 pixels, and 53 MiB at 224x224. A batch that
    needs more than 32 MiB, or 256 MiB with an accelerator, is computed in several parts, one after
    the other.

    Raises:
        ValueError: If an argument is out of range. When built, if the height, the width or the
            number of channels is not fixed, or if the height or the width is less than `2**J`.

    Example:
    >>> layer = Scattering2D(J=2, L=8, padding="zeros")
    >>> layer(np.ones((5, 16, 16, 1))).shape
    TensorShape([5, 4, 4, 81])
    >>> layer.num_paths, layer.paths[80]
    (81, ScatteringPath(order=2, scales=(0, 1), angles=(7, 7)))

    References:
        - [Bruna & Mallat, 2013](https://arxiv.org/abs/1203.1513), "Invariant scattering
          convolution networks".
        - [Andreux et al., 2020](https://arxiv.org/abs/1812.11214). The filters, the padding and the
          order of paths are those of this library, Kymatio.
    """

    def __init__(
        self,
        J: int,
        L: int = 8,
        max_order: int = 2,
        padding: str = "reflect",
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        # `autocast` would round images to 16 bits before the transform.
        super().__init__(autocast=False, **kwargs)
        check_positive_integer("J", J, " Use 2 for small images.")
        check_positive_integer("L", L, " Use 8.")
        check_choice("max_order", max_order, (1, 2))
        check_choice("padding", padding, ("reflect", "zeros"))
        data_format = data_format or keras.config.image_data_format()
        check_choice("data_format", data_format, ("channels_last", "channels_first"))
        self.J, self.L, self.max_order = int(J), int(L), int(max_order)
        self.padding, self.data_format = padding, data_format

    @property
    def paths(self) -> tuple[ScatteringPath, ...]:
        """Returns a tuple of `ScatteringPath`s, in the order of the output's channels."""
        wavelets = list(itertools.product(range(self.J), range(self.L)))
        firsts = [ScatteringPath(1, (j,), (t,)) for j, t in wavelets]
        seconds = [
            ScatteringPath(2, (j1, j2), (t1, t2))
            for (j1, t1), (j2, t2) in itertools.product(wavelets, wavelets)
            if j2 > j1
        ]
        return (ScatteringPath(0, (), ()), *firsts, *(seconds if self.max_order == 2 else ()))

    @property
    def num_paths(self) -> int:
        """Returns the number of features per position and colour."""
        return len(self.paths)

    def build(self, input_shape: Any) -> None:
        """Computes the filters for images of shape `input_shape`. The layer creates no weights."""
        channels, *size = self._channels_and_size(input_shape)
        is_valid = None not in (channels, *size) and len(input_shape) == 4
        must = "have four axes, with known height, width and channels"
        hint = " Use, e.g., keras.Input((32, 32, 3))."
        require(is_valid, "input_shape", tuple(input_shape), must, hint)
        shorter = min(size)
        must = f"be at most log2 of the image's shorter side, which has {shorter} pixels here"
        hint = f" Use J={shorter.bit_length() - 1}." if shorter > 1 else " Use larger images."
        require(shorter >= 2**self.J, "J", self.J, must, hint)
        padded = [(pixels // 2**self.J + 2) * 2**self.J for pixels in size]
        self._paddings = _rounds_of_padding(size, padded)
        self._make_filters(padded)
        # The largest tensors are the products of the finest spectra with all wavelets. All other
        # tensors at that time together take about as much memory, hence the factor of 2.
        directions = self.L**2 if self.max_order == 2 and self.J > 1 else self.L
        held = 2 * directions * math.prod(padded) * np.dtype(self._complex_dtype).itemsize
        self._rows_at_a_time = max(_bytes_at_a_time() // held, 1)
        self.input_spec = keras.layers.InputSpec(shape=(None, *input_shape[1:]))

    def _make_filters(self, padded):
        """Computes the filters as NumPy arrays, which become constants of a graph.

        An image at resolution r has only every `2**r`-th pixel of the original.

        - `_wavelets[j, r]` is an array `[L, height / 2**r, width / 2**r]`: the wavelets of scale j
          for images at resolution r <= j. `_moduli` multiplies the spectra of images by this array.
        - `_averages[r]` is a list of two `low_pass` matrices for images at resolution r, one for
          height and one for width.

        Args:
            padded: List of two ints, the height and width of padded images.
        """
        all_wavelets, averages = {}, {}
        for j in range(self.J):
            spectra = wavelets(padded, j, self.L)
            for r in range(max(j, 1) if self.max_order == 2 else 1):
                # The inverse transform divides by the number of pixels, which is smaller by this
                # factor than in the forward transform.
                filters = at_resolution(spectra, r) / 4 ** (j - r)
                all_wavelets[j, r] = filters.astype(self._real_dtype)
            pair = [low_pass(pixels, self.J, j) for pixels in padded]
            averages[j] = [matrix.astype(self._real_dtype) for matrix in pair]
        self._wavelets, self._averages = all_wavelets, averages

    @tf.autograph.experimental.do_not_convert
    def call(self, inputs: Any) -> Any:
        """Returns the features of `inputs`, a batch of images."""
        images = tf.cast(inputs, self._real_dtype)
        last = self.data_format == "channels_last"
        if last:
            images = tf.transpose(images, [0, 3, 1, 2])
        _, channels, *size = images.shape
        features = self._in_parts(tf.reshape(images, [-1, *size]))
        features = tf.reshape(features, [-1, channels, *features.shape[1:]])
        # `_average` returns columns before rows.
        features = tf.transpose(features, [0, 4, 3, 1, 2] if last else [0, 1, 2, 4, 3])
        batch, *shape = self.compute_output_shape(inputs.shape)
        features = tf.reshape(features, [-1 if batch is None else batch, *shape])
        return tf.cast(features, self.compute_dtype)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shape of the features for images of shape `input_shape`."""
        channels, *size = self._channels_and_size(input_shape)
        size = [None if pixels is None else pixels // 2**self.J for pixels in size]
        channels = None if channels is None else channels * self.num_paths
        if self.data_format == "channels_last":
            return (input_shape[0], *size, channels)
        return (input_shape[0], channels, *size)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, as for any Keras layer."""
        names = ("J", "L", "max_order", "padding", "data_format")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    @property
    def _real_dtype(self):
        return keras.backend.result_type(self.compute_dtype, "float32")

    @property
    def _complex_dtype(self):
        return "complex128" if self._real_dtype == "float64" else "complex64"

    def _channels_and_size(self, shape):
        """Returns the numbers of channels, rows and columns in an input shape."""
        _, *axes = shape
        return [axes[-1], *axes[:-1]] if self.data_format == "channels_last" else axes

    def _in_parts(self, rows):
        """Returns `_scatter(rows)`, computed in parts if the batch needs too much memory."""
        if rows.shape[0] and rows.shape[0] <= self._rows_at_a_time:
            return self._scatter(rows)
        count = tf.shape(rows)[0]
        parts = tf.maximum(-(-count // self._rows_at_a_time), 1)
        # All parts have the same size. The last part is filled up with rows of zeros.
        size = tf.maximum(-(-count // parts), 1)
        rows = tf.pad(rows, [[0, parts * size - count], [0, 0], [0, 0]])
        height, width = (pixels // 2**self.J for pixels in rows.shape[1:])
        rows = tf.reshape(rows, [parts, size, *rows.shape[1:]])
        spec = tf.TensorSpec([None, self.num_paths, width, height], self._real_dtype)
        features = tf.map_fn(self._scatter, rows, parallel_iterations=1, fn_output_signature=spec)
        return tf.reshape(features, [-1, *features.shape[2:]])[:count]

    def _scatter(self, rows):
        """Returns the features of images with a single colour.

        Args:
            rows: Tensor `[rows, height, width]`, where each row is one colour of an image.

        Returns:
            Tensor `[rows, num_paths, width // 2**J, height // 2**J]`, with columns before rows.
        """
        mode = {"reflect": "REFLECT", "zeros": "CONSTANT"}[self.padding]
        for margins in self._paddings:
            rows = tf.pad(rows, [[0, 0], *margins], mode)
        spectra = self._spectra(rows)
        orders = [[self._average(rows[:, tf.newaxis], 0)], [], []]
        for j1 in range(self.J):
            moduli = self._moduli(spectra, j1, 0)
            orders[1].append(self._average(moduli, j1))
            if self.max_order == 2 and j1 < self.J - 1:
                inner = self._spectra(moduli)
                coarser = [
                    self._average(self._moduli(inner, j2, j1), j2) for j2 in range(j1 + 1, self.J)
                ]
                # [rows, L, scales * L, ...]: the second axis is for the first wavelet, the third
                # axis for the second wavelet.
                pairs = tf.concat(coarser, axis=2)
                count = pairs.shape[1] * pairs.shape[2]
                orders[2].append(tf.reshape(pairs, [-1, count, *pairs.shape[3:]]))
        return tf.concat([feature for order in orders for feature in order], axis=1)

    def _spectra(self, maps):
        """Returns the Fourier transforms of real images `[..., height, width]`."""
        return tf.signal.fft2d(tf.cast(maps, self._complex_dtype))

    def _moduli(self, spectra, scale, resolution):
        """Returns `|x * psi|` for all wavelets psi of a scale, at every `2**scale`-th pixel.

        If pixels are dropped, several frequencies become one. The method adds up the products of
        spectra and wavelets at these frequencies.

        Args:
            spectra: Complex tensor `[rows, ..., height, width]`, the Fourier transforms of x.
            scale: Int, the scale j of the wavelets.
            resolution: Int. x has only every `2**resolution`-th pixel of the image.

        Returns:
            Real tensor `[rows, ..., L, height', width']`.
        """
        # The filters are real, so two real products replace a complex product, which would take
        # longer.
        parts = tf.stack([tf.math.real(spectra), tf.math.imag(spectra)])[..., tf.newaxis, :, :]
        filters = self._wavelets[scale, resolution]
        folds = scale - resolution
        if folds:
            pairs = zip(_quarters(parts, tf.split), _quarters(filters, np.split), strict=True)
            parts = tf.add_n([quarter * weights for quarter, weights in pairs])
        else:
            parts = parts * filters
        for _ in range(folds - 1):
            parts = tf.add_n(_quarters(parts, tf.split))
        waves = tf.signal.ifft2d(tf.complex(parts[0], parts[1]))
        return tf.sqrt(tf.square(tf.math.real(waves)) + tf.square(tf.math.imag(waves)) + _TINY)

    def _average(self, maps, resolution):
        """Returns the Gaussian averages `maps * phi` at the positions of the features.

        Args:
            maps: Tensor `[rows, ..., height, width]`.
            resolution: Int. `maps` have only every `2**resolution`-th pixel of the image.

        Returns:
            Tensor `[rows, ..., width // 2**J, height // 2**J]`, with columns before rows. Here
            width and height are those of the image without padding.
        """
        vertical, horizontal = self._averages[resolution]
        *leading, height, width = maps.shape[1:]
        across = tf.reshape(maps, [-1, width]) @ horizontal
        across = tf.transpose(tf.reshape(across, [-1, height, horizontal.shape[1]]), [0, 2, 1])
        both = tf.reshape(across, [-1, height]) @ vertical
        return tf.reshape(both, [-1, *leading, horizontal.shape[1], vertical.shape[1]])


def _bytes_at_a_time():
    devices = tf.config.list_logical_devices()
    on_cpu = all(device.device_type == "CPU" for device in devices)
    return _BYTES_ON_CPU if on_cpu else _BYTES_ON_ACCELERATOR


def _quarters(maps, split):
    """Returns the four quarters of each spectrum, a list of arrays [..., height / 2, width / 2].

    The sum of the four is four times the spectrum of the image with every second pixel per axis.

    Args:
        maps: Array or tensor of spectra [..., height, width].
        split: `np.split` or `tf.split`.
    """
    return [quarter for half in split(maps, 2, axis=-2) for quarter in split(half, 2, axis=-1)]


# The Morlet wavelets and the Gaussian low-pass filter have the formulas and constants of Kymatio
# (Andreux et al., 2020), so the features agree. The filters are periodic on the padded image.
_SIGMA = 0.8
_FREQUENCY = 3 * math.pi / 4
# Kymatio's normalization uses this value for pi. With the exact value, features would differ by
# 9e-5.
_PI = 3.1415
# Beyond this number of standard deviations, a Gaussian is zero in double precision.
_REACH = 9


def _rounds_of_padding(size, padded):
    """Returns the paddings that are applied to an image, one after the other.

    Usually there is one padding. A reflection cannot be wider than the image, so very small images
    are padded twice. The margins on both sides are equal, or differ by one pixel.

    Args:
        size: List of two ints, the height and width of images.
        padded: List of two ints, the height and width after padding.

    Returns:
        List of one or two paddings. A padding contains, for each axis, a pair of ints: the margins
        before and after the image.
    """
    margins = [((p - n) // 2, (p - n + 1) // 2) for n, p in zip(size, padded, strict=True)]
    first = [[min(m, n - 1) for m in margin] for margin, n in zip(margins, size, strict=True)]
    rest = np.subtract(margins, first).tolist()
    return [amounts for amounts in (first, rest) if np.any(amounts)]


def wavelets(shape, scale, angles):
    """Returns the wavelets of one scale in all directions.

    Args:
        shape: `(height, width)` of the padded image.
        scale: Int, j. The wavelet oscillates with the frequency `3 pi / 4 / 2**j`.
        angles: Int, L, the number of directions.

    Returns:
        float64 array `[angles, height, width]`, the Fourier transforms of the wavelets, which are
        real. Direction t is the angle `(max(L // 2 - 1, 0) - t) * pi / L` from the vertical axis
        toward the horizontal axis.
    """
    first = max(angles // 2 - 1, 0)
    turns = [(first - t) * math.pi / angles for t in range(angles)]
    return np.stack([_wavelet(shape, scale, turn, slant=4 / angles) for turn in turns])


def _wavelet(shape, scale, turn, slant):
    """Returns the Fourier transform of one wavelet, a float64 array of `shape`.

    Args:
        shape: `(height, width)` of the padded image.
        scale: Int, the scale j of the wavelet.
        turn: Float, the direction of the wavelet, an angle in radians.
        slant: Float, the width of the wavelet along its direction, divided by its width at right
            angles to that direction.
    """
    sigma = _SIGMA * 2**scale
    radius = math.ceil(_REACH * sigma / min(slant, 1))
    rows, columns = (_positions(size, radius) for size in shape)
    along = rows[:, None] * math.cos(turn) + columns * math.sin(turn)
    across = columns * math.cos(turn) - rows[:, None] * math.sin(turn)
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * sigma**2))
    wave = np.exp(1j * _FREQUENCY / 2**scale * along)
    # Makes the mean of the wavelet zero. So the wavelet does not respond to a constant image.
    wave -= np.sum(envelope * wave) / np.sum(envelope)
    periodic = np.zeros(shape, complex)
    values = envelope * wave * slant / (2 * _PI * sigma**2)
    np.add.at(periodic, np.ix_(rows % shape[0], columns % shape[1]), values)
    return np.fft.fft2(periodic).real


def _positions(size, radius):
    """Returns the integers from `-radius` to `radius`, the positions along an axis of a filter.

    They are cut to the range from `-2 * size` to `3 * size - 1`, as in Kymatio. `size` is the size
    of the padded image along this axis.
    """
    return np.arange(max(-2 * size, -radius), min(3 * size, radius + 1))


def at_resolution(spectra, resolution, axes=(-2, -1)):
    """Returns the lowest frequencies of spectra, as many as images at `resolution` have.

    Args:
        spectra: Array of Fourier transforms, with sizes that are multiples of
            `2**(resolution + 1)` along `axes`.
        resolution: Int. Images at this resolution have every `2**resolution`-th pixel along `axes`.
        axes: Pair of ints, the axes of height and width.
    """
    for axis in axes:
        half = spectra.shape[axis] // 2 ** (resolution + 1)
        spectra = np.take(spectra, np.r_[:half, -half:0], axis)
    return spectra


def low_pass(size, scales, resolution):
    """Returns a matrix that computes the Gaussian averages of an image along one axis.

    A product with the matrix gives the averages around every `2**(J - r)`-th pixel, except for the
    first and the last of these pixels, which belong to the padding. To average over an image,
    multiply along both axes.

    Args:
        size: Int, the padded height or width.
        scales: Int, J. The standard deviation of the Gaussian is `0.8 * 2**(J - 1)` pixels.
        resolution: Int, r. The axis has only every `2**r`-th pixel of the image.

    Returns:
        float64 array `[size / 2**r, size / 2**J - 2]`.
    """
    sigma = _SIGMA * 2 ** (scales - 1)
    positions = np.arange(-2 * size, 3 * size)
    values = np.exp(-(positions**2) / (2 * sigma**2)) / math.sqrt(2 * _PI * sigma**2)
    spectrum = np.fft.fft(values.reshape(5, size).sum(axis=0)).real
    kernel = np.fft.ifft(at_resolution(spectrum, resolution, axes=[0])).real
    stride = 2 ** (scales - resolution)
    centres = stride * np.arange(1, size // 2**scales - 1)
    return kernel[(centres - np.arange(len(kernel))[:, None]) % len(kernel)]
