"""From images to the features of a pretrained network, fit for private fine-tuning."""

from __future__ import annotations

import difflib
import inspect
import os
from typing import Any

import keras

from tfdpx import account
from tfdpx._arguments import check_choice, check_image_shape, is_integer, require
from tfdpx.models import transfer


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
    check_choice("pixels", pixels, (None, *transfer.PIXELS))
    size: Any = (image_size, image_size) if is_integer(image_size, 1) else image_size
    fits = isinstance(size, (tuple, list)) and len(size) == 2
    fits = size is None or (fits and all(is_integer(length, 1) for length in size))
    require(fits, "image_size", image_size, "be a positive integer, a pair of them, or None")
    if isinstance(model, str):
        model = _application(model, (*(size or input_shape[:2]), 3), weights)
    elif not isinstance(model, keras.Model):
        require(False, "model", model, "be a name of keras.applications or a keras.Model")
    *takes, channels = transfer.image_shape(model)
    if None not in takes:
        require(size in (None, tuple(takes)), "image_size", image_size, f"be {takes} or None")
        size = tuple(takes)
    require(
        input_shape[-1] in (1, channels), "input_shape", input_shape, f"end in {channels} channels"
    )
    prepare, _ = transfer.preparation(model, pixels)
    features, _ = transfer.without_head(model)
    network = transfer.without_batch_statistics(features, batch_norm)
    images = x = keras.Input(input_shape, name="image")
    if input_shape[-1] < channels:
        x = keras.layers.Concatenate(name="coloured")([x] * channels)
    if size not in (None, tuple(input_shape[:2])):
        x = transfer.resizing(model, size)(x)
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
    if weights not in (None, "imagenet") and not os.path.isfile(weights):
        raise ValueError(
            "Argument `weights` must be 'imagenet', None or the path to a file of weights. "
            f"Received: weights={weights!r}, which is no file. Where there is a network, write one "
            'with keras.applications.ResNet50(include_top=False).save_weights("my.weights.h5").'
        )
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
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"The file of argument `weights` does not fit the backbone {name!r} of "
            f"{len(network.weights)} weights, without classifier. Received: weights={weights!r}. "
            f"Loading it says: {error}"
        ) from error
