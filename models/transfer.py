"""Parts of any trained Keras image model: what it takes, its features, its batch normalization."""

import keras

from tfdpx._keras import layer_internals
from tfdpx.layers import replace_batch_norm

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


def without_head(model):
    """The part of an image model that computes features; it shares the weights.

    A last layer that classifies is left out: a dense one, or a convolution of one pixel, behind
    which are no weights. Feature maps are averaged over height and width.

    Args:
        model: A model that `image_shape` accepts.

    Returns:
        A functional `keras.Model` to features `[batch, dimensions]`, and the name of the layer that
        was left out, None if the model does not classify.

    Raises:
        ValueError: If its outputs are neither vectors nor feature maps.
    """
    features, head = _before_head(model)
    if len(features.shape) == 4:
        features = keras.layers.GlobalAveragePooling2D(name="pool")(features)
    if len(features.shape) != 2 or features.shape[1] is None:
        raise ValueError(
            "The features of a model must be of shape [batch, dimensions] or [batch, height, "
            f"width, channels]. Received: {model.name!r} with {features.shape}. End it with a "
            "pooling layer."
        )
    return keras.Model(model.inputs[0], features, name=model.name), head


def without_batch_statistics(model, batch_norm):
    """A model whose batch normalization is frozen or replaced.

    Args:
        model: A Functional or Sequential `keras.Model`.
        batch_norm: "freeze", which uses the statistics of the pre-training for each example alone;
            "replace", by `tfdpx.layers.replace_batch_norm`; or None for neither.

    Returns:
        The `keras.Model`, and the list of its batch normalization layers.
    """
    if batch_norm == "replace":
        model = replace_batch_norm(model)
    norms = [
        layer
        for layer in layer_internals.flatten_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    if batch_norm == "freeze":
        for layer in norms:
            layer.trainable = False
    return model, norms


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
