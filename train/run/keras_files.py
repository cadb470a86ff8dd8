"""Any Keras image model as the start of a run: what reaches it, and what stands on it."""

import functools
import inspect
import sys

import keras
import numpy as np

from tfdpx._keras import layer_internals
from tfdpx.models import transfer
from tfdpx.models.head import logits
from tfdpx.models.linear_on_features import linear
from tfdpx.spending import origins
from tfdpx.train.config.errors import UserError, checking_flags

# Values of --pixels, and what keras.applications calls them.
_MODES = {"-1..1": "tf", "imagenet": "torch", "caffe": "caffe"}
PIXELS = ("0..255", "0..1", *_MODES)


class KerasFile:
    """A trained model that somebody's Keras code wrote.

    Args:
        model: The loaded `keras.Model`.
        path: String, for errors.
        pixels: One of `PIXELS`; None finds out: 0..255 for a model that scales pixels itself, and
            what `preprocess_input` does for one of keras.applications.

    Attributes:
        image_shape: `(height, width, channels)` that it takes; None where it takes any.
        about: String, what is done with it, for people.

    Raises:
        UserError: If it takes no images, or its pixels are not known.
    """

    def __init__(self, model, path, pixels=None):
        self._model = model
        try:
            self.image_shape = transfer.image_shape(model)
            self._network, head = transfer.without_head(model)
        except ValueError as error:
            raise UserError(f"Cannot start from --init_from={path}: {error}") from error
        self._prepare, scaled = _preparation(model, path, pixels)
        outputs = model.outputs[0].shape[-1]
        last = f"its last layer, {head!r} of {outputs} outputs, is left out" if head else "no head"
        height, width, channels = self.image_shape
        size = f"{height or 'any'}x{width or 'any'} pixels" if height or width else "any size"
        self.about = (
            f"Start from {model.name!r} of {model.count_params():,} weights: {last}; images of "
            f"{size}, {'gray' if channels == 1 else 'in colour'}; pixels {scaled} (--pixels "
            "changes it)."
        )

    def classifier(self, shape, num_classes, trainable="all", batch_norm=None):
        """The model with a new last layer, built as those of `classifiers.build`.

        Args:
            shape: `(height, width, channels)` of the images.
            num_classes: Int; None for the features.
            trainable: "last" for the new layer alone, behind features of norm one; or any other
                word of `--trainable`.
            batch_norm: "freeze" or "replace"; None is "freeze".

        Returns:
            A `keras.Model` from uint8 images to `[batch, num_classes]` logits, or to features
            `[batch, dimensions]`.

        Raises:
            UserError: If the batch normalization cannot be replaced.
        """
        # One by one: Keras passes nothing on from a model that is trainable already.
        for layer in layer_internals.flatten_layers(self._network):
            layer.trainable = trainable != "last" and num_classes is not None
        with checking_flags():
            network, _ = transfer.without_batch_statistics(self._network, batch_norm or "freeze")
        pixels = keras.Input(shape)
        x = network(self._prepare(pixels))
        if num_classes is not None:
            x = linear(x, num_classes) if trainable == "last" else logits(x, num_classes)
        body = keras.Model(pixels, x, name="body")
        images = keras.Input(shape, dtype="uint8", name="image")
        whole = body(keras.layers.Rescaling(1.0, name="normalise")(images))
        whole = keras.Model(images, whole, name=self._model.name)
        origins.vouch(whole)  # `provenance` accounts for what the file has seen.
        return whole


def _preparation(model, path, pixels):
    """A function of images with values 0 to 255 to what a model takes, and words for the values."""
    if pixels is None and transfer.rescales(model):
        return (lambda images: images), "of 0 to 255, which it scales itself"
    if pixels == "0..255":
        return (lambda images: images), "of 0 to 255"
    if pixels == "0..1":
        return keras.layers.Rescaling(1 / 255), "of 0 to 1"
    preprocess = keras.applications.imagenet_utils.preprocess_input
    if pixels is not None:
        return functools.partial(preprocess, mode=_MODES[pixels]), f"as {pixels}"
    known = _preprocess_input(model.name)
    if known is None:
        raise UserError(
            f"The model of --init_from={path} does not scale pixels itself, and its name, "
            f"{model.name!r}, is of no network whose preprocessing is known. Say what it was "
            f"trained on: --pixels={' or --pixels='.join(PIXELS)}."
        )
    return known, f"as {known.__module__.removeprefix('keras.src.')}.preprocess_input makes them"


def _preprocess_input(name):
    """What the network of keras.applications of this name takes images through, None if unknown."""
    plain = name.lower().replace("_", "").replace("-", "")
    members = inspect.getmembers(keras.applications, inspect.isfunction)
    known = [made for made, _ in members if plain.startswith(made.lower())]
    if not known:
        return None
    constructor = getattr(keras.applications, max(known, key=len))
    found = sys.modules[constructor.__module__].preprocess_input
    sample = np.arange(12.0).reshape(1, 2, 2, 3)
    # It does nothing for networks that scale pixels themselves, which this one was built without.
    return None if np.array_equal(found(sample.copy()), sample) else found
