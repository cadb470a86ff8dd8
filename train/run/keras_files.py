"""Any Keras image model as the start of a run: what reaches it, and what stands on it."""

import keras

from tfdpx import account
from tfdpx._keras import layer_internals
from tfdpx.models import backbone, transfer
from tfdpx.models.networks import logits
from tfdpx.models.on_features import linear
from tfdpx.train.errors import UserError, checking_flags


class KerasFile:
    """A trained model that somebody's Keras code wrote.

    Args:
        model: The loaded `keras.Model`.
        path: String, for errors.
        pixels: As of `tfdpx.models.backbone`.

    Attributes:
        image_shape: `(height, width, channels)` that it takes; None where it takes any.
        about: String, what is done with it, for people.

    Raises:
        UserError: If it takes no images, or its pixels are not known.
    """

    def __init__(self, model, path, pixels=None):
        self._model, self._pixels = model, pixels
        try:
            self.image_shape = transfer.image_shape(model)
            _, head = transfer.without_head(model)
            _, scaled = transfer.preparation(model, pixels)
        except ValueError as error:
            raise UserError(f"Cannot start from --init_from={path}: {error}") from error
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
        for layer in layer_internals.flatten_layers(self._model):
            layer.trainable = trainable != "last" and num_classes is not None
        pixels = keras.Input(shape)
        with checking_flags():
            x = backbone(
                self._model,
                input_shape=shape,
                batch_norm=batch_norm or "freeze",
                pixels=self._pixels,
            )(pixels)
        if num_classes is not None:
            x = linear(x, num_classes) if trainable == "last" else logits(x, num_classes)
        body = keras.Model(pixels, x, name="body")
        images = keras.Input(shape, dtype="uint8", name="image")
        whole = body(keras.layers.Rescaling(1.0, name="normalise")(images))
        whole = keras.Model(images, whole, name=self._model.name)
        account.mark_known(whole.variables)  # `provenance` accounts for what the file has seen.
        return whole
