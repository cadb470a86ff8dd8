"""Layers that were adapted to data, and the word that values are public."""

import hashlib
import weakref

import keras
import numpy as np

from tfdpx._keras import layer_internals, model_internals, step_context
from tfdpx.accounting.ledger import Ledger
from tfdpx.spending import origins

_ARGUMENTS = {
    keras.layers.Normalization: "as `mean` and `variance`",
    keras.layers.Discretization: "as `bin_boundaries`",
    keras.layers.TextVectorization: "as `vocabulary`",
    keras.layers.StringLookup: "as `vocabulary`",
    keras.layers.IntegerLookup: "as `vocabulary`",
}

# Digests. Of values and not of layers, so that copies of a layer need no second word.
_public = set()
# Digest -> the ledger of all releases that gave a layer these values: two columns may have alike.
_private = {}
# Layer -> its digest when adapted, and the ledger of that alone. A copy counts all of `_private`.
_own = weakref.WeakKeyDictionary()


def public(layer: keras.Layer) -> None:
    """Declares that no private data are in the present values of a layer or model.

    It is your word, and the guarantee counts on it:

    - What `adapt` has computed for the layer, and for the layers in it, is public: they may be in a
      model that is trained privately. It holds for these values, in copies of the layer too, and
      until `adapt` computes others.
    - Weights that came from where no ledger could be seen (a file without one, `set_weights`,
      training with an ordinary optimizer) are public: `model.optimizer.ledger.is_complete` is True
      again. What private training has spent stays in the ledger. Weights that came from one place,
      or were trained by one optimizer, are declared together: call it with the whole model.

    Statistics of `adapt` are declared for this process, and not in a file: whoever loads the
    model declares them again. What is said about weights is in the ledger, and is saved with it.

    Args:
        layer: A `keras.Layer` or `keras.Model` that has its values already.

    Raises:
        TypeError: If `layer` is no `keras.Layer`.
        ValueError: If it has neither weights nor statistics yet.

    Example:
    >>> import keras, numpy as np
    >>> layer = keras.layers.Normalization()
    >>> layer.adapt(np.array([[1.0], [3.0]]))  # Of public data.
    >>> public(layer)
    """
    if not isinstance(layer, keras.Layer):
        raise TypeError(
            "Argument `layer` must be a keras.Layer or keras.Model. Received: layer of type "
            f"{type(layer).__name__}."
        )
    parts = layer_internals.flatten_layers(layer)
    digests = [digest for part in parts if (digest := _digest(part))]
    if not layer.weights and not digests:
        raise ValueError(
            f"Layer '{layer.name}' has no values yet that could be declared public. Call `adapt` "
            "or `build`, or load its weights, before `tfdpx.checks.public`."
        )
    _public.update(digests)
    origins.vouch(layer)


def spent_on(layer: keras.Layer, ledger: Ledger) -> None:
    """Notes what the present statistics of a layer cost: models that hold it count it.

    Args:
        layer: A `keras.Layer` that holds what was released.
        ledger: `tfdpx.accounting.Ledger` of the releases.
    """
    digest = _digest(layer)
    _private[digest] = _private.get(digest, Ledger()) + ledger
    _own[layer] = digest, ledger


def problems_of_adapted(model):
    """Texts of the layers of a model, and of the augmentation, that were adapted to data.

    Args:
        model: A compiled, built `keras.Model`.
    """
    optimizer = model_internals.innermost(model.optimizer)
    if not getattr(optimizer, "noise_multiplier", 0.0):  # Also of an optimizer of Keras.
        return
    named = set()  # A TextVectorization has a StringLookup inside.
    for layer in [*layer_internals.flatten_layers(model), *_layers_in(optimizer.augment)]:
        digest = step_context.eagerly(_digest, layer)
        if digest in _private:
            known, own = _own.get(layer, (None, None))
            origins.attach(own if known == digest else _private[digest], model.variables)
        elif digest and digest not in _public | named:
            named.add(digest)
            kind = next((kind for kind in _ARGUMENTS if isinstance(layer, kind)), None)
            yield (
                f"Layer '{layer.name}' (of type {type(layer).__name__}) was adapted to data: what "
                "`adapt` computes is a function of the data without noise, and no ledger counts "
                f"it. Give it public values {_ARGUMENTS.get(kind, 'instead')}, or adapt it to "
                "public data and say `tfdpx.checks.public(layer)`, or adapt a new layer by "
                "`tfdpx.private_adapt`."
            )


def _layers_in(augment):
    """The layers in an augmentation, and in those that it holds."""
    if isinstance(augment, keras.Layer):
        return layer_internals.flatten_layers(augment)
    held = list(getattr(augment, "__dict__", {}).values())
    inner = [part for part in held if isinstance(part, keras.Layer) or hasattr(part, "draw")]
    return [layer for part in inner for layer in _layers_in(part)]


def _digest(layer):
    """Digest of what `adapt` has computed for a layer, bytes; None where there is nothing."""
    statistics = layer_internals.adapted_statistics(layer)
    if statistics is None:
        return None
    digest = hashlib.blake2b()
    for array in map(np.ascontiguousarray, statistics):
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.digest()
