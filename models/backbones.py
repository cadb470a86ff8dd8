"""Pretrained networks by name, fit for private fine-tuning."""

from __future__ import annotations

import os
from typing import Any

import keras

from tfdpx._arguments import check_choice, check_image_shape, check_positive_integer
from tfdpx.models.backbone_bodies import body
from tfdpx.models.head import pooled_logits
from tfdpx.models.transfer import without_batch_statistics


def backbone(
    name: str,
    weights: str | None = None,
    input_shape: Any = (224, 224, 3),
    num_classes: int | None = None,
    trainable: str = "all",
    batch_norm: str | None = None,
) -> keras.Model:
    """Builds a network of keras.applications or keras_cv that can be trained privately.

    The network's own preprocessing comes first, global average pooling and, if there are classes,
    a new dense layer last.

    Trainable batch normalization mixes the examples of a batch and is refused. Frozen, it applies
    the statistics of its pre-training to every example alone, so that it is safe; it has to be
    chosen by name here, since a network without weights would then have no normalization at all.

    Args:
        name: Name of a function of `keras.applications`, such as `"ResNet50"`, `"VGG16"` or
            `"ConvNeXtTiny"`; or of a preset of keras_cv: `"resnet18"`, `"resnet18_v2"` (likewise
            34, 50, 101 and 152) and `"mit_b0"` to `"mit_b5"`.
        weights: Path to the weights of the network without classifier, as `save_weights` of
            `keras.applications.ResNet50(include_top=False)` writes them: `.weights.h5`, `.keras`,
            or the `notop.h5` files of keras.applications. None draws random weights. Nothing is
            downloaded. A file without a ledger leaves `optimizer.ledger.is_complete` False, until
            `tfdpx.checks.public(model)` says that no private data are in it.
        input_shape: `(height, width, channels)` of one image.
        num_classes: Positive integer, number of logits; None for pooled features.
        trainable: `"all"`, or `"last"` for the dense layer alone.
        batch_norm: What becomes of `keras.layers.BatchNormalization`: `"freeze"`, `"replace"` (by
            `tfdpx.layers.replace_batch_norm`, after `weights` are loaded: the moving statistics are
            dropped, so that the network has to be trained further), or None, an error where one
            would be trained.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` with values 0 to
        255, of whatever dtype, to `[batch, num_classes]` logits without softmax, or
        `[batch, channels]` features. Its layer `name` is the network.

    Raises:
        ValueError: If there is no network `name`; if there is no file `weights`, or it does not fit
            the network; if batch normalization would be trained; if another argument is not one of
            the above.
    """
    check_image_shape(input_shape)
    if num_classes is not None:
        check_positive_integer("num_classes", num_classes)
    check_choice("trainable", trainable, ("all", "last"))
    check_choice("batch_norm", batch_norm, (None, "freeze", "replace"))
    if weights is not None and not os.path.isfile(weights):
        raise ValueError(
            "Argument `weights` must be None or the path to a file of weights. Received: "
            f"weights={weights!r}, which is no file. Where there is a network, write one with "
            f'keras.applications.ResNet50(include_top=False).save_weights("ResNet50.weights.h5").'
        )
    preprocess, network = body(name, tuple(input_shape))
    if weights is not None:
        _load(network, weights, name)
    # The backbones of keras_cv are models of their own kind, which forget when they are saved that
    # layers were frozen.
    network = keras.Model(network.input, network.output, name=name)
    network, norms = without_batch_statistics(network, batch_norm)
    if trainable == "last":
        network.trainable = False
    elif any(layer.trainable for layer in norms):
        raise ValueError(
            f"The backbone {name!r} holds {len(norms)} layers of batch normalization, which mix "
            "the examples of a batch when they are trained. Received: trainable='all', "
            f"batch_norm={batch_norm!r}. Use batch_norm='freeze' with pretrained weights, "
            "batch_norm='replace' for GroupNorm in their place, or trainable='last'."
        )
    inputs = keras.Input(input_shape, name="image")
    x = network(preprocess(inputs))
    if num_classes is None:
        outputs = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    else:
        outputs = pooled_logits(x, num_classes)
    return keras.Model(inputs, outputs, name=f"{name}_backbone")


def _load(network, weights, name):
    """Loads the file `weights`, or says that it is for another network than `name`."""
    # Keras leaves weights that the file does not have as they are, at most with a warning.
    for weight in _floating(network):
        weight.assign(keras.ops.full(weight.shape, float("nan"), weight.dtype))
    try:
        network.load_weights(weights)
        missing = [w.path for w in _floating(network) if keras.ops.all(keras.ops.isnan(w))]
        if missing:
            raise ValueError(f"{len(missing)} weights are not in it, such as {missing[0]}.")
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"The file of argument `weights` does not fit the backbone {name!r} of "
            f"{len(network.weights)} weights, without classifier. Received: weights={weights!r}. "
            f"Loading it says: {error}"
        ) from error


def _floating(network):
    return [weight for weight in network.weights if "float" in weight.dtype]
