"""Private names of Keras's saving: functions that load and save, and the content of a file."""

import contextlib
import io
import zipfile
from typing import Any

import numpy as np

from tfdpx._keras import layer_internals, names

_Saveable: Any = names.get("KerasSaveable")

# Functions that `hook` wraps: pairs of a module and a name in it.
LOOKING_UP = names.find("get_registered_object")
LOADING = names.find("_load_state")
LOADING_HDF5 = (
    names.find("load_weights_from_hdf5_group"),
    names.find("load_weights_from_hdf5_group_by_name"),
)
LOADING_HDF5_MODEL = names.find("load_model_from_hdf5")
SAVING_HDF5_MODEL = names.find("save_model_to_hdf5")


def weights_to_load(layer, visited):
    """Returns a list of the weights of a layer that Keras will load.

    Args:
        layer: `keras.Layer`.
        visited: Set of the ids of objects that Keras will not load (`objects_to_skip`), or None.
    """
    skipped = [
        part for part in layer_internals.flatten_layers(layer) if id(part) in (visited or ())
    ]
    kept = {id(variable) for part in skipped for variable in part.weights}
    return [variable for variable in layer.weights if id(variable) not in kept]


def saved_optimizer(weights_store):
    """Returns a dict of arrays, the optimizer's state in a weights file; None without a state."""
    try:
        store = weights_store.get("optimizer")
        return {name: np.array(store[name]) for name in store.keys()}
    except KeyError:
        return None


class _Arrays(_Saveable):
    """An object that Keras saves in place of an optimizer, with arrays as its state."""

    def __init__(self, arrays):
        self._arrays = arrays

    def save_own_variables(self, store):
        for name, array in self._arrays.items():
            store[name] = array

    def _obj_type(self):
        return "Optimizer"


@contextlib.contextmanager
def saving_arrays(model, arrays):
    """Context manager in which Keras saves arrays in place of a model's optimizer.

    The rest of the file is as for a model that is not compiled.

    Args:
        model: `keras.Model`.
        arrays: Dict of arrays by name, which `saved_optimizer` finds in the file.
    """
    optimizer, compiled = getattr(model, "optimizer", None), model.compiled
    model.optimizer, model.compiled = _Arrays(arrays), False
    try:
        yield
    finally:
        model.optimizer, model.compiled = optimizer, compiled


def weights_file(model):
    """Returns the bytes of the `.weights.h5` file that `model.save_weights` writes.

    The file is made in memory, because HDF5 ends the process if the disk is full.
    """
    content, name = io.BytesIO(), "model.weights.h5"
    with zipfile.ZipFile(content, "w") as archive:
        store = names.get("H5IOStore")(name, archive=archive, mode="w")
        names.get("_save_state")(
            model,
            weights_store=store,
            assets_store=None,
            inner_path="",
            visited_saveables=set(),
        )
        store.close()
    with zipfile.ZipFile(content) as archive:
        return archive.read(name)
