"""Runs the layers that do not train once, instead of in every update."""

import dataclasses
import math

import keras
import numpy as np

from tfdpx.train.run import evaluation, finetuning

# Features of all images, of training and to measure on, are kept in memory up to this size.
MOST_BYTES = 2**30


def head_and_features(settings, model, data):
    """The last layer as a model of its own, and the data as it sees them; else what was given.

    Without augmentation an image has the same features in every update where nothing trains but the
    last layer, so an update on the features is the update on the images, at a fraction of its time.

    Args:
        settings: A `training.Training`.
        model: The classifier that `finetuning.build` made; the head shares its last layer.
        data: `loading.ImageData`.

    Returns:
        The `keras.Model` to train, and an `ImageData` whose images are what that takes.
    """
    features = _features(model)
    arrays = [data.train_x, data.eval_x]
    in_memory = all(isinstance(images, np.ndarray) for images in arrays)
    if settings.augmult or settings.head_steps or not in_memory or features is None:
        return model, data
    shape = features.output_shape[1:]
    if 4 * math.prod(shape) * sum(map(len, arrays)) > MOST_BYTES:
        return model, data
    print(f"Computing features of shape {shape} once: the layers before the last do not train.")
    train_x, eval_x = (
        features.predict(images, batch_size=evaluation.BATCH_SIZE, verbose=0)
        if len(images)
        else np.zeros((0, *shape), "float32")
        for images in arrays
    )
    head = keras.Sequential([keras.Input(shape), finetuning.last_layer(model)], name=model.name)
    return head, dataclasses.replace(data, train_x=train_x, eval_x=eval_x, image_shape=shape)


def _features(model):
    """A model from images to the inputs of the last layer, if that alone trains; else None."""
    last, inner = finetuning.last_layer(model), model.layers[-1]
    trained = {id(v) for v in model.trainable_variables}
    own = {id(v) for v in last.trainable_variables}
    if not trained or trained != own or not isinstance(inner, keras.Model):
        return None
    if len(inner.inputs) != 1 or inner.outputs[0] is not last.output:
        return None
    body = keras.Model(inner.inputs, last.input)
    return keras.Model(model.inputs, body(model.layers[-2].output))
