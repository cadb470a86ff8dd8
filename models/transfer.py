"""Pretrained networks: backbones for private fine-tuning, and heads from the names of classes."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import sys
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdpx import account
from tfdpx._arguments import check_choice, check_image_shape, is_integer, is_number, require
from tfdpx._keras import layer_internals
from tfdpx.layers import ChannelWhitening
from tfdpx.layers.private_model import batch_norms, replace_batch_norm
from tfdpx.synthetic import DeadLeaves

# Generated images for the whitening of features.
_WHITENING_IMAGES = 1500


def backbone(
    model: str | keras.Model,
    image_size: int | tuple[int, int] | None = None,
    *,
    input_shape: Any = (None, None, 3),
    weights: str | None = "imagenet",
    batch_norm: str = "freeze",
    pixels: str | None = None,
    whiten: Any = None,
) -> keras.Model:
    """Builds a model from images to features, from any Keras image network.

    It includes resizing, the preprocessing that the network was trained with, and pooling. Freeze
    it and train only a new dense layer, or choose weights by `tfdpx.layers.trainable`.

    Trainable batch normalization mixes the examples of a batch and is refused by private training.
    Frozen, it applies the statistics of its pre-training to every example separately. That is safe,
    but it does not normalize at all in a network without trained weights.

    Args:
        model: Name of a function of `keras.applications`, for example `"ResNet50"`; or a Functional
            or Sequential `keras.Model` of images, with or without classifier, for example backbones
            and classifiers of keras_cv and keras-hub. It shares its weights with the result. A
            classifier of keras-hub keeps its preprocessing and its pooling. Tokens are averaged, or
            the class token is used if `model.use_class_token` is set.
        image_size: Int or `(height, width)`, the size that images are resized to. Defaults to the
            network's size; if it takes any size, images are not resized.
        input_shape: `(height, width, channels)` of the images; None for any height and width. Gray
            images become coloured.
        weights: Only for a name: `"imagenet"`, which keras.applications downloads; the path to
            weights of the network without classifier, written by `save_weights`; None for random
            ones. ImageNet counts as public. A file without a ledger leaves
            `optimizer.ledger.is_complete` False, until `tfdpx.checks.mark_public(model)` declares
            that it contains no private data.
        batch_norm: The treatment of `keras.layers.BatchNormalization`: `"freeze"`, also in `model`
            itself; or `"replace"`, by `tfdpx.layers.replace_batch_norm`, which copies the weights
            and drops the moving statistics; the network has to be trained further.
        pixels: The network's range of pixels: `"0..255"`, `"0..1"`, `"-1..1"`, `"imagenet"` or
            `"caffe"`. None detects it: 0..255 for a network that scales pixels itself, otherwise
            the range of its keras-hub preprocessor or `preprocess_input` in keras.applications.
        whiten: `"synthetic"`, or a generator of `tfdpx.synthetic`, whitens the features with the
            statistics of generated images by `tfdpx.layers.ChannelWhitening`. It costs no privacy,
            and helps a linear classifier. The size of `input_shape` must then be known.

    Returns:
        A functional `keras.Model` from `[batch, height, width, channels]` images with values 0 to
        255, of any dtype, to `[batch, dimensions]` features. Its layer with the network's name is
        the network.

    Raises:
        ValueError: If there is no network of that name; if the weights do not match; if the model
            takes no images, or not of that size, or its pixels are not known; if another argument
            is invalid.

    Example:
    >>> import keras, tfdpx
    >>> features = tfdpx.models.backbone("MobileNetV2", 96, weights=None)
    >>> features.trainable = False
    >>> keras.Sequential([features, keras.layers.Dense(10)]).output_shape
    (None, 10)
    """
    check_image_shape(input_shape)
    check_choice("batch_norm", batch_norm, ("freeze", "replace"))
    check_choice("pixels", pixels, (None, *PIXELS))
    size: Any = (image_size, image_size) if is_integer(image_size, 1) else image_size
    is_valid = isinstance(size, (tuple, list)) and len(size) == 2
    is_valid = size is None or (is_valid and all(is_integer(length, 1) for length in size))
    require(is_valid, "image_size", image_size, "be a positive integer, a pair of them, or None")
    if isinstance(model, str):
        model = _application(model, (*(size or input_shape[:2]), 3), weights)
    must = "be a name of keras.applications or a keras.Model"
    require(isinstance(model, keras.Model), "model", model, must)
    *takes, channels = image_shape(model)
    if None not in takes:
        require(size in (None, tuple(takes)), "image_size", image_size, f"be {takes} or None")
        size = tuple(takes)
    must = f"end in {channels} channels"
    require(input_shape[-1] in (1, channels), "input_shape", input_shape, must)
    prepare, _ = preparation(model, pixels)
    features, _ = without_head(model)
    network = without_batch_statistics(features, batch_norm)
    images = x = keras.Input(input_shape, name="image")
    if input_shape[-1] < channels:
        x = keras.layers.Concatenate(name="coloured")([x] * channels)
    if size not in (None, tuple(input_shape[:2])):
        x = resizing(model, size)(x)
    model = keras.Model(images, network(prepare(x)), name=f"{network.name}_backbone")
    return model if whiten is None else whitened(model, 255.0, whiten)


def whitened(model: keras.Model, largest: float, generator: Any = "synthetic") -> keras.Model:
    """Adds a whitening of the features, with the statistics of generated images, to a model.

    Args:
        model: `keras.Model` from images `[batch, height, width, channels]`, all known, to features.
        largest: Float, the value of a white pixel.
        generator: A generator of `tfdpx.synthetic`, or "synthetic" for `DeadLeaves`.
    """
    shape = model.input_shape[1:]
    check_image_shape(shape, with_size=True)
    if isinstance(generator, str):
        check_choice("whiten", generator, ("synthetic",))
        generator = DeadLeaves(shape[:2], shape[2])
    images = keras.Input(shape)
    features = keras.Model(images, model(keras.layers.Rescaling(largest)(images)))
    layer = ChannelWhitening(name="whitening")
    layer.adapt(generator, _WHITENING_IMAGES, features)
    return keras.Model(model.inputs, layer(model.output), name=model.name)


def _application(name, shape, weights):
    """Returns the network of keras.applications called `name`, without classifier."""
    constructors = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    constructors = {name: make for name, make in constructors.items() if name[0].isupper()}
    if name not in constructors:
        close = difflib.get_close_matches(name, constructors, n=1, cutoff=0.6)
        raise ValueError(
            f"Argument `model` must be a keras.Model or one of {list(constructors)}. Received: "
            f"model={name!r}." + (f" Did you mean {close[0]!r}?" if close else "")
        )
    is_valid = weights in (None, "imagenet") or os.path.isfile(weights)
    must = "be 'imagenet', None or the path to a file of weights"
    hint = " Write one by save_weights of a network that has include_top=False."
    require(is_valid, "weights", weights, must, hint)
    public = weights if weights == "imagenet" else None
    network = constructors[name](include_top=False, weights=public, input_shape=shape)
    if public:
        account.mark_known(network.variables)
    elif weights is not None:
        _load(network, weights, name)
    return keras.Model(network.inputs[0], network.outputs[0], name=name)


def _load(network, weights, name):
    """Loads the file `weights`, or raises an error if it is for another network than `name`."""
    # Keras keeps weights that are missing in the file, at most with a warning.
    floating = [weight for weight in network.weights if "float" in weight.dtype]
    for weight in floating:
        weight.assign(keras.ops.full(weight.shape, float("nan"), weight.dtype))
    try:
        network.load_weights(weights)
        missing = [w.path for w in floating if keras.ops.all(keras.ops.isnan(w))]
        if missing:
            raise ValueError(f"{len(missing)} weights are not in it, such as {missing[0]}.")
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Argument `weights` must be a file written by `save_weights` or `save` of {name!r} "
            f"without classifier, which has {len(network.weights)} weights. Received: "
            f"weights={str(weights)!r}. The error of loading it: {error}"
        ) from error


def zero_shot_head(
    text_encoder: Callable[[Any], Any],
    class_names: Sequence[str],
    scale: float = 100.0,
    template: str = "{}",
    preprocessor: Callable[[list[str]], Any] | None = None,
) -> np.ndarray:
    """Returns a kernel with the encoded names of the classes as columns, at norm `scale`.

    On image features at norm one, from an encoder that was trained together with the text encoder
    (CLIP), this is a classifier that has seen no image of its task. The weights are public because
    the names are: `heads.AdaMix(initial_weights=..., l2_norm_clip=1.0)` starts from them and needs
    no public image.

    Args:
        text_encoder: A `keras.Model`, layer or other function from texts to embeddings `[n, d]`.
        class_names: Sequence of different strings, one for each class, in the order of the labels.
        scale: Float > 0, the norm of each column.
        template: String with `{}` in place of the name, for example "a photo of a {}.".
        preprocessor: Optional function, for example a tokenizer, from a list of strings to the
            input of `text_encoder`. By default that is a tensor of strings `[n]`.

    Returns:
        float32 array `[d, num_classes]`.

    Raises:
        ValueError: If an argument is invalid, or the encoder returns no finite embeddings `[n, d]`,
            or one of zeros.

    References:
        - [Golatkar et al., 2022](https://arxiv.org/abs/2203.11481), section 3.3.
        - [Radford et al., 2021](https://arxiv.org/abs/2103.00020), for such classifiers.
    """
    names = list(class_names) if not isinstance(class_names, str) else None
    is_valid = names and all(isinstance(name, str) and name for name in names)
    must = "be a sequence of strings that are not empty and all different"
    is_valid = is_valid and len(names) >= 2 and len(set(names)) == len(names)
    require(is_valid, "class_names", class_names, must)
    require(is_number(scale) and 0 < scale < np.inf, "scale", scale, "be a positive, finite number")
    require("{}" in template, "template", template, "hold {}, in place of the name")
    texts = [template.replace("{}", name) for name in names]
    inputs = keras.ops.convert_to_tensor(texts) if preprocessor is None else preprocessor(texts)
    encoded = text_encoder(inputs)
    shape = tuple(getattr(encoded, "shape", ()))
    if len(shape) != 2 or shape[0] != len(names):
        raise ValueError(
            f"Argument `text_encoder` must return embeddings [{len(names)}, d] of as many texts. "
            f"Received: shape {shape}. Use the pooled output of an encoder."
        )
    rows = np.asarray(keras.ops.convert_to_numpy(encoded), "float64")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    invalid = [name for name, n in zip(names, norms[:, 0], strict=True) if not 0 < n < np.inf]
    must = f"return finite embeddings other than zero, also for {invalid[:5]}"
    require(not invalid, "text_encoder", text_encoder, must)
    return (scale * rows / norms).T.astype("float32")


# Names of ranges of pixels, and their modes in keras.applications.
_MODES = {"-1..1": "tf", "imagenet": "torch", "caffe": "caffe"}
PIXELS = ("0..255", "0..1", *_MODES)
_RESCALING = (keras.layers.Rescaling, keras.layers.Normalization)
_ARITHMETIC = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide")  # Classes of keras.ops.


def image_shape(model):
    """Returns `(height, width, channels)` of the images of a model; None for any size.

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
    """Returns whether a model scales the pixels itself, before its first layer with weights."""
    for operation in keras.Model(model.inputs, model.outputs).operations:
        if isinstance(operation, keras.Model) and rescales(operation):
            return True
        if isinstance(operation, _RESCALING) or type(operation).__name__ in _ARITHMETIC:
            return True
        if getattr(operation, "weights", None):
            return False
    return False


def preparation(model, pixels=None):
    """Returns the preprocessing of images with values 0 to 255 before a model.

    Args:
        model: A model that `image_shape` accepts.
        pixels: One of `PIXELS`; None detects it.

    Returns:
        A function of symbolic images, and a description of its values.

    Raises:
        ValueError: If the range cannot be detected.
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
    preprocess_input = _preprocess_input(model.name)
    if preprocess_input is None:
        raise ValueError(
            f"The model {model.name!r} does not scale pixels itself, has no preprocessor, and no "
            "network with known preprocessing has its name. Pass the range that it was trained on: "
            f"pixels={' or pixels='.join(PIXELS)}."
        )
    return (
        preprocess_input,
        f"as {preprocess_input.__module__.removeprefix('keras.src.')}.preprocess_input makes them",
    )


def resizing(model, size):
    """Returns the layer that resizes images to `size`, like a preprocessor of keras-hub if any."""
    converter = _converter(model)
    config = converter.resizing.get_config() if converter is not None else {}
    config |= {"height": size[0], "width": size[1], "name": "resize"}
    return keras.layers.Resizing.from_config(config)


def without_head(model):
    """Returns the part of an image model that computes features; it shares the weights.

    A last layer that classifies is left out: a dense one, or a convolution of one pixel that no
    weights follow. Feature maps are averaged over height and width, and so are tokens unless there
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
    if head is None and not type(model).__module__.startswith("keras."):
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
    """Returns a model with frozen or replaced batch normalization.

    Args:
        model: A Functional or Sequential `keras.Model`.
        batch_norm: "freeze", which uses the statistics of the pre-training for each example;
            or "replace", by `tfdpx.layers.replace_batch_norm`.

    Returns:
        The `keras.Model`.
    """
    if batch_norm == "replace":
        return replace_batch_norm(model)
    for layer in batch_norms(model):
        layer.trainable = False
    return _remembering(model)


def _remembering(model):
    """Returns the same layers, in models that store which layers were frozen when they are saved.

    The backbones of keras_cv and keras-hub do not store it, but some have layers that cannot be
    loaded without them, so those without batch normalization stay the same.
    """
    inside = hasattr(model, "inputs") and not isinstance(model, keras.Sequential)
    if not inside or not batch_norms(model):
        return model
    return keras.models.clone_model(
        keras.Model(model.input, model.output, name=model.name), clone_function=_remembering
    )


def _converter(model):
    """Returns the image converter of a keras-hub classifier, None if it has none."""
    return getattr(getattr(model, "preprocessor", None), "image_converter", None)


def _preprocess_input(name):
    """Returns the `preprocess_input` of this network of keras.applications, None if unknown."""
    plain = name.lower().replace("_", "").replace("-", "")
    members = inspect.getmembers(keras.applications, inspect.isfunction)
    names = [other for other, _ in members if plain.startswith(other.lower())]
    if not names:
        return None
    constructor = getattr(keras.applications, max(names, key=len))
    preprocess_input = sys.modules[constructor.__module__].preprocess_input
    sample = np.arange(12.0).reshape(1, 2, 2, 3)
    # It does nothing for networks with a scaling layer, and this one has no such layer.
    return None if np.array_equal(preprocess_input(sample.copy()), sample) else preprocess_input


def _before_head(model):
    """Returns the symbolic features of a model, and the name of its last layer if it classifies."""
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
