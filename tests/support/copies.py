"""Ways to copy a trained model with its ledger.

Each is a function of the model, of a folder for files, and of a function that returns a fresh model
of the same shapes, built with its optimizer.
"""

import copy
import functools
import pickle

import keras
import tensorflow as tf


def _by_file(name, model, folder, fresh):
    other, arguments = fresh(), {"max_shard_size": 1} if name.endswith(".json") else {}
    save = model.save_weights if ".weights." in name else model.save
    save(folder / name, **arguments)
    other.load_weights(folder / name)
    return other


def _by_loading(model, folder, fresh):
    model.save(folder / "loaded.keras")
    return keras.saving.load_model(folder / "loaded.keras")


def _by_checkpoint(model, folder, fresh):
    other = fresh()
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(folder / "c"))
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    return other


WAYS = {
    **{
        name: functools.partial(_by_file, name)
        for name in ("m.weights.h5", "m.weights.json", "m.keras")
    },
    "load_model": _by_loading,
    "tf.train.Checkpoint": _by_checkpoint,
    "deepcopy": lambda model, folder, fresh: copy.deepcopy(model),
    "pickle": lambda model, folder, fresh: pickle.loads(pickle.dumps(model)),
}
