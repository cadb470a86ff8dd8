"""Pre-trained networks: backbones for private fine-tuning, and classifiers from class names."""

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

# The number of generated images for the whitening of features.
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
    """Builds a model that computes features of images, from any image network of Keras.

    The model includes resizing, the preprocessing that the network was trained with, and pooling.
    Either freeze it and train only a new dense layer, or choose the weights to train by
    `tfdpx.layers.trainable`.

    Trainable batch normalization mixes the examples of a batch, so private training refuses it.
    Frozen batch normalization is safe: it applies the statistics of its pre-training to each
    example separately. In a network without trained weights, frozen batch normalization does not
    normalize at all.

    Args:
        model: String, the name of a function of `keras.applications`, for example `"ResNet50"`; or
            a Functional or Sequential `keras.Model` of images, for example a backbone or classifier
            of keras_cv or keras-hub. The result shares the weights of such a model. If the model
            ends in a classifying layer, this layer is left out; the preprocessing and the pooling
            of a keras-hub classifier are still used. Tokens are averaged, unless
            `model.use_class_token` is True; then the features are the class token.
        image_size: Int or `(height, width)`, to which images are resized. Defaults to the size that
            the network was built for. If the network takes any size, images are not resized by
            default.
        input_shape: `(height, width, channels)` of the images; height and width may be None. Gray
            images are repeated for all channels of the network.
        weights: String or None, only if `model` is a string. `"imagenet"` downloads the weights of
            keras.applications, which count as public. None gives random weights. A path loads a
            file that was saved by `save_weights` of the network without its classifier. If the file
            has no ledger (a record of its privacy loss), `optimizer.ledger.is_complete` is False,
            until you declare by `tfdpx.checks.mark_public(model)` that the weights contain no
            private data.
        batch_norm: `"freeze"` freezes each `keras.layers.BatchNormalization`, also in the model
            that you pass as `model`. `"replace"` replaces it by `tfdpx.layers.replace_batch_norm`;
            the moving statistics are then lost, so the network must be trained further.
        pixels: The range of pixels that the network expects: `"0..255"`, `"0..1"`, `"-1..1"`,
            `"imagenet"` or `"caffe"`. With None the range is detected: it is 0..255 if the network
            scales pixels itself; otherwise the preprocessor of keras-hub, or `preprocess_input`
            in keras.applications, determines it.
        whiten: `"synthetic"` or a generator of `tfdpx.synthetic`, to whiten the features with
            statistics of generated images (`tfdpx.layers.ChannelWhitening`). This costs no privacy
            and helps a linear classifier. Height and width in `input_shape` must then be fixed.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` of any dtype, with
        values from 0 to 255, to features `[batch, dimensions]`. The network itself is one of its
        layers, with the name of the network.

    Raises:
        ValueError: If there is no network with this name, the weights do not match the network, the
            model does not take images of this size, the range of pixels cannot be detected, or
            another argument is invalid.
        OSError: If the weights cannot be downloaded.

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
    """Returns a model with an added last layer that whitens the features.

    The statistics for the whitening are computed from generated images.

    Args:
        model: `keras.Model` from images `[batch, height, width, channels]` of fixed size to
            features.
        largest: Float, the value of a white pixel in the images of `model`.
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
    """Returns a network of keras.applications without its classifier.

    Args:
        name: String, for example "ResNet50".
        shape: `(height, width, channels)` of images.
        weights: As for `backbone`.
    """
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
    try:
        network = constructors[name](include_top=False, weights=public, input_shape=shape)
    except Exception as error:
        if "URL fetch failure" not in str(error):
            raise
        raise OSError(
            f"Cannot download weights='imagenet' of model={name!r}: on a machine with internet, "
            f'run `keras.applications.{name}(weights="imagenet").save("m.keras")`, copy the file, '
            'and pass `model=keras.saving.load_model("m.keras")`.'
        ) from error
    if public:
        account.mark_known(network.variables)
    elif weights is not None:
        _load(network, weights, name)
    return keras.Model(network.inputs[0], network.outputs[0], name=name)


