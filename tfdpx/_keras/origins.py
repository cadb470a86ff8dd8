"""Marks on variables and layers that record where their values come from.

A variable is *known* if ledgers count all private data that its value depends on. A variable is
known if one of Keras's initializers filled it while `hook` watched. It is also known if its value
came with a ledger, or was copied from a known variable. All other variables are unknown, for
example those that were made before `import tfdpx`.
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
    """The mark on one variable or layer. Copies and pickles of the owner do not have the mark.

    Attributes:
        owner: Weak reference to the variable or layer.
        is_known: Bool, whether `accounts` count all private data that the value depends on.
        is_initialized: Bool, whether an initializer filled the variable and it has stayed known.
            False if the variable became known in another way, for example because the user declared
            it.
        accounts: Set of the accounts (`tfdpx.account.Account`) that count the privacy loss of the
            value.
        followers: `WeakSet` of the accounts of all optimizers that train a model with the variable.
        statistics: Pair of the ledger of a layer's noisy statistics and the values of these
            statistics; or None.
    """

    def __init__(self, owner):
        self.owner = weakref.ref(owner)
        self.is_known = self.is_initialized = False
        self.accounts, self.followers = set(), weakref.WeakSet()
        self.statistics = None

    def __reduce__(self):
        return type(None), ()


def mark_of(owner):
    """Returns the `Mark` of a `keras.Variable` or `keras.Layer`, and makes it if needed."""
    mark = vars(owner).get(_NAME)
    if mark is None or mark.owner() is not owner:  # `copy.copy` shares the attributes.
        mark = vars(owner)[_NAME] = Mark(owner)
    return mark


def mark_unknown(variables):
    """Records that variables are unknown; returns a list of those that were known before."""
    known = [variable for variable in variables if mark_of(variable).is_known]
    for variable in known:
        mark_of(variable).is_known = False
    return known


def mark_known(variables):
    """Records that variables are known: accounts count all private data in their values."""
    for mark in map(mark_of, variables):
        mark.is_initialized &= mark.is_known
        mark.is_known = True


def holds_no_data(initializer):
    """Returns whether an initializer holds no data: it is Keras's, and made from plain numbers.

    Args:
        initializer: Callable. Some layers, for example `keras.layers.LSTM`, use a function that
            refers to the layer and joins the layer's initializers. Such a function holds no data if
            these initializers hold none.
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
    """Context manager for a training that no account counts: marks the changed weights unknown.

    At the end, these variables are unknown: all weights of layers that were trainable before or
    after the training, and every other weight with a changed value.

    Args:
        model: `keras.Model`.
        is_fit: Bool. False for a single batch, where no callback can change frozen layers. Then the
            values of frozen layers are not compared, which saves time.
    """
    before = _state(model, is_fit)
    try:
        yield
    finally:
        for place, (variable, digest) in _state(model, is_fit).items():
            if digest is None or place not in before or digest != before[place][1]:
                mark_of(variable).is_known = False


def _state(model, with_values):
    """Returns a dict from the id of each weight to a pair of the weight and a digest.

    The digest is None if the layer trains, or if the weight is unknown already. Otherwise it is a
    digest of the value, or a constant without `with_values`.
    """
    state = {}
    for layer in layer_internals.flatten_layers(model):
        for variable in layer_internals.own_weights(layer):
            is_fixed = not layer.trainable and mark_of(variable).is_known
            value = np.array(variable).tobytes() if is_fixed and with_values else b""
            digest = hashlib.blake2b(value).digest() if is_fixed else None
            state[id(variable)] = variable, digest
    return state
