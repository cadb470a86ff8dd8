"""Freezes a model but for the few weights that a private training changes."""

from __future__ import annotations

import math
from collections.abc import Iterable

import keras

from tfdpx._arguments import check_choice, check_positive_integer, require
from tfdpx._keras import layer_internals, lora

WHAT = ("last", "bias", "norm", "lora")
# As in Hu et al. (2021), arXiv 2106.09685, and keras_hub: the queries and values of attention.
_OF_ATTENTION = ("query", "value", "query_dense", "value_dense")
_DENSE = (keras.layers.Dense, keras.layers.EinsumDense)


def trainable(model: keras.Model, what: str, rank: int = 8) -> int:
    """Freezes a model except for its last layer and the weights that `what` names.

    The noise of a private update grows with the number of trainable weights, so a pre-trained
    model is best fine-tuned in few. The gradients of frozen weights are not computed, nothing about
    the data is released through them, and they are not in the ledger.

    - `"last"`: only the last layer.
    - `"bias"`: every bias, and the offsets of normalization (BiTFiT, Bu et al. 2022,
      arXiv 2210.00036).
    - `"norm"`: scales and offsets of the layers with "Norm" in the name of their class. Batch
      normalization stays frozen: it uses the statistics of its pre-training.
    - `"lora"`: two thin factors for the kernels of queries and values, or if no layer has such a
      name, of every `Dense` and `EinsumDense`. Layers that have LoRA already keep their rank, and
      are then the only ones. For other layers, such as an `Embedding`, call
      `layer.enable_lora(rank)` before.

    The last layer is the last one with weights before the output, the new head; in a subclassed
    model it is the last that its constructor made. It trains in all four cases, except for an
    `Embedding` that it is or contains, for example in language models that use the embedding twice.
    `"last"` trains that too if it is the layer itself.

    Call this before `compile`: as in Keras, a compiled model trains on as before. Keras saves which
    layers train, but not which weights of a layer, so call this again on a loaded model.

    Args:
        model: A built `keras.Model`. It is changed; it does not matter what trained before.
        what: `"last"`, `"bias"`, `"norm"` or `"lora"`.
        rank: Positive integer, of the factors of `"lora"`.

    Returns:
        Int, the number of weights that are trained.

    Raises:
        ValueError: If the model is not built or has no such weights, its last layer is quantized,
            or an argument is not one of the above.
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
    """Makes these variables of a model the only ones that train.

    Args:
        model: A built `keras.Model`.
        variables: Iterable of its weights.
    """
    chosen = {id(v) for v in variables}
    # From the outside in: Keras passes `trainable` on to all that a layer contains.
    for layer in layer_internals.flatten_layers(model):
        layer.trainable = any(id(v) in chosen for v in layer.weights)
    for variable in model.weights:
        if variable.trainable:
            variable.trainable = id(variable) in chosen


def last_layer(model: keras.Model) -> keras.layers.Layer:
    """Returns the last layer of a model that has weights, inside of its last part.

    Args:
        model: A built `keras.Model`.
    """
    last = [layer for layer in model.layers if layer.weights][-1]
    outputs = getattr(model, "outputs", None) or []
    inputs = outputs if len(outputs) == 1 else []
    while len(inputs) == 1:  # A layer that is called twice may be the last but not the newest.
        layer, inputs = layer_internals.made_by(inputs[0])
        if getattr(layer, "weights", None):
            last = layer
            break
    return last_layer(last) if isinstance(last, keras.Model) else last


def _of_head(head):
    """Returns the trainable variables of the last layer, without a table of tokens in it."""
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
    """Returns the variables to train before the last layer, by id."""
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