def _load(network, weights, name):
    """Loads the file `weights`. Raises ValueError if it does not belong to the network `name`."""
    # If weights are missing from the file, Keras leaves them unchanged and at most warns. Here
    # missing weights stay NaN.
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
    """Returns the weights of a classifier that is made only from the names of the classes.

    Column j of the weights is the embedding of the name of class j, scaled to the norm `scale`. The
    features must come from an image encoder that was trained together with the text encoder, for
    example CLIP, and must have norm one. The classifier then works without any training images. The
    weights are public, because the names are public.
    `heads.AdaMix(initial_weights=..., l2_norm_clip=1.0)` can start from them and then needs no
    public images.

    Args:
        text_encoder: A `keras.Model`, layer or other function that maps n texts to embeddings
            `[n, d]`.
        class_names: Sequence of different strings, one for each class, in the order of the labels.
        scale: Float > 0, the norm of each column.
        template: String with `{}` in place of the name, for example "a photo of a {}.".
        preprocessor: Optional function, for example a tokenizer, that converts a list of strings to
            the input of `text_encoder`. By default the input is a tensor of strings `[n]`.

    Returns:
        float32 array `[d, num_classes]`, a kernel for a linear layer without bias.

    Raises:
        ValueError: If an argument is invalid, or the encoder does not return finite embeddings
            `[n, d]`, or the embedding of a name is zero.

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


# From the name of a pixel range to the `mode` of `preprocess_input` in keras.applications.
_MODES = {"-1..1": "tf", "imagenet": "torch", "caffe": "caffe"}
PIXELS = ("0..255", "0..1", *_MODES)
_RESCALING = (keras.layers.Rescaling, keras.layers.Normalization)
_ARITHMETIC = ("Add", "Subtract", "Multiply", "Divide", "TrueDivide")  # Classes of keras.ops.


def image_shape(model):
    """Returns `(height, width, channels)` of a model's images; height and width may be None.

    Raises:
        ValueError: If the model is not Functional or Sequential with images as its only input.
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
    """Returns whether a model does arithmetic, such as scaling, before its first weights."""
    for operation in keras.Model(model.inputs, model.outputs).operations:
        if isinstance(operation, keras.Model) and rescales(operation):
            return True
        if isinstance(operation, _RESCALING) or type(operation).__name__ in _ARITHMETIC:
            return True
        if getattr(operation, "weights", None):
            return False
    return False


def preparation(model, pixels=None):
    """Returns the preprocessing that a model needs for images with values 0 to 255.

    Args:
        model: A model that `image_shape` accepts.
        pixels: One of `PIXELS`, the range of pixels that the model expects; None detects it.

    Returns:
        Two values: a function from symbolic images to symbolic images, and a string that describes
        the pixels after this function.

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
    """Returns a layer that resizes images, like the model's keras-hub preprocessor if it has one.

    Args:
        model: A `keras.Model` of images.
        size: `(height, width)` of resized images.
    """
    converter = _converter(model)
    config = converter.resizing.get_config() if converter is not None else {}
    config |= {"height": size[0], "width": size[1], "name": "resize"}
    return keras.layers.Resizing.from_config(config)


def without_head(model):
    """Returns the part of an image model that computes features, with shared weights.

    The last layer with weights is left out if it classifies. A layer counts as a classifier if it
    is dense, or a 1x1 convolution of a single pixel. Feature maps are averaged over height and
    width. Tokens are averaged as well, unless there is a class token.

    Args:
        model: A model that `image_shape` accepts.

    Returns:
        A functional `keras.Model` to features `[batch, dimensions]`, and the name of the layer that
        was left out (None if the model does not classify).

    Raises:
        ValueError: If the outputs of the model are neither vectors, tokens nor feature maps.
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
    """Returns a model in which batch normalization is frozen or replaced.

    Args:
        model: A Functional or Sequential `keras.Model`.
        batch_norm: "freeze", to apply the statistics of the pre-training to each example; or
            "replace", to use `tfdpx.layers.replace_batch_norm`.
    """
    if batch_norm == "replace":
        return replace_batch_norm(model)
    for layer in batch_norms(model):
        layer.trainable = False
    return _remembering(model)


def _remembering(model):
    """Returns a plain functional model with the same layers, to save which layers are frozen.

    If a backbone of keras_cv or keras-hub is saved, the file does not tell which layers are frozen.
    The file of a plain functional model does. A model without batch normalization is returned
    unchanged, because some backbones have layers that cannot be loaded in another model.
    """
    inside = hasattr(model, "inputs") and not isinstance(model, keras.Sequential)
    if not inside or not batch_norms(model):
        return model
    return keras.models.clone_model(
        keras.Model(model.input, model.output, name=model.name), clone_function=_remembering
    )


def _converter(model):
    """Returns the image converter of a keras-hub classifier; None if the model has no converter."""
    return getattr(getattr(model, "preprocessor", None), "image_converter", None)


def _preprocess_input(name):
    """Returns the function `preprocess_input` for a network of keras.applications.

    Args:
        name: String, the name of the network.

    Returns:
        Function of images, or None if no network has this name.
    """
    plain = name.lower().replace("_", "").replace("-", "")
    members = inspect.getmembers(keras.applications, inspect.isfunction)
    names = [other for other, _ in members if plain.startswith(other.lower())]
    if not names:
        return None
    constructor = getattr(keras.applications, max(names, key=len))
    preprocess_input = sys.modules[constructor.__module__].preprocess_input
    sample = np.arange(12.0).reshape(1, 2, 2, 3)
    # Some networks of keras.applications scale pixels in a layer, and their `preprocess_input` does
    # nothing. This model has no such layer, so it is another network with the same name.
    return None if np.array_equal(preprocess_input(sample.copy()), sample) else preprocess_input


def _before_head(model):
    """Returns the features of a model, and the name of the layer that classifies.

    Args:
        model: A Functional or Sequential `keras.Model` with one output.

    Returns:
        Two values: a symbolic tensor, which is the input of the last layer with weights, and the
        name of this layer. If the last layer does not classify, the two values are the output of
        the model and None.
    """
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
