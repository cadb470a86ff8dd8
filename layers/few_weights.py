"""Prepares a model for private fine-tuning: freezes all weights except for a few."""

from __future__ import annotations

import math
from collections.abc import Iterable

import keras

from tfdpx._arguments import check_choice, check_positive_integer, require
from tfdpx._keras import layer_internals, lora

WHAT = ("last", "bias", "norm", "lora")
# The layers of attention that get LoRA, as in Hu et al. (2021), arXiv 2106.09685, and keras_hub.
_OF_ATTENTION = ("query", "value", "query_dense", "value_dense")
_DENSE = (keras.layers.Dense, keras.layers.EinsumDense)


def trainable(model: keras.Model, what: str, rank: int = 8) -> int:
    """Freezes a model except for its last layer and some other weights.

    The noise of a private update grows with the number of trainable weights. A pre-trained model is
    therefore best fine-tuned with few trainable weights. Frozen weights have no gradients and
    reveal nothing about the private data. The argument `what` chooses the weights to train:

    - `"last"`: only the last layer.
    - `"bias"`: every bias, and the offsets of normalization layers (BiTFiT, Bu et al. 2022,
      arXiv 2210.00036).
    - `"norm"`: scales and offsets of all layers with "Norm" in the name of their class, except for
      batch normalization, which stays frozen and uses the statistics of its pre-training.
    - `"lora"`: a product of two low-rank matrices is added to each kernel of the queries and values
      in attention, and only the low-rank matrices are trained. If no layer has a name like "query"
      or "value", every `Dense` and `EinsumDense` layer gets such matrices. If any layer already has
      LoRA, no other layer gets LoRA, and `rank` is ignored. To use LoRA in other layers, such as an
      `Embedding`, first call `layer.enable_lora(rank)`.

    In all four cases the last layer is trained, too. The last layer is the last one with weights
    before the output, usually the new head. In a subclassed model, it is the last layer with
    weights that the constructor made. If the last layer is, or contains, an `Embedding`, this
    embedding is not trained, because language models also use it as their first layer. There is one
    exception: `"last"` trains an `Embedding` that is itself the last layer.

    Call this function before `compile`. As in Keras, changes have no effect on a model that is
    already compiled. Keras saves which layers are trainable, but not which weights of a layer are.
    So call the function again on a loaded model.

    Args:
        model: A built `keras.Model`. The function changes it, and ignores earlier values of
            `trainable`.
        what: `"last"`, `"bias"`, `"norm"` or `"lora"`.
        rank: Positive integer, the rank of the matrices for `"lora"`.

    Returns:
        Int, the number of trainable weights (scalars).

    Raises:
        ValueError: If the model is not built, if it has no weights of the chosen kind, if its last
            layer is quantized, or if an argument is invalid.
    """
    check_choice("what", what, WHAT)
    check_positive_integer("rank", rank, " Use 8.")
    is_built, must = model.built and model.weights, "be built, with weights"
    require(is_built, "model", model, must, " Call it on a batch, or give it a keras.Input.")
    head = last_layer(model)
    chosen = {} if what == "last" else _chosen(model, head, what, rank)
    if what != "last" and not chosen:
        raise ValueError(
            f"Argument `what` names weights that the model {model.name!r} does not have before its "
            f"last layer. Received: what={what!r}. Use 'last', or make layers that have them."
        )
    if what == "last" or not isinstance(head, keras.layers.Embedding):
        head.trainable = True
        chosen |= {id(v): v for v in _of_head(head)}
    train_only(model, chosen.values())
    return sum(math.prod(v.shape) for v in model.trainable_variables)


def train_only(model: keras.Model, variables: Iterable[keras.Variable]) -> None:
    """Freezes all variables of a model except for `variables`.

    Args:
        model: A built `keras.Model`.
        variables: Iterable of the `keras.Variable`s of the model that stay trainable.
    """
    chosen = {id(v) for v in variables}
    # Outer layers come first, because Keras passes their `trainable` on to all inner layers.
    for layer in layer_internals.flatten_layers(model):
        layer.trainable = any(id(v) in chosen for v in layer.weights)
    for variable in model.weights:
        if variable.trainable:
            variable.trainable = id(variable) in chosen


def last_layer(model: keras.Model) -> keras.layers.Layer:
    """Returns the last layer with weights in a model.

    If this layer is itself a model, the result is the last layer with weights inside it.

    Args:
        model: A built `keras.Model`.
    """
    last = [layer for layer in model.layers if layer.weights][-1]
    outputs = getattr(model, "outputs", None) or []
    inputs = outputs if len(outputs) == 1 else []
    while len(inputs) == 1:  # A layer that was made early may be called again at the end.
        layer, inputs = layer_internals.made_by(inputs[0])
        if getattr(layer, "weights", None):
            last = layer
            break
    return last_layer(last) if isinstance(last, keras.Model) else last


def _of_head(head):
    """Returns the variables to train in the last layer, without variables of an `Embedding`."""
    if getattr(head, "quantization_mode", None) not in (None, "float8") and not lora.factors(head):
        raise ValueError(
            f"Argument `model` ends with the quantized layer {head.name!r}, and its kernel cannot "
            "train. Quantize the other layers alone, by `model.quantize(mode, filters=...)`, or "
            "call `enable_lora` of this one."
        )
    parts = layer_internals.flatten_layers(head)
    parts = [x for x in parts if x is head or not isinstance(x, keras.layers.Embedding)]
    held = [(x, v) for x in parts for v in layer_internals.own_weights(x)]
    return [v for x, v in held if v.trainable and v is not lora.frozen(x)]


def _chosen(model, head, what, rank):
    """Returns the variables to train in layers before the last layer, as a dict by `id`.

    Args:
        model: A built `keras.Model`.
        head: The last layer.
        what: As for `trainable`.
        rank: As for `trainable`.
    """
    layers = [layer for layer in layer_internals.flatten_layers(model) if layer is not head]
    held = [(layer, v) for layer in layers for v in layer_internals.own_weights(layer)]
    if what == "bias":
        variables = [v for _, v in held if v.name == "beta" or "bias" in v.name]
    elif what == "norm":
        variables = [v for layer, v in held if "norm" in type(layer).__name__.lower()]
    else:
        layers += [head] if isinstance(head, keras.layers.Embedding) else []
        if not any(map(lora.is_enabled, layers)):
            dense = [layer for layer in layers if isinstance(layer, _DENSE)]
            for layer in [x for x in dense if x.name in _OF_ATTENTION] or dense:
                layer.enable_lora(rank)
        variables = [v for layer in layers for v in lora.factors(layer)]
    normed = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    frozen = {id(v) for layer in normed for v in layer.weights}
    return {id(v): v for v in variables if id(v) not in frozen}
