"""Private names of Keras's files: where it loads and saves, and the content of a file."""

import io
import zipfile

import numpy as np

from tfdpx._keras import names

# Functions that `hook` wraps: pairs of a module and a name in it.
LOOKING_UP = names.find("get_registered_object")
LOADING = names.find("_load_state")
LOADING_HDF5 = (
    names.find("load_weights_from_hdf5_group"),
    names.find("load_weights_from_hdf5_group_by_name"),
)
LOADING_HDF5_MODEL = names.find("load_model_from_hdf5")
SAVING_HDF5_MODEL = names.find("save_model_to_hdf5")


def saved_optimizer(weights_store):
    """Returns the arrays, by name, of the optimizer in a weights file of Keras, or None."""
    try:
        store = weights_store.get("optimizer")
        return {name: np.array(store[name]) for name in store.keys()}
    except KeyError:
        return None


def weights_file(model):
    """Returns the bytes of the `.weights.h5` file that `model.save_weights` writes.

    It is made in memory, because HDF5 itself ends the process if a disk is full.
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
