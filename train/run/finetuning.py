"""Starts a run from a trained model, and leaves all layers but the last as they are."""

import pathlib

import keras
import numpy as np

from tfdpx import keras_internals
from tfdpx.run import origins
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import classifiers


def check(settings):
    """Raises UserError unless the trained model that the settings need is there."""
    path = settings.init_from
    if settings.pretrained_on and not path:
        raise UserError(
            f"These settings fine-tune a model trained on {settings.pretrained_on!r}: name its "
            "file with --init_from (tfdpx.train.pretrain writes one). Received: no --init_from."
        )
    if path and not (path.endswith((".keras", ".weights.h5")) and pathlib.Path(path).is_file()):
        found = "of another kind" if pathlib.Path(path).exists() else "missing"
        raise UserError(
            "Flag --init_from must name a file that ends in .keras or .weights.h5. Received: "
            f"--init_from={path}, {found}."
        )


def build(settings, data):
    """The classifier of a run: new, or with the weights of `--init_from`, and what it trains.

    From a `.keras` file of `classify` or `pretrain` come the weights of all layers but the last,
    which starts anew for the classes of this data set, and how grey levels are normalised, which
    those weights expect. From a `.weights.h5` file come the weights of all layers. With
    `trainable="last"` all other layers are frozen: the private step runs them once for each view,
    and differentiates nothing below the last.

    Args:
        settings: A `settings.Settings`.
        data: `loading.ImageData`.

    Returns:
        The `keras.Model`, not compiled.

    Raises:
        UserError: If the file cannot be read or does not fit.
    """
    path = settings.init_from
    source = _read(path) if path and path.endswith(".keras") else None
    centre, deviation = data.centre, data.deviation
    if source is not None:
        centre, deviation = _standardization(source, path)
    model = classifiers.build(
        settings.model,
        data.image_shape,
        data.num_classes,
        centre,
        deviation,
        group_norm=settings.group_norm,
        weight_standardization=settings.weight_standardization,
        relu_first=settings.relu_first,
    )
    if source is not None:
        _copy(source, model, path)
    elif path:
        _load_weights(model, path)
    if settings.trainable == "last":
        freeze_all_but_last(model)
    return model


def last_layer(model):
    """The last layer of a Functional model that has weights, inside of its last part."""
    last = [layer for layer in model.layers if layer.weights][-1]
    return last_layer(last) if isinstance(last, keras.Model) else last


def features(model):
    """The part of a classifier that is before its last layer; it shares the weights.

    Args:
        model: A `keras.Model` of `classifiers.build`.

    Returns:
        A `keras.Model` from uint8 images `[batch, height, width, channels]` to what the last layer
        receives, `[batch, dimensions]`.
    """
    return keras.Model(model.input, _before_last(model)(model.get_layer("normalise").output))


def features_of(path, flag="features"):
    """The feature extractor in a `.keras` file of `classify` or `pretrain`.

    Args:
        path: String.
        flag: The flag that names it, for errors.

    Returns:
        A frozen `keras.Model` from images `[batch, height, width, channels]` with values from 0 to
        1 to what the last layer of the model receives, `[batch, dimensions]`.

    Raises:
        UserError: If the file cannot be read, or neither of the two wrote it.
    """
    model = _read(path, flag)
    centre, deviation = _standardization(model, path, flag)
    body = _before_last(model)
    images = keras.Input(body.input_shape[1:])
    scale, offset = 255 / np.array(deviation), -np.array(centre) / np.array(deviation)
    normalise = keras.layers.Rescaling(scale.tolist(), offset.tolist(), name="normalise")
    found = keras.Model(images, body(normalise(images)))
    found.trainable = False
    return found


def freeze_all_but_last(model):
    """Makes `last_layer(model)` the only one that trains, and returns the layers that no longer do.

    Args:
        model: A Functional `keras.Model`.
    """
    last = last_layer(model)
    frozen = [
        layer
        for layer in keras_internals.flatten_layers(model)
        if layer.trainable and layer is not last and not isinstance(layer, keras.Model)
    ]
    for layer in frozen:
        layer.trainable = False
    return frozen


def _before_last(model):
    body = model.layers[-1]
    return keras.Model(body.inputs, last_layer(body).input, name="body")


def _read(path, flag="init_from"):
    try:
        model = keras.saving.load_model(path, compile=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"Cannot read --{flag}={path}: {error}") from error
    origins.vouch(model)  # `origin` accounts for what the file has seen.
    return model


def _standardization(source, path, flag="init_from"):
    layer = next((layer for layer in source.layers if layer.name == "normalise"), None)
    if layer is None:
        raise UserError(
            f"The model of --{flag}={path} was written by neither tfdpx.train.classify nor "
            "tfdpx.train.pretrain: it has no layer 'normalise'."
            + " Its weights in a .weights.h5 file do, if they fit --model."
            * (flag == "init_from")
        )
    scale, offset = np.array(layer.scale), np.array(layer.offset)
    return (-offset / scale).tolist(), (1 / scale).tolist()


def _copy(source, model, path):
    old, new = source.weights, model.weights
    last = {id(weight) for weight in last_layer(model).weights}
    unfit = len(old) != len(new) or source.name != model.name
    unfit = unfit or any(
        a.shape != b.shape and id(b) not in last for a, b in zip(old, new, strict=True)
    )
    if unfit:
        raise UserError(
            f"The model of --init_from={path} is another than --model={model.name} for images of "
            f"shape {model.input_shape[1:]}: it is {source.name!r} for {source.input_shape[1:]}, "
            f"with {source.count_params()} parameters against {model.count_params()}."
        )
    kinds, expected = (
        [type(layer) for layer in keras_internals.flatten_layers(m)] for m in (source, model)
    )
    if kinds != expected:
        raise UserError(
            f"The model of --init_from={path} has other layers than --model={model.name} here: "
            "give --weight_standardization and --relu_first as it was trained with."
        )
    for a, b in zip(old, new, strict=True):
        if id(b) not in last:
            b.assign(a)
    origins.pass_on(old, new)


def _load_weights(model, path):
    try:
        model.load_weights(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"The weights of --init_from={path} do not fit --model={model.name} with "
            f"{model.output_shape[-1]} classes (a .keras file may have other classes): {error}"
        ) from error
    origins.vouch(model)  # As in `_read`.
