"""Applies augmentations of any kind to each example separately."""

import itertools

import tensorflow as tf

from tfdpx import noise
from tfdpx._keras import tensorflow_internals


class EachAlone:
    """Applies a function to each element of a batch separately, with separate random numbers.

    The result of an element cannot depend on other examples, on its position, or on the
    microbatches. TensorFlow's random operations in the function draw from the element's key.

    Args:
        function: Function from an image [...] and a key, an int64 tensor [2], to a tensor. It is
            traced once for each shape and dtype, so its Python code runs once for all elements.
    """

    def __init__(self, function):
        self._function = function
        self._traced = {}

    def __call__(self, images, keys):
        """Returns the results of the function for all elements, a tensor [n, ...].

        Args:
            images: Tensor [n, ...].
            keys: int64 tensor [n, 2], the key of each image.
        """
        one = self._one(tf.TensorSpec(images.shape[1:], images.dtype))
        view = one.structured_outputs
        signature = tf.TensorSpec(view.shape, view.dtype)
        return tf.map_fn(one, (images, keys), fn_output_signature=signature)

    def graphs(self):
        """Returns a list of the `tf.Graph`s traced so far."""
        return [function.graph for function in self._traced.values()]

    def _one(self, spec):
        def one(element):
            image, key = element
            count = itertools.count()
            keys = tensorflow_internals.stateful_draws_from(lambda: noise.fold_in(key, next(count)))
            with keys:
                return self._function(image, key)

        kind = tuple(spec.shape), spec.dtype
        if kind not in self._traced:
            key = tf.TensorSpec([2], tf.int64)
            traced = tf.function(one, autograph=False).get_concrete_function((spec, key))
            self._traced[kind] = traced
        return self._traced[kind]


def is_built_in(augment):
    """Returns whether `augment` is an augmentation of tfdpx, which makes each view separately."""
    inner = getattr(augment, "augment", None)  # `MixViews` contains another augmentation.
    built_in = type(augment).__module__.startswith("tfdpx.augment.")
    return built_in and (inner is None or is_built_in(inner))


def keys(shape, seed):
    """Returns independent random keys for `EachAlone`, an int64 tensor [*shape, 2].

    Args:
        shape: Sequence of ints and scalar int tensors.
        seed: int64 tensor of shape [2].
    """
    return noise.words(tf.stack([*shape, 2]), seed, tf.int64)


class CustomViews:
    """Calls a user's augmentation for each example separately.

    Args:
        augment: The user's object, with methods `draw` and `apply`. Both methods are called with
            batches of one example.
        augmult: Int, K, the number of views of each example.
    """

    def __init__(self, augment, augmult):
        def views(image, key):
            return augment.apply(image[tf.newaxis], augment.draw(1, augmult, key))[0]

        self._alone = EachAlone(views)
        self.graphs = self._alone.graphs

    def draw(self, batch_size, augmult, seed):
        """Returns a random key for each example, int64 [batch_size, 2].

        The user's object draws its random choices from these keys in `apply`.
        """
        del augmult
        return keys([batch_size], seed)

    def apply(self, images, choices):
        """Returns the views [B, K, ...] of `images` [B, ...]; `choices` are keys from `draw`."""
        return self._alone(images, choices)
