"""Starts a run from a trained model, and leaves all layers but the last as they are."""

import dataclasses
import pathlib
import zipfile

import keras
import numpy as np

from tfdpx import account
from tfdpx._keras import layer_internals, lora
from tfdpx.accounting import record as records
from tfdpx.layers.private_model import last_layer, trainable
from tfdpx.train.config.training import AUTO, OF_FILE
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.run import classifiers
from tfdpx.train.run.keras_files import KerasFile


def check(settings):
    """Settings whose `init_from` is a file: of a run folder, the model in it.

    Args:
        settings: A `settings.RunSettings`.

    Raises:
        UserError: If the trained model that the settings need is not there.
    """
    path = settings.init_from
    if settings.pretrained_on and not path:
        raise UserError(
            f"These settings fine-tune a model trained on {settings.pretrained_on!r}: name its "
            "file with --init_from (tfdpx.train.pretrain writes one). Received: no --init_from."
        )
    return dataclasses.replace(settings, init_from=model_file(path)) if path else settings


def model_file(path, flag="init_from", suffixes=(".keras", ".weights.h5")):
    """The file that a flag means: itself, or the model of a run folder.

    Args:
        path: String.
        flag: The flag that names it, for errors.
        suffixes: Tuple of strings, of the files that may be named.

    Raises:
        UserError: If there is none.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        if not (file / records.FILE).exists() or not (file / "model.keras").is_file():
            raise UserError(
                f"The folder --{flag}={path} holds no finished run: {records.FILE} and model.keras."
                " Name a finished run (--resume ends one that was interrupted), or a .keras file."
            )
        file = file / "model.keras"
    if not (file.name.endswith(suffixes) and file.is_file()):
        found = "a file of another kind" if file.exists() else "which does not exist"
        raise UserError(
            f"Flag --{flag} must name a run folder, or a file that ends in "
            f"{' or '.join(suffixes)}. Received: --{flag}={path}, {found}. An .h5 file of a whole "
            "model becomes one by keras.saving.load_model(path).save('model.keras')."
        )
    if file.suffix == ".keras" and not zipfile.is_zipfile(file):
        raise UserError(
            f"Cannot read --{flag}={path}: it is not a model that Keras saved. Save one by "
            "model.save('model.keras')."
        )
    return str(file)


def source(settings):
    """What a run starts from: a trained model as it is, or None if `build` makes `--model`.

    That is a `.keras` file that `classify` and `pretrain` did not write, or any without `--model`.

    Args:
        settings: A `training.Training`.

    Returns:
        The settings, whose `model` is then `OF_FILE`, and a `keras_files.KerasFile` or None.

    Raises:
        UserError: If the file cannot be read, or flags do not fit it.
    """
    path, found = settings.init_from, None
    if path and path.endswith(".keras"):
        model = read(path)
        if settings.model == AUTO or not is_ours(model):
            found = KerasFile(model, path, settings.pixels)
    if found is None and not (settings.pixels or settings.batch_norm):
        return settings, None
    if found is None:
        raise UserError(
            "Flags --pixels and --batch_norm belong to a model of --init_from that is taken as it "
            f"is. Received: --pixels={settings.pixels} --batch_norm={settings.batch_norm}, with "
            f"--model={settings.model} --init_from={path}. Leave them out."
        )
    if settings.precision != "float32":
        raise UserError(
            f"The layers of --init_from={path} keep the precision that they were saved with. "
            f"Received: --precision={settings.precision}. Leave it out."
        )
    return dataclasses.replace(settings, model=OF_FILE), found


def is_ours(model):
    """Whether `classifiers.build` made a model, so that it can be made again."""
    return classifiers.is_name(model.name) and any(x.name == "normalise" for x in model.layers)


def build(settings, data, source=None):
    """The classifier of a run: new, or with the weights of `--init_from`, and what it trains.

    From a `.keras` file of `classify` or `pretrain` come the weights of all layers but the last,
    which starts anew for the classes of this data set, and how grey levels are normalised, which
    those weights expect. From a `.weights.h5` file come the weights of all layers. Then
    `tfdpx.layers.trainable` freezes what `trainable` does not name.

    Args:
        settings: A `settings.RunSettings`.
        data: `images.ImageData`.
        source: The `KerasFile` of `source(settings)`, to which a new last layer is added, or None.

    Returns:
        The `keras.Model`, not compiled.

    Raises:
        UserError: If the file cannot be read or does not fit.
    """
    if source is not None:
        shape, classes = data.image_shape, data.num_classes
        model = source.classifier(shape, classes, settings.trainable, settings.batch_norm)
        return _of_few_weights(model, settings)
    path = settings.init_from
    source = read(path) if path and path.endswith(".keras") else None
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
    return _of_few_weights(model, settings)


def _of_few_weights(model, settings):
    if settings.trainable != "all":
        with checking_flags():
            count = trainable(model, settings.trainable, settings.lora_rank)
        print(
            f"Train {count:,} of {model.count_params():,} weights "
            f"(--trainable={settings.trainable})."
        )
    return model


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
    model = read(path, flag)
    centre, deviation = _standardization(model, path, flag)
    body = _before_last(model)
    images = keras.Input(body.input_shape[1:])
    scale, offset = 255 / np.array(deviation), -np.array(centre) / np.array(deviation)
    normalise = keras.layers.Rescaling(scale.tolist(), offset.tolist(), name="normalise")
    found = keras.Model(images, body(normalise(images)))
    found.trainable = False
    return found


def _before_last(model):
    body = model.layers[-1]
    return keras.Model(body.inputs, last_layer(body).input, name="body")


def read(path, flag="init_from"):
    """The model of a `.keras` file; what it has seen is accounted for by `provenance`."""
    try:
        model = keras.saving.load_model(path, compile=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"Cannot read --{flag}={path}: {error}") from error
    account.mark_known(model.variables)  # `provenance` accounts for what the file has seen.
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
    factors = {id(v) for v in lora.factors_of(source)}  # Their product is in the kernels.
    old, new = [v for v in source.weights if id(v) not in factors], model.weights
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
        [type(layer) for layer in layer_internals.flatten_layers(m)] for m in (source, model)
    )
    if kinds != expected:
        raise UserError(
            f"The model of --init_from={path} has other layers than --model={model.name} here: "
            "give --weight_standardization and --relu_first as it was trained with."
        )
    for a, b in zip(old, new, strict=True):
        if id(b) not in last:
            b.assign(a)
    account.pass_on(old, new)


def _load_weights(model, path):
    try:
        model.load_weights(path)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"The weights of --init_from={path} do not fit --model={model.name} with "
            f"{model.output_shape[-1]} classes (a .keras file may have other classes): {error}"
        ) from error
    account.mark_known(model.variables)  # As in `_read`.
