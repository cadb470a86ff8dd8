"""Layers that were adapted to data, and the declaration that values are public."""

import keras

from tfdpx import account
from tfdpx._keras import layer_internals, model_internals, step_context
from tfdpx.accounting.ledger import Ledger

_ARGUMENTS = {
    keras.layers.Normalization: "as `mean` and `variance`",
    keras.layers.Discretization: "as `bin_boundaries`",
    keras.layers.TextVectorization: "as `vocabulary`",
    keras.layers.StringLookup: "as `vocabulary`",
    keras.layers.IntegerLookup: "as `vocabulary`",
}


def mark_public(layer: keras.Layer) -> None:
    """Declares that the current weights and statistics of a layer or model hold no private data.

    tfdpx relies on this declaration:

    - The statistics that `adapt` computed for the layer, and for the layers in it, are public. So
      the layer may be in a model that is trained privately.
    - Weights from a source without a ledger (for example a file without one, `set_weights`, or
      training with an ordinary optimizer) are public: `model.optimizer.ledger.is_complete` is True
      again. The updates of private training stay in the ledger.

    The declaration holds for this layer in this process. Repeat the declaration for a copy, or for
    a model that is loaded from a file. Only the second point is saved, as a part of the ledger.

    Args:
        layer: A `keras.Layer` or `keras.Model` that already has its values.

    Raises:
        TypeError: If `layer` is not a `keras.Layer`.
        ValueError: If the layer has neither weights nor statistics yet.

    Example:
    >>> import keras, numpy as np
    >>> layer = keras.layers.Normalization()
    >>> layer.adapt(np.array([[1.0], [3.0]]))  # Of public data.
    >>> mark_public(layer)
    """
    if not isinstance(layer, keras.Layer):
        raise TypeError(
            "Argument `layer` must be a keras.Layer or keras.Model. Received: layer of type "
            f"{type(layer).__name__}."
        )
    adapted = [part for part in layer_internals.flatten_layers(layer) if _is_adapted(part)]
    if not layer.weights and not adapted:
        raise ValueError(
            f"Layer '{layer.name}' has no values yet that could be declared public. Call `adapt` "
            "or `build`, or load its weights, before `tfdpx.checks.mark_public`."
        )
    for part in adapted:
        account.declare_statistics(part, Ledger())
    account.mark_known(layer.variables)


def spent_on(layer: keras.Layer, ledger: Ledger) -> None:
    """Records the privacy cost of a layer's statistics, for the ledgers of models with the layer.

    Args:
        layer: A `keras.Layer` that holds noisy statistics.
        ledger: `tfdpx.accounting.Ledger` of the mechanisms that released the statistics.
    """
    account.declare_statistics(layer, ledger)
    account.uncounted.add(layer)


def problems_of_adapted(model):
    """Yields a text for each layer of a model, or of its augmentation, that was adapted to data.

    Args:
        model: A compiled, built `keras.Model`.
    """
    optimizer = model_internals.innermost(model.optimizer)
    if not getattr(optimizer, "noise_multiplier", 0.0):  # Without noise, nothing is refused.
        return
    ids_inside = set()  # A TextVectorization has a StringLookup inside.
    for layer in [*layer_internals.flatten_layers(model), *_layers_in(optimizer.augment)]:
        if account.ledger_of_statistics(layer) is not None:
            ids_inside.update(map(id, layer_internals.flatten_layers(layer)))
        elif id(layer) not in ids_inside and step_context.eagerly(_is_adapted, layer):
            ids_inside.update(map(id, layer_internals.flatten_layers(layer)))
            kind = next((kind for kind in _ARGUMENTS if isinstance(layer, kind)), None)
            yield (
                f"Layer '{layer.name}' (of type {type(layer).__name__}) was adapted to data: what "
                "`adapt` computes is a function of the data without noise, and no ledger counts "
                f"it. Give it public values {_ARGUMENTS.get(kind, 'instead')}, or adapt it to "
                "public data and say `tfdpx.checks.mark_public(layer)`, or adapt a new layer by "
                "`tfdpx.private_adapt`."
            )


def _layers_in(augment):
    """Returns the layers in an augmentation, and in the augmentations that it holds."""
    if isinstance(augment, keras.Layer):
        return layer_internals.flatten_layers(augment)
    attributes = list(getattr(augment, "__dict__", {}).values())
    holders = [
        part for part in attributes if isinstance(part, keras.Layer) or hasattr(part, "draw")
    ]
    return [layer for part in holders for layer in _layers_in(part)]


def _is_adapted(layer):
    return layer_internals.adapted_statistics(layer) is not None
