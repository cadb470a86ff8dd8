"""The patches that a convolution's kernel sees, and their inner products without forming them."""

import itertools

import tensorflow as tf

from tfdpx.per_example.rules.base import positions


class Window:
    """A kernel's window and how it moves.

    Args:
        layer: A two-dimensional convolution layer.
    """

    def __init__(self, layer):
        self.size = layer.kernel_size
        self.strides = layer.strides
        self.dilation = layer.dilation_rate
        self.padding = layer.padding

    @property
    def taps(self):
        """Int: kernel height times kernel width."""
        return self.size[0] * self.size[1]

    def patches(self, images, contiguous):
        """The patches of `images` [N, H, W, C]: [N, H', W', kh * kw * C].

        Args:
            images: float32.
            contiguous: Whether to put them together from slices; that is fastest at stride one and
                under XLA, and needs H and W to be known.
        """
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
        """The convolution of `images` [N, H, W, C] with `filters` [kh, kw, C / groups, out]."""
        return tf.nn.conv2d(
            images,
            filters,
            strides=self.strides,
            padding=self.padding.upper(),
            dilations=self.dilation,
        )

    def by_phase(self, images, gradients):
        """Both cut into the phases of the dilation, so that each phase needs none.

        A kernel without dilation or padding that sees the phases has the same gradient.

        Args:
            images: float32 [N, H, W, C].
            gradients: float32 [N, H', W', out], at what the convolution gives for them.

        Returns:
            The phases of `images` and of `gradients`: float32 [N * phases, ...].
        """
        sizes = gradients.shape[1:3]
        if None in sizes:
            sizes = tf.unstack(tf.shape(gradients)[1:3])
        # What makes the last phases whole meets gradients of zero.
        ends = [-size % rate for size, rate in zip(sizes, self.dilation, strict=True)]
        # Dilation excludes strides, and without strides the edges are those of any size.
        edges = zip(self._edges((1, 1)), ends, strict=True)
        edges = [[before, after + end] for (before, after), end in edges]
        return [
            tf.space_to_batch(images, self.dilation, edges),
            tf.space_to_batch(gradients, self.dilation, [[0, end] for end in ends]),
        ]

    def gram(self, images, contiguous=False):
        """Inner products of patches: [B, T, T] with T = K H' W'.

        The patches' products are sums of the pixels' over the kernel's taps, so the pixels' are
        formed once, then shifted and added, along rows and then along columns. With strides most of
        the pixels' would be for nothing, and slow to pick: there the patches are formed.

        Args:
            images: float32 [B, K, H, W, C], with known K, H and W.
            contiguous: As for `patches`.
        """
        num_views, height, width, channels = images.shape[1:]
        if self._is_strided:
            patches = self.patches(tf.reshape(images, [-1, height, width, channels]), contiguous)
            patches = positions(patches, num_views)
            return tf.matmul(patches, patches, transpose_b=True)
        (top, bottom), (left, right) = self._edges((height, width))
        padded = tf.pad(images, [[0, 0], [0, 0], [top, bottom], [left, right], [0, 0]])
        size = [num_views, height + top + bottom, width + left + right]
        pixels = tf.reshape(padded, [-1, size[0] * size[1] * size[2], channels])
        products = tf.matmul(pixels, pixels, transpose_b=True)
        products = tf.reshape(products, [-1, *size, *size])
        rows, columns = self._slices((height, width))
        products = tf.add_n([products[:, :, s, :, :, s] for s in rows])
        products = tf.add_n([products[:, :, :, s, :, :, s] for s in columns])
        count = num_views * products.shape[2] * products.shape[3]
        return tf.reshape(products, [-1, count, count])

    def gram_terms(self, channels):
        """Int: the terms that `gram` adds one after the other for a product of two patches."""
        # Products of pixels, then as many sums as the window has rows and columns.
        return self.taps * channels if self._is_strided else channels + sum(self.size)

    def gram_sizes(self, height, width, num_views):
        """Of the products that `gram` forms first: how many, for how many numbers of a channel."""
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
        """Rows and columns of zeros before and after, as TensorFlow pads."""
        if self.padding == "valid":
            return [(0, 0), (0, 0)]
        edges = []
        for axis, length in enumerate(size):
            needed = (self._count(axis, length) - 1) * self.strides[axis] + self._extent(axis)
            missing = max(needed - length, 0)
            edges.append((missing // 2, missing - missing // 2))
        return edges

    def _slices(self, size):
        """For each axis the slice that each tap takes of the padded image."""
        taken = []
        for axis, length in enumerate(size):
            stride, last = self.strides[axis], self._count(axis, length) - 1
            starts = [tap * self.dilation[axis] for tap in range(self.size[axis])]
            taken.append([slice(s, s + stride * last + 1, stride) for s in starts])
        return taken

    def _extent(self, axis):
        return (self.size[axis] - 1) * self.dilation[axis] + 1

    def _count(self, axis, length):
        if self.padding == "same":
            return -(-length // self.strides[axis])
        return (length - self._extent(axis)) // self.strides[axis] + 1
