"""Parts of any trained Keras image model: what it takes, its features, its batch normalization."""

import functools
import inspect
import sys

import keras
import numpy as np

from tfdpx._keras import layer_internals
from tfdpx.layers import replace_batch_norm

# Names of scales of pixels, and what keras.applications calls them.
_MODES = {"-1..1": "tf", "imagenet": "torch", "caffe": "caffe"}
PIXELS = ("0..255", "0..1", *_MODES)
_RESCALING = (keras.layers.Rescaling, keras.layers.Normalization)
_ARITHMETIC = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide")  # Classes of keras.ops.


def image_shape(model):
    """`(height, width, channels)` of the images that a model takes; None where it takes any.

    Raises:
        ValueError: If it is not a Functional or Sequential model of one input of images.
    """
    inputs = getattr(model, "inputs", None) or []
    if len(inputs) != 1 or len(model.outputs) != 1 or len(inputs[0].shape) != 4:
        raise ValueError(
            "The model must be Functional or Sequential, with one input of shape [batch, height, "
            f"width, channels] and one output. Received: {model.name!r} of class "
            f"{type(model).__name__}, with inputs of shapes {[x.shape for x in inputs]}. Build "
            "such a model, copy the weights into it, and save that."
        )
    if inputs[0].shape[3] not in (1, 3):
        raise ValueError(
            "The model must take images of 1 or 3 channels, which are the last axis. Received: "
            f"{model.name!r} with inputs of shape {inputs[0].shape}."
        )
    return tuple(inputs[0].shape[1:])


def rescales(model):
    """Whether a model scales the pixels itself, before its first layer with trained weights."""
    for operation in keras.Model(model.inputs, model.outputs).operations:
        if isinstance(operation, keras.Model) and rescales(operation):
            return True
        if isinstance(operation, _RESCALING) or type(operation).__name__ in _ARITHMETIC:
            return True
        if getattr(operation, "weights", None):
            return False
    return False


def preparation(model, pixels=None):
    """What images with values 0 to 255 go through before a model.

    Args:
        model: A model that `image_shape` accepts.
        pixels: One of `PIXELS`; None finds out.

    Returns:
        A function of symbolic images, and words for the values that it gives.

    Raises:
        ValueError: If nothing says what the model takes.
    """
    if pixels is None and rescales(model):
        return (lambda images: images), "of 0 to 255, which it scales itself"
    if pixels == "0..255":
        return (lambda images: images), "of 0 to 255"
    if pixels == "0..1":
        return keras.layers.Rescaling(1 / 255), "of 0 to 1"
    preprocess = keras.applications.imagenet_utils.preprocess_input
    if pixels is not None:
        return functools.partial(preprocess, mode=_MODES[pixels]), f"as {pixels}"
    converter = _converter(model)
    if converter is not None:
        scale = 1.0 if converter.scale is None else converter.scale
        offset = 0.0 if converter.offset is None else converter.offset
        return keras.layers.Rescaling(scale, offset), "as its preprocessor makes them"
    known = _preprocess_input(model.name)
    if known is None:
        raise ValueError(
            f"The model {model.name!r} does not scale pixels itself, has no preprocessor, and its "
            "name is of no network whose preprocessing is known: say what it was trained on by "
            f"pixels={' or pixels='.join(PIXELS)}."
        )
    return known, f"as {known.__module__.removeprefix('keras.src.')}.preprocess_input makes them"


def resizing(model, size):
    """The layer that resizes images to `size`: as the preprocessor of keras-hub, or plainly."""
    converter = _converter(model)
    config = converter.resizing.get_config() if converter is not None else {}
    config |= {"height": size[0], "width": size[1], "name": "resize"}
    return keras.layers.Resizing.from_config(config)


def without_head(model):
    """The part of an image model that computes features; it shares the weights.

    A last layer that classifies is left out: a dense one, or a convolution of one pixel, behind
    which are no weights. Feature maps are averaged over height and width, tokens too unless there
    is a class token.

    Args:
        model: A model that `image_shape` accepts.

    Returns:
        A functional `keras.Model` to features `[batch, dimensions]`, and the name of the layer that
        was left out, None if the model does not classify.

    Raises:
        ValueError: If its outputs are neither vectors nor feature maps.
    """
    inputs = model.inputs[0]
    features, head = _before_head(model)
    if head is None and not _is_of_keras(model):
        inputs = keras.Input(inputs.shape[1:], dtype=inputs.dtype)
        features = model(inputs)
    if len(features.shape) == 4:
        features = keras.layers.GlobalAveragePooling2D(name="pool")(features)
    elif len(features.shape) == 3 and getattr(model, "use_class_token", False):
        features = features[:, 0]
    elif len(features.shape) == 3:
        features = keras.layers.GlobalAveragePooling1D(name="pool")(features)
    if len(features.shape) != 2 or features.shape[1] is None:
        raise ValueError(
            "The features of a model must be of shape [batch, dimensions], [batch, tokens, "
            "dimensions] or [batch, height, width, channels]. Received: "
            f"{model.name!r} with {features.shape}. End it with a pooling layer."
        )
    return keras.Model(inputs, features, name=model.name), head


def without_batch_statistics(model, batch_norm):
    """A model whose batch normalization is frozen or replaced.

    Args:
        model: A Functional or Sequential `keras.Model`.
        batch_norm: "freeze", which uses the statistics of the pre-training for each example alone;
            or "replace", by `tfdpx.layers.replace_batch_norm`.

    Returns:
        The `keras.Model`.
    """
    if batch_norm == "replace":
        return replace_batch_norm(model)
    for layer in _batch_norms(model):
        layer.trainable = False
    return _remembering(model)


def _remembering(model):
    """The same layers, in models that remember when they are saved which layers were frozen.

    The backbones of keras_cv and keras-hub do not, but some have layers that cannot be loaded
    without them: those without batch normalization stay as they are.
    """
    inside = hasattr(model, "inputs") and not isinstance(model, keras.Sequential)
    if not inside or not _batch_norms(model):
        return model
    return keras.models.clone_model(
        keras.Model(model.input, model.output, name=model.name), clone_function=_remembering
    )


def _batch_norms(model):
    layers = layer_internals.flatten_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def _is_of_keras(model):
    return type(model).__module__.startswith("keras.")


def _converter(model):
    """What a classifier of keras-hub prepares images by, None if it does not say."""
    return getattr(getattr(model, "preprocessor", None), "image_converter", None)


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


def _before_head(model):
    """The symbolic features of a model, and the name of its last layer if that classifies."""
    output = tensor = model.outputs[0]
    while True:
        layer, inputs = layer_internals.made_by(tensor)
        if len(inputs) != 1:
            return output, None
        if isinstance(layer, keras.Model):
            features, head = _before_head(layer)
            if head is None:
                return output, None
            return keras.Model(layer.inputs[0], features, name=layer.name)(inputs[0]), head
        if getattr(layer, "weights", None):
            break
        tensor = inputs[0]
    shape = tuple(inputs[0].shape)
    dense = isinstance(layer, keras.layers.Dense) and len(shape) == 2
    pixel = isinstance(layer, keras.layers.Conv2D) and shape[1:3] == layer.kernel_size == (1, 1)
    if len(output.shape) == 2 and (dense or pixel):
        return inputs[0], layer.name
    return output, None
