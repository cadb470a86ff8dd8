"""What Keras's callbacks remember from epoch to epoch, for a run that is resumed.

`EarlyStopping` counts epochs without progress and keeps the best weights, `ReduceLROnPlateau`
counts too, `ModelCheckpoint` knows the best value: each begins anew in every `fit`.
"""

import io

import keras
import numpy as np

from tfdpx.spending.origins import got

_NUMBERS = ("best", "best_epoch", "wait", "stopped_epoch", "cooldown_counter")
_ARRAYS = "best_weights"
# They change within `on_epoch_end`, and write nothing.
_COUNTING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)


def saved(callbacks):
    """The bytes of a file with the states of callbacks of Keras; None if none has any.

    Args:
        callbacks: List of `keras.callbacks.Callback`.
    """
    content, arrays = io.BytesIO(), {}
    for prefix, callback in _by_name(callbacks).items():
        for name in _NUMBERS:
            value = getattr(callback, name, None)
            if value is not None:
                arrays[f"{prefix}/{name}"] = np.asarray(value)
        for place, array in enumerate(getattr(callback, _ARRAYS, None) or ()):
            arrays[f"{prefix}/{_ARRAYS}/{place}"] = array
    np.savez(content, **arrays)
    return content.getvalue() if arrays else None


def restore(callbacks, content, model):
    """Gives callbacks the states that `saved` kept of callbacks of their types, in their order.

    Args:
        callbacks: As for `saved`, after `on_train_begin`.
        content: Bytes.
        model: The `keras.Model`, whose ledger counts what is in the weights that they hold.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = dict(file)
    for prefix, callback in _by_name(callbacks).items():
        mine = {
            k.removeprefix(f"{prefix}/"): v for k, v in arrays.items() if k.startswith(f"{prefix}/")
        }
        for name in _NUMBERS:
            if name in mine:
                setattr(callback, name, mine[name].item())
        count = sum(name.startswith(_ARRAYS) for name in mine)
        if count:
            weights = [mine[f"{_ARRAYS}/{place}"] for place in range(count)]
            got(model, weights)
            callback.best_weights = weights


def place_of_save(callbacks):
    """The least and the last place of a save among callbacks, two ints.

    Behind those that count, whose epoch it then holds, and before those that put averages in place
    of the weights.

    Args:
        callbacks: List of callbacks, without the one that saves.
    """
    swaps = [isinstance(each, keras.callbacks.SwapEMAWeights) for each in callbacks]
    end = swaps.index(True) if any(swaps) else len(callbacks)
    counting = [i for i, each in enumerate(callbacks[:end]) if isinstance(each, _COUNTING)]
    return counting[-1] + 1 if counting else 0, end


def _by_name(callbacks):
    """Dict of those with a state, by their type and how many of the type come before."""
    found = {}
    for callback in callbacks:
        if isinstance(callback, (*_COUNTING, keras.callbacks.ModelCheckpoint)):
            name = type(callback).__name__
            found[f"{name}-{sum(key.startswith(f'{name}-') for key in found)}"] = callback
    return found
