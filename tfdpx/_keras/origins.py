"""Marks on variables and layers that tell where their values come from.

A variable is known if, while `hook` watched, one of Keras's initializers filled it, or its values
came with a ledger or as a copy of known ones. All other variables are unknown, for example those
that were made before `import tfdpx`.
"""

import contextlib
import hashlib
import sys
import types
import weakref

import keras
import numpy as np

from tfdpx._keras import layer_internals

_NAME = "_tfdpx_mark"
_INITIALIZERS = frozenset(c for c in vars(keras.initializers).values() if isinstance(c, type))
_NUMBERS = bool | int | float | str | np.generic | None


class Mark:
    """The mark on one variable or layer, which no copy or pickle of it has.

    Attributes:
        owner: Weak reference to the variable or layer.
        is_known: Bool, whether all private data in the values are in `accounts`.
        is_initialized: Bool, whether this was never merely declared, because an initializer filled
            a variable while `hook` watched.
        accounts: Set of the accounts of a variable's privacy loss.
        followers: The accounts of optimizers that train with a variable, a `WeakSet`.
        statistics: Pair of the ledger of a layer's statistics and their values, or None.
    """

    def __init__(self, owner):
        self.owner = weakref.ref(owner)
        self.is_known = self.is_initialized = False
        self.accounts, self.followers = set(), weakref.WeakSet()
        self.statistics = None

    def __reduce__(self):
        return type(None), ()


def mark_of(owner):
    """Returns the `Mark` of a `keras.Variable` or `keras.Layer`; a new one at first."""
    mark = vars(owner).get(_NAME)
    if mark is None or mark.owner() is not owner:  # `copy.copy` shares the attributes.
        mark = vars(owner)[_NAME] = Mark(owner)
    return mark


def mark_unknown(variables):
    """Records that the cost of the values of variables is unknown; returns those known before."""
    known = [variable for variable in variables if mark_of(variable).is_known]
    for variable in known:
        mark_of(variable).is_known = False
    return known


def mark_known(variables):
    """Records that the values of variables hold no private data but those in their accounts."""
    for mark in map(mark_of, variables):
        mark.is_initialized &= mark.is_known
        mark.is_known = True


def holds_no_data(initializer):
    """Returns whether an initializer is exactly one of Keras's, and was given plain numbers only.

    Args:
        initializer: Callable. The function by which `keras.layers.LSTM` joins two initializers, for
            example, counts by the initializers of the layer that it refers to.
    """
    if type(initializer) in _INITIALIZERS:
        attributes = vars(initializer).items()
        return all(_is_plain(v) or name.endswith("_axes") and _is_axes(v) for name, v in attributes)
    if not isinstance(initializer, types.FunctionType):
        return False
    name = str(initializer.__globals__.get("__name__"))
    if not name.startswith(("keras.src.", "keras_hub.src.")):
        return False
    is_of_keras = initializer.__globals__ is vars(sys.modules.get(name, keras))
    contents = [cell.cell_contents for cell in initializer.__closure__ or ()]
    return is_of_keras and all(_is_plain(v) or _has_plain_initializers(v) for v in contents)


def _is_plain(value):
    return isinstance(value, _NUMBERS) or type(value) is keras.random.SeedGenerator


def _is_axes(value):
    return isinstance(value, list | tuple) and all(isinstance(axis, int) for axis in value)


def _has_plain_initializers(layer):
    if not isinstance(layer, keras.Layer):
        return False
    initializers = (v for name, v in vars(layer).items() if name.endswith("initializer"))
    return all(_is_plain(v) or holds_no_data(v) for v in initializers)


@contextlib.contextmanager
def changing(model, is_fit=True):
    """Context manager of a training of `model` on data without an account.

    Unknown is afterwards the state of all layers that were trainable before or after it, and every
    other variable with another value.

    Args:
        model: `keras.Model`.
        is_fit: Bool. False for a batch, in which no callback can change frozen layers: their values
            are not compared, because that can take longer than the batch.
    """
    before = _state(model, is_fit)
    try:
        yield
    finally:
        for place, (variable, digest) in _state(model, is_fit).items():
            if digest is None or place not in before or digest != before[place][1]:
                mark_of(variable).is_known = False


def _state(model, with_values):
    """Returns a dict by id of pairs of a weight and the digest of its value.

    The digest is None in layers that train, and where the weight is unknown already. It is empty
    without values.
    """
    state = {}
    for layer in layer_internals.flatten_layers(model):
        for variable in layer_internals.own_weights(layer):
            is_fixed = not layer.trainable and mark_of(variable).is_known
            value = np.array(variable).tobytes() if is_fixed and with_values else b""
            digest = hashlib.blake2b(value).digest() if is_fixed else None
            state[id(variable)] = variable, digest
    return state
