"""Computes the patches of images that a convolution's kernel sees, and their inner products."""

import dataclasses
import itertools

import tensorflow as tf

from tfdpx.per_example.rows import positions


@dataclasses.dataclass(frozen=True)
class Window:
    """The window of a convolution's kernel, and how it moves over an image.

    A *tap* is one of the height x width places in the kernel. A *patch* contains the pixels that
    the kernel covers at one position of the output.

    Attributes:
        size: Pair of ints, the height and width of the kernel.
        strides: Pair of ints, the step from one position to the next, in rows and in columns.
        dilation: Pair of ints, the step from one tap to the next, in rows and in columns.
        padding: "same" or "valid".
    """

    size: tuple
    strides: tuple
    dilation: tuple
    padding: str

    @classmethod
    def from_layer(cls, layer):
        """Returns the window of a convolution layer. A sequence counts as an image with one row."""
        if len(layer.kernel_size) == 2:
            return cls(layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding)
        # TensorFlow's depthwise kernels have equal strides along both axes.
        movement = layer.strides * 2, layer.dilation_rate * 2
        return cls((1, *layer.kernel_size), *movement, layer.padding)

    @property
    def taps(self):
        """Returns the number of taps, kernel height times kernel width."""
        return self.size[0] * self.size[1]

    def patches(self, images, contiguous):
        """Returns the patches of `images`, float32 [N, H', W', kh * kw * C].

        Args:
            images: float32 [N, H, W, C].
            contiguous: Bool, whether to form patches by concatenating slices of the images. This
                way is fastest at stride one and under XLA. It needs static H and W.
        """
        if self.taps == 1 and max(self.strides) == 1:
            return images
        if not contiguous or None in images.shape[1:3]:
            return tf.image.extract_patches(
                images,
                sizes=[1, *self.size, 1],
                strides=[1, *self.strides, 1],
                rates=[1, *self.dilation, 1],
                padding=self.padding.upper(),
            )
        edges = self._edges(images.shape[1:3])
        padded = tf.pad(images, [[0, 0], *edges, [0, 0]])
        rows, columns = self._slices(images.shape[1:3])
        return tf.concat([padded[:, r, c] for r, c in itertools.product(rows, columns)], axis=-1)

    def convolve(self, images, filters):
        """Convolves `images` [N, H, W, C] with `filters` [kh, kw, C / groups, out]."""
        return tf.nn.conv2d(
            images,
            filters,
            strides=self.strides,
            padding=self.padding.upper(),
            dilations=self.dilation,
        )

    def kernel_gradient(self, inputs, output_gradients, kernel_shape):
        """Returns the gradient of the kernel, summed over all images, float32 [*kernel_shape].

        Args:
            inputs: float32 [N, H, W, C].
            output_gradients: float32 [N, H', W', out].
            kernel_shape: Sequence of ints, [kh, kw, C / groups, out].
        """
        padding = self.padding.upper()
        # Without oneDNN, TensorFlow's gradient supports neither dilation nor groups on CPUs.
        if max(self.dilation) > 1:
            inputs, output_gradients = self.split_phases(inputs, output_gradients)
            padding = "VALID"
        groups = inputs.shape[-1] // kernel_shape[2]
        pairs = (tf.split(images, groups, axis=-1) for images in (inputs, output_gradients))
        group_gradients = [
            tf.raw_ops.Conv2DBackpropFilter(
                input=part,
                filter_sizes=[*kernel_shape[:3], kernel_shape[3] // groups],
                out_backprop=gradients,
                strides=[1, *self.strides, 1],
                padding=padding,
            )
            for part, gradients in zip(*pairs, strict=True)
        ]
        return group_gradients[0] if groups == 1 else tf.concat(group_gradients, axis=-1)

    def correlate(self, images, gradients):
        """Returns the kernel gradient of each channel, by convolving images with output gradients.

        Args:
            images: float32 [1, H, W, C], with static H and W.
            gradients: float32 [H', W', C, multiplier], the output gradients of each channel.

        Returns:
            float32 [1, kh, kw, C * multiplier].
        """
        edges = self._edges(images.shape[1:3])
        # Here the gradients act as the kernel, so strides and dilation change places.
        extents = [
            (size - 1) * rate + (count - 1) * stride + 1
            for size, rate, count, stride in zip(
                self.size, self.dilation, gradients.shape[:2], self.strides, strict=True
            )
        ]
        images = tf.pad(images, [[0, 0], *edges, [0, 0]])[:, : extents[0], : extents[1]]
        return tf.nn.depthwise_conv2d(
            images, gradients, [1, *self.dilation, 1], "VALID", dilations=self.strides
        )

    def split_phases(self, images, gradients):
        """Splits images and output gradients into phases, which need no dilation.

        With dilation d, a phase contains every d-th pixel along each axis. On the phases, a kernel
        without dilation or padding has the same gradient as the dilated kernel on whole images.

        Args:
            images: float32 [N, H, W, C].
            gradients: float32 [N, H', W', out], the output gradients of the convolution.

        Returns:
            Two tensors, the phases of `images` and of `gradients`, float32 [N * phases, ...].
        """
        sizes = gradients.shape[1:3]
        if None in sizes:
            sizes = tf.unstack(tf.shape(gradients)[1:3])
        # Padding at the end is multiplied by gradients of zero.
        ends = [-size % rate for size, rate in zip(sizes, self.dilation, strict=True)]
        # Dilation excludes strides, and without strides the edges are the same for any size.
        edges = zip(self._edges((1, 1)), ends, strict=True)
        edges = [[before, after + end] for (before, after), end in edges]
        return [
            tf.space_to_batch(images, self.dilation, edges),
            tf.space_to_batch(gradients, self.dilation, [[0, end] for end in ends]),
        ]

    def gram(self, images, num_views, contiguous=False):
        """Returns the inner products of all pairs of patches, [B, T, T] with T = K H' W'.

        The inner product of two patches is a sum over taps of inner products of pixels. So the
        inner products of pixels are computed once, then shifted and added, first along rows and
        then along columns. With strides, most of these products would not be used, so the patches
        are formed instead.

        Args:
            images: float32 [B * K, H, W, C], with static H and W.
            num_views: Int K, the number of views of an example.
            contiguous: As for `patches`.
        """
        if self._is_strided:
            patches = positions(self.patches(images, contiguous), num_views)
            return tf.matmul(patches, patches, transpose_b=True)
        size = images.shape[1:3]
        edges = self._edges(size)
        padded = tf.pad(images, [[0, 0], *edges, [0, 0]]) if any(map(any, edges)) else images
        pixels = positions(padded, num_views)
        products = tf.matmul(pixels, pixels, transpose_b=True)
        shape = [num_views, *padded.shape[1:3]]
        products = tf.reshape(products, [-1, *shape, *shape])
        height, width = (self._count(axis, length) for axis, length in enumerate(size))
        for axis, (taps, length) in enumerate(
            zip(self._slices(size), (height, width), strict=True)
        ):
            if len(taps) > 1:
                products = _sum_of_shifts(products, (axis + 2, axis + 5), taps, length)
        count = num_views * height * width
        return tf.reshape(products, [-1, count, count])

    def gram_terms(self, channels):
        """Returns how many terms `gram` adds one after the other for one pair of patches."""
        # Products of pixels, then as many sums as the window has rows and columns.
        return self.taps * channels if self._is_strided else channels + sum(self.size)

    def gram_sizes(self, height, width, num_views):
        """Returns how many inner products `gram` forms first, and how many terms each adds up.

        The number of terms is per channel. With strides, these are inner products of patches,
        otherwise of pixels.
        """
        if self._is_strided:
            count = num_views * self._count(0, height) * self._count(1, width)
            return count**2, self.taps
        (top, bottom), (left, right) = self._edges((height, width))
        count = num_views * (height + top + bottom) * (width + left + right)
        return count**2, 1

    @property
    def _is_strided(self):
        return max(self.strides) > 1

    def _edges(self, size):
        """Returns TensorFlow's padding as two pairs: (top, bottom) and (left, right)."""
        if self.padding == "valid":
            return [(0, 0), (0, 0)]
        edges = []
        for axis, length in enumerate(size):
            needed = (self._count(axis, length) - 1) * self.strides[axis] + self._extent(axis)
            missing = max(needed - length, 0)
            edges.append((missing // 2, missing - missing // 2))
        return edges

    def _slices(self, size):
        """Returns two lists of slices, one list for rows and one for columns.

        Each list has a slice for each tap: the pixels of the padded image that the tap covers.
        """
        slices = []
        for axis, length in enumerate(size):
            stride, last = self.strides[axis], self._count(axis, length) - 1
            starts = [tap * self.dilation[axis] for tap in range(self.size[axis])]
            slices.append([slice(s, s + stride * last + 1, stride) for s in starts])
        return slices

    def _extent(self, axis):
        return (self.size[axis] - 1) * self.dilation[axis] + 1

    def _count(self, axis, length):
        if self.padding == "same":
            return -(-length // self.strides[axis])
        return (length - self._extent(axis)) // self.strides[axis] + 1


def _sum_of_shifts(products, axes, taps, length):
    """Adds up the parts of `products` that the slices `taps` select along both of `axes`.

    Each part has the size `length` along these axes.
    """
    rank = products.shape.rank
    size = tf.constant([length if axis in axes else -1 for axis in range(rank)])
    starts = [[tap.start if axis in axes else 0 for axis in range(rank)] for tap in taps]
    return tf.add_n([tf.slice(products, start, size) for start in starts])
