"""Chooses which weights of a pre-trained model are trained, few of them for little noise."""

from __future__ import annotations

import math
from collections.abc import Iterable

import keras

from tfdpx._arguments import check_choice, check_positive_integer
from tfdpx._keras import layer_internals, lora

WHAT = ("last", "bias", "norm", "lora")
# As Hu et al. (2021), arXiv 2106.09685, and keras_hub: the queries and values of attention.
_OF_ATTENTION = ("query", "value", "query_dense", "value_dense")
_DENSE = (keras.layers.Dense, keras.layers.EinsumDense)


def trainable(model: keras.Model, what: str, rank: int = 8) -> int:
    """Freezes a model but for its last layer and what `what` names.

    The noise of a private update grows with the number of weights that train, so a pre-trained
    model is best fine-tuned in few. The gradients of frozen weights are not computed, nothing is
    released about the data through them, and they are not in the ledger.

    - `"last"`: the last layer alone.
    - `"bias"`: every bias, and the offsets of normalization (BiTFiT, Bu et al. 2022,
      arXiv 2210.00036).
    - `"norm"`: scales and offsets of the layers with "Norm" in the name of their class. Batch
      normalization stays frozen: it uses the statistics of its pre-training.
    - `"lora"`: two thin factors for the kernels of queries and values, or where no layer has such a
      name, of every `Dense` and `EinsumDense`. Layers that have LoRA already keep their rank, and
      are then the only ones. Other layers, such as an `Embedding`, take `layer.enable_lora(rank)`
      before.

    The last layer is the last before the output that has weights: the new head; in a subclassed
    model the last that its constructor made. It trains in all four, but for an `Embedding` that it
    is or holds, as in language models that use the embedding twice; `"last"` trains that too where
    it is the layer itself.

    Call this before `compile`: as in Keras, a compiled model trains on as it was. Keras saves which
    layers train, but not which weights of a layer: call this again on a loaded model.

    Args:
        model: A built `keras.Model`. It is changed; what trained before counts for nothing.
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
    if not model.built or not model.weights:
        raise ValueError(
            f"Argument `model` must be built, with weights. Received: model={model!r}. Call it on "
            "a batch, or give it a keras.Input."
        )
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
        variables: Of its weights.
    """
    chosen = {id(v) for v in variables}
    # Keras passes `trainable` on to all that a layer holds: from the outside in.
    for layer in layer_internals.flatten_layers(model):
        layer.trainable = any(id(v) in chosen for v in layer.weights)
    for variable in model.weights:
        if variable.trainable:
            variable.trainable = id(variable) in chosen


def last_layer(model: keras.Model) -> keras.layers.Layer:
    """The last layer of a model that has weights, inside of its last part.

    Args:
        model: A built `keras.Model`.
    """
    last = [layer for layer in model.layers if layer.weights][-1]
    outputs = getattr(model, "outputs", None) or []
    inputs = outputs if len(outputs) == 1 else []
    while len(inputs) == 1:  # A layer that is called twice may be the last and not the newest.
        layer, inputs = layer_internals.made_by(inputs[0])
        if getattr(layer, "weights", None):
            last = layer
            break
    return last_layer(last) if isinstance(last, keras.Model) else last


def _of_head(head):
    """The variables of the last layer that train, without a table of tokens that it holds."""
    if getattr(head, "quantization_mode", None) not in (None, "float8") and not lora.factors(head):
        raise ValueError(
            f"Argument `model` ends with the quantized layer {head.name!r}, whose kernel cannot "
            "train. Quantize the other layers alone, by `model.quantize(mode, filters=...)`, or "
            "call `enable_lora` of this one."
        )
    parts = layer_internals.flatten_layers(head)
    parts = [x for x in parts if x is head or not isinstance(x, keras.layers.Embedding)]
    held = [(x, v) for x in parts for v in layer_internals.own_weights(x)]
    return [v for x, v in held if v.trainable and v is not lora.frozen(x)]


def _chosen(model, head, what, rank):
    """The variables to be trained before the last layer, by id."""
    layers = [layer for layer in layer_internals.flatten_layers(model) if layer is not head]
    held = [(layer, v) for layer in layers for v in layer_internals.own_weights(layer)]
    if what == "bias":
        found = [v for _, v in held if v.name == "beta" or "bias" in v.name]
    elif what == "norm":
        found = [v for layer, v in held if "norm" in type(layer).__name__.lower()]
    else:
        layers += [head] if isinstance(head, keras.layers.Embedding) else []
        if not any(map(lora.is_enabled, layers)):
            dense = [layer for layer in layers if isinstance(layer, _DENSE)]
            for layer in [x for x in dense if x.name in _OF_ATTENTION] or dense:
                layer.enable_lora(rank)
        found = [v for layer in layers for v in lora.factors(layer)]
    normed = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    frozen = {id(v) for layer in normed for v in layer.weights}
    return {id(v): v for v in found if id(v) not in frozen}
