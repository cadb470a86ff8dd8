"""Rules of layers with LoRA (Hu et al. 2021).

Such a layer uses the matrix kernel + s A B, where s is a constant. The kernel is frozen, and only
the thin matrices A and B are trained. Let x be the inputs and G the output gradients. The gradient
of A is x^T (s G B^T), and the gradient of B is (s x A)^T G. So no array of the kernel's size is
formed. Per-example gradients of A and B take less memory and time than inner products of positions,
because A and B are thin.
"""

import string

import keras
import tensorflow as tf

from tfdpx._keras import lora
from tfdpx.per_example.rows import positions, split_views
from tfdpx.per_example.rule import BeforeActivation, variant_of
from tfdpx.per_example.rules.contraction import bias_gradients, letters
from tfdpx.per_example.rules.embedding import EmbeddingRule

# In these quantization modes, a layer multiplies by A and B in floating point, and adds the product
# to the output of the frozen kernel.
_QUANTIZED = (None, "int8", "int4")


def _has_lora(layer, registered_class, assumes):
    """Returns whether a layer has LoRA, and its class overrides none of the names in `assumes`.

    The frozen weights of the layer may be quantized.
    """
    frozen = lora.frozen(layer)
    is_supported = getattr(layer, "quantization_mode", None) in _QUANTIZED
    is_supported = is_supported and frozen is not None and not frozen.trainable
    layer_class = type(layer)
    is_unchanged = all(
        getattr(layer_class, name) is getattr(registered_class, name) for name in assumes
    )
    return is_supported and is_unchanged


def _scale(layer):
    return layer.lora_alpha / layer.lora_rank


class _Thin(BeforeActivation):
    """The base class of rules for layers that train only A, B and the bias."""

    assumes = ("call", "kernel", "quantized_call", "enable_lora")

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`."""
        return _has_lora(layer, registered_class, cls.assumes)

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        layer = self.layer
        a, b = (tf.cast(v.value, "float32") for v in (layer.lora_kernel_a, layer.lora_kernel_b))
        pairs = [
            *zip(
                (layer.lora_kernel_a, layer.lora_kernel_b),
                self.compute_gradients(a, b),
                strict=True,
            )
        ]
        trained_pairs = [pair for pair in pairs if self.explains(pair[0])]
        return self.in_order([*trained_pairs, *self.small_gradients])

    def compute_gradients(self, a, b):
        """Returns two tensors: the per-example gradients of the LoRA matrices A and B.

        Args:
            a: float32 tensor, the value of A.
            b: float32 tensor, the value of B.
        """
        raise NotImplementedError


@variant_of(keras.layers.Dense)
class LoraDenseRule(_Thin):
    """The rule of a `Dense` layer with the LoRA matrices A [in, r] and B [r, out]."""

    def compute_gradients(self, a, b):
        """See `_Thin.compute_gradients`."""
        x = positions(self.call.args[0], self.num_views)
        g = _scale(self.layer) * positions(self.output_gradients[0], self.num_views)
        behind = tf.tensordot(g, b, [[2], [1]])
        return (
            tf.matmul(x, behind, transpose_a=True),
            tf.matmul(tf.tensordot(x, a, 1), g, transpose_a=True),
        )

    @property
    def small_gradients(self):
        """See `Rule.small_gradients`. Returns the gradients of the bias."""
        gradients = positions(self.output_gradients[0], self.num_views)
        bias = self.layer.bias
        return [(bias, tf.reduce_sum(gradients, axis=1))] if self.explains(bias) else []


@variant_of(keras.layers.EinsumDense)
class LoraEinsumDenseRule(_Thin):
    """The rule of an `EinsumDense` layer with the LoRA matrices A [..., r] and B [r, last].

    The last axis of the kernel must be an axis of the outputs, but not of the inputs.
    """

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`."""
        if "." in layer.equation:
            return False
        inputs, kernel, outputs = letters(layer)
        is_distinct = all(len(set(axes)) == len(axes) for axes in (inputs, kernel, outputs))
        starts_with_batch = inputs[0] == outputs[0] and inputs[0] not in kernel
        is_supported = set(outputs) <= set(kernel + inputs) and set(inputs) <= set(kernel + outputs)
        is_supported = is_supported and set(kernel) <= set(inputs + outputs)
        is_new_axis = kernel[-1] in outputs and kernel[-1] not in inputs
        is_valid = is_distinct and starts_with_batch and is_supported and is_new_axis
        return is_valid and super().handles(layer, registered_class)

    def compute_gradients(self, a, b):
        """See `_Thin.compute_gradients`."""
        inputs, kernel, outputs = letters(self.layer)
        last = kernel[-1]
        rank, view = [c for c in string.ascii_letters if c not in self.layer.equation][:2]
        x, g = self.call.args[0], _scale(self.layer) * self.output_gradients[0]
        x, g = (split_views(tf.cast(t, "float32"), self.num_views) for t in (x, g))
        thin, thin_kernel = (axes.replace(last, rank) for axes in (outputs, kernel))
        of_x, of_g, of_thin = (axes[0] + view + axes[1:] for axes in (inputs, outputs, thin))
        behind = tf.einsum(f"{of_g},{rank}{last}->{of_thin}", g, b)
        before = tf.einsum(f"{of_x},{thin_kernel}->{of_thin}", x, a)
        return (
            tf.einsum(f"{of_x},{of_thin}->{inputs[0]}{thin_kernel}", x, behind),
            tf.einsum(f"{of_thin},{of_g}->{inputs[0]}{rank}{last}", before, g),
        )

    @property
    def small_gradients(self):
        """See `Rule.small_gradients`. Returns the gradients of the bias."""
        bias = self.layer.bias
        if not self.explains(bias):
            return []
        return [(bias, bias_gradients(self.output_gradients[0], bias.shape, self.num_views))]


@variant_of(keras.layers.Embedding)
class LoraEmbeddingRule(EmbeddingRule):
    """The rule of an `Embedding` layer with the LoRA matrices A [vocabulary, r] and B [r, d].

    A is treated as the table of an embedding, and B as the kernel of a `Dense` layer.
    """

    assumes = ("call", "embeddings", "quantized_call", "enable_lora")

    @classmethod
    def handles(cls, layer, registered_class):
        """See `Rule.handles`."""
        return _has_lora(layer, registered_class, cls.assumes)

    @classmethod
    def joined(cls, rules):
        """See `Rule.joined`. This rule never joins calls."""
        return None

    def __init__(self, call, output_gradients, num_views, variables):
        super().__init__(call, output_gradients, num_views, variables)
        self._scaled_gradients = _scale(self.layer) * self._gradients
        b = tf.cast(self.layer.lora_embeddings_b.value, "float32")
        self._gradients = tf.tensordot(self._scaled_gradients, b, [[2], [1]])

    @property
    def small_gradients(self):
        """See `Rule.small_gradients`. Returns the gradients of the matrix B."""
        b = self.layer.lora_embeddings_b
        if not self.explains(b):
            return []
        entries = tf.gather(self.layer.lora_embeddings_a.value, self._tokens)
        entries = tf.cast(entries, "float32")
        return [(b, tf.matmul(entries, self._scaled_gradients, transpose_a=True))]

    def per_example_gradients(self):
        """See `Rule.per_example_gradients`."""
        a = self.layer.lora_embeddings_a
        pairs = [(a, super().per_example_gradients()[0])] if self.explains(a) else []
        return self.in_order([*pairs, *self.small_gradients])
