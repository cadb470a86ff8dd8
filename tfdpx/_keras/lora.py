"""Keras's LoRA, which adds a product of factors A and B to a frozen weight.

Keras does not save the factors. This module finds the factors of a model, and enables LoRA in
copies.
"""

import keras

from tfdpx._keras import layer_internals

_NAMES = ("lora_kernel_a", "lora_kernel_b", "lora_embeddings_a", "lora_embeddings_b")


def is_enabled(layer):
    """Returns whether `layer.enable_lora` was called."""
    return bool(getattr(layer, "lora_enabled", False))


def factors(layer):
    """Returns a list of the factors A and B of a layer. Without LoRA, the list is empty."""
    named = [getattr(layer, name, None) for name in _NAMES] if is_enabled(layer) else []
    return [variable for variable in named if variable is not None]


def frozen(layer):
    """Returns the frozen weight to which a layer adds A times B; None without LoRA."""
    names = ("_kernel", "_embeddings") if is_enabled(layer) else ()
    return next((getattr(layer, name) for name in names if hasattr(layer, name)), None)


def factors_of(model):
    """Returns the factors A and B of all layers of a model, in the order of the layers."""
    return [v for layer in layer_internals.flatten_layers(model) for v in factors(layer)]


def enable_as(model, copy):
    """Enables LoRA in the layers of `copy` that have it in `model`.

    A copy that was made from a config may lack LoRA, because the config of attention layers does
    not record it.
    """
    both = layer_internals.flatten_layers(model), layer_internals.flatten_layers(copy)
    for old, new in zip(*both, strict=True):
        if is_enabled(old) and not is_enabled(new):
            new.enable_lora(old.lora_rank, lora_alpha=old.lora_alpha)


def unmerged(model):
    """Context manager in which Keras saves frozen weights without adding A times B to them."""
    adapted = [x for x in layer_internals.flatten_layers(model) if is_enabled(x)]
    return layer_internals.replacing(adapted, "lora_enabled", False)


def reinitialize_zero_lora(model):
    """Draws A again if A and B are zero, as they are in a model that Keras has loaded.

    If both factors are zero, their gradients stay zero. B remains zero, so the outputs do not
    change.
    """
    for seed, layer in enumerate(layer_internals.flatten_layers(model)):
        pair = factors(layer)
        if pair and not any(keras.ops.any(keras.ops.not_equal(v, 0)) for v in pair):
            draw = keras.initializers.HeUniform(seed)  # The same on every host.
            pair[0].assign(draw(pair[0].shape, pair[0].dtype))
