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
from tfdpx.layers.private_model import batch_norms, replace_batch_norm


def backbone(
    model: str | keras.Model,
    image_size: int | tuple[int, int] | None = None,
    *,
    input_shape: Any = (None, None, 3),
    weights: str | None = "imagenet",
    batch_norm: str = "freeze",
    pixels: str | None = None,
) -> keras.Model:
    """Builds a model from images to features, of any Keras image network.

    Resizing, the preprocessing that the network was trained with and pooling are inside. Freeze it
    and add a dense layer to train that alone, or choose by `tfdpx.layers.trainable`.

    Trainable batch normalization mixes the examples of a batch and is refused by private training.
    Frozen, it applies the statistics of its pre-training to every example alone: safe, but no
    normalization at all in a network without trained weights.

    Args:
        model: Name of a function of `keras.applications`, such as `"ResNet50"`; or a Functional or
            Sequential `keras.Model` of images, with or without classifier, among them backbones
            and classifiers of keras_cv and keras-hub. It shares its weights with the result. A
            classifier of keras-hub brings its preprocessing and its pooling along. Tokens are
            averaged, or the class token taken where `model.use_class_token` says that there is one.
        image_size: Int or `(height, width)`, what images are resized to. None: what the network
            takes, or as they are if it takes any.
        input_shape: `(height, width, channels)` of the images; None for any height and width. Gray
            images become coloured.
        weights: Only for a name: `"imagenet"`, which keras.applications downloads; the path to
            weights of the network without classifier, as `save_weights` writes them; None for
            random ones. ImageNet counts as public. A file without a ledger leaves
            `optimizer.ledger.is_complete` False, until `tfdpx.checks.mark_public(model)` declares
            that no private data are in it.
        batch_norm: What becomes of `keras.layers.BatchNormalization`: `"freeze"`, also in `model`
            itself; or `"replace"`, by `tfdpx.layers.replace_batch_norm`, which copies the weights
            and drops the moving statistics, so that the network has to be trained further.
        pixels: What the network takes: `"0..255"`, `"0..1"`, `"-1..1"`, `"imagenet"` or `"caffe"`.
            None finds out: 0..255 for a network that scales pixels itself, else what its
            keras-hub preprocessor or its `preprocess_input` in keras.applications does.

    Returns:
        A functional `keras.Model` from `[batch, height, width, channels]` images with values 0 to
        255, of whatever dtype, to `[batch, dimensions]` features. Its layer of the name of the
        network is the network.

    Raises:
        ValueError: If there is no network of that name; if the weights do not fit; if the model
            takes no images, or not of that size, or its pixels are not known; if another argument
            is not one of the above.

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
    fits = isinstance(size, (tuple, list)) and len(size) == 2
    fits = size is None or (fits and all(is_integer(length, 1) for length in size))
    require(fits, "image_size", image_size, "be a positive integer, a pair of them, or None")
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
    return keras.Model(images, network(prepare(x)), name=f"{network.name}_backbone")


def _application(name, shape, weights):
    """The network of keras.applications called `name`, without classifier."""
    known = dict(inspect.getmembers(keras.applications, inspect.isfunction))
    known = {name: make for name, make in known.items() if name[0].isupper()}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        raise ValueError(
            f"Argument `model` must be a keras.Model or one of {list(known)}. Received: "
            f"model={name!r}." + (f" Did you mean {close[0]!r}?" if close else "")
        )
    is_valid = weights in (None, "imagenet") or os.path.isfile(weights)
    must = "be 'imagenet', None or the path to a file of weights"
    hint = " Write one by save_weights of a network that has include_top=False."
    require(is_valid, "weights", weights, must, hint)
    public = weights if weights == "imagenet" else None
    network = known[name](include_top=False, weights=public, input_shape=shape)
    if public:
        account.mark_known(network.variables)
    elif weights is not None:
        _load(network, weights, name)
    return keras.Model(network.inputs[0], network.outputs[0], name=name)


def _load(network, weights, name):
    """Loads the file `weights`, or says that it is for another network than `name`."""
    # Keras leaves weights that the file does not have as they are, at most with a warning.
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
            f"Argument `weights` must be a file that `save_weights` or `save` wrote of {name!r} "
            f"without classifier, which has {len(network.weights)} weights. Received: "
            f"weights={str(weights)!r}. Loading it says: {error}"
        ) from error


def zero_shot_head(
    text_encoder: Callable[[Any], Any],
    class_names: Sequence[str],
    scale: float = 100.0,
    template: str = "{}",
    preprocessor: Callable[[list[str]], Any] | None = None,
) -> np.ndarray:
    """The kernel whose columns are the encoded names of the classes, at norm `scale`.

    On image features at norm one, from an encoder that was trained together with the text encoder
    (CLIP), this is a classifier that has seen no image of its task. The names are public, and so
    are the weights: `heads.AdaMix(initial_weights=..., l2_norm_clip=1.0)` starts from them and
    needs no public image.

    Args:
        text_encoder: A `keras.Model`, layer or other function from texts to embeddings `[n, d]`.
        class_names: Sequence of different strings, one for each class, in the order of the labels.
        scale: Float > 0, the norm of each column.
        template: String with `{}` in place of the name, such as "a photo of a {}.".
        preprocessor: Optional function of a list of strings to what `text_encoder` takes, such as a
            tokenizer. By default that is a tensor of strings `[n]`.

    Returns:
        float32 array `[d, num_classes]`.

    Raises:
        ValueError: If an argument does not fit, or the encoder gives no finite embeddings `[n, d]`,
            or one of zeros.

    References:
        - [Golatkar et al., 2022](https://arxiv.org/abs/2203.11481), section 3.3.
        - [Radford et al., 2021](https://arxiv.org/abs/2103.00020), for such classifiers.
    """
    names = list(class_names) if not isinstance(class_names, str) else None
    fits = names and all(isinstance(name, str) and name for name in names)
    must = "be a sequence of strings that are not empty and all different"
    fits = fits and len(names) >= 2 and len(set(names)) == len(names)
    require(fits, "class_names", class_names, must)
    require(is_number(scale) and 0 < scale < np.inf, "scale", scale, "be a positive, finite number")
    require("{}" in template, "template", template, "hold {}, in place of the name")
    texts = [template.replace("{}", name) for name in names]
    inputs = keras.ops.convert_to_tensor(texts) if preprocessor is None else preprocessor(texts)
    encoded = text_encoder(inputs)
    shape = tuple(getattr(encoded, "shape", ()))
    if len(shape) != 2 or shape[0] != len(names):
        raise ValueError(
            f"Argument `text_encoder` must give embeddings [{len(names)}, d] of as many texts. "
            f"Received: shape {shape}. Take the pooled output of an encoder."
        )
    rows = np.asarray(keras.ops.convert_to_numpy(encoded), "float64")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    invalid = [name for name, n in zip(names, norms[:, 0], strict=True) if not 0 < n < np.inf]
    must = f"give finite embeddings other than zero, also for {invalid[:5]}"
    require(not invalid, "text_encoder", text_encoder, must)
    return (scale * rows / norms).T.astype("float32")


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
    for layer in batch_norms(model):
        layer.trainable = False
    return _remembering(model)


def _remembering(model):
    """The same layers, in models that remember when they are saved which layers were frozen.

    The backbones of keras_cv and keras-hub do not, but some have layers that cannot be loaded
    without them: those without batch normalization stay as they are.
    """
    inside = hasattr(model, "inputs") and not isinstance(model, keras.Sequential)
    if not inside or not batch_norms(model):
        return model
    return keras.models.clone_model(
        keras.Model(model.input, model.output, name=model.name), clone_function=_remembering
    )


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
