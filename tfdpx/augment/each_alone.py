"""Views of each example made separately, with any function."""

import itertools

import tensorflow as tf

from tfdpx import noise
from tfdpx._keras import tensorflow_internals


class EachAlone:
    """Applies a function to each element of a batch separately.

    So no view depends on another example, on its place or on the division of the batch into
    microbatches: by construction, for every function. TensorFlow's random numbers follow from the
    key of the element.

    Args:
        function: Function of an image [...] and an int64 key [2] to a tensor. It is traced once for
            each shape and dtype, so Python code in it decides once for all elements.
    """

    def __init__(self, function):
        self._function = function
        self._traced = {}

    def __call__(self, images, keys):
        """Returns [n, ...]: the function of each of `images` [n, ...] and `keys`, int64 [n, 2]."""
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
    """Returns whether the class of `augment` is tfdpx's, which makes each view separately."""
    inner = getattr(augment, "augment", None)  # The inner one of `MixViews`.
    built_in = type(augment).__module__.startswith("tfdpx.augment.")
    return built_in and (inner is None or is_built_in(inner))


def keys(shape, seed):
    """Returns independent keys for `EachAlone`: int64 [*shape, 2].

    Args:
        shape: Sequence of ints and scalar int tensors.
        seed: int64 tensor [2].
    """
    return noise.words(tf.stack([*shape, 2]), seed, tf.int64)


class CustomViews:
    """Views by a user's object with `draw` and `apply`, for each example separately.

    Args:
        augment: The object; it is called with a batch of one.
        augmult: Int K, views of each example.
    """

    def __init__(self, augment, augmult):
        def views(image, key):
            return augment.apply(image[tf.newaxis], augment.draw(1, augmult, key))[0]

        self._alone = EachAlone(views)
        self.graphs = self._alone.graphs

    def draw(self, batch_size, augmult, seed):
        """Returns a key per example, int64 [batch_size, 2]; the object draws when it is applied."""
        del augmult
        return keys([batch_size], seed)

    def apply(self, images, choices):
        """Returns [B, K, ...]: the views of `images` [B, ...]."""
        return self._alone(images, choices)
