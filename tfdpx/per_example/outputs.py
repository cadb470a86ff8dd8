"""A layer's outputs with what Keras attaches to them: masks, and logits that losses reach for."""

import tensorflow as tf

from tfdpx._keras import layer_internals


class Outputs:
    """Takes a nest of outputs apart into plain tensors and rebuilds it around others.

    Keras' cross-entropies read `_keras_logits` off a prediction and so bypass its last activation:
    whoever wants all gradients of a loss must watch that tensor too.

    Attributes:
        tensors: Every tensor of the nest, each followed by its mask and its logits, if any.
        differentiable: A flag for each of `tensors`: floating point, and no mask.
    """

    def __init__(self, nest):
        self._nest = nest
        self.tensors, self.differentiable, self._attached = [], [], []
        for leaf in tf.nest.flatten(nest):
            mask, logits = layer_internals.side_channels(leaf)
            self._attached.append((tf.is_tensor(leaf), mask is not None, logits is not None))
            for tensor, is_mask in ((leaf, False), (mask, True), (logits, False)):
                if tf.is_tensor(tensor):
                    self.tensors.append(tensor)
                    self.differentiable.append(tensor.dtype.is_floating and not is_mask)

    def rebuild(self, tensors):
        """The nest around `tensors`, which stand for `self.tensors` in order."""
        new, leaves = iter(tensors), []
        for leaf, (is_tensor, has_mask, has_logits) in zip(
            tf.nest.flatten(self._nest), self._attached, strict=True
        ):
            # A fresh tensor each time: attributes must not leak onto the original.
            leaf = tf.identity(next(new)) if is_tensor else leaf
            mask = next(new) if has_mask else None
            logits = next(new) if has_logits else None
            layer_internals.set_side_channels(leaf, mask, logits)
            leaves.append(leaf)
        return tf.nest.pack_sequence_as(self._nest, leaves)

    def select(self, tensors):
        """Those of `tensors` (ordered as `self.tensors`) that a gradient can reach."""
        return [t for t, wanted in zip(tensors, self.differentiable, strict=True) if wanted]
