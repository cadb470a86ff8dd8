"""The model of `--features`: several kinds of fixed features side by side, and what is trained."""

import pathlib

import keras

from tfdpx.models import LinearOnFeatures
from tfdpx.models.on_features import scattering_features
from tfdpx.train.config.training import LINEAR_ON_FEATURES
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.run import finetuning

SCATTER = "scatter"
# What `pretrain` and `classify` write into their working folder.
_FILE = "model.keras"


def files(features):
    """The `.keras` files that `--features` names.

    Args:
        features: String as of the flag, or None.

    Returns:
        List of strings.

    Raises:
        UserError: If a kind of features is neither `scatter` nor a file or working folder, or
            stands there twice.
    """
    if features is None:
        return []
    found = _kinds(features)
    for index, kind in enumerate(found):
        if kind != SCATTER:
            found[index] = _file(kind, features)
    if len(set(found)) < len(found):
        raise UserError(
            f"Flag --features must name each kind once. Received: --features={features}."
        )
    return [kind for kind in found if kind != SCATTER]


def build(settings, data):
    """The classifier of `--features`, of which nothing but the last layer trains.

    Args:
        settings: A `training.Training` with `features`.
        data: `images.ImageData`.

    Returns:
        The `keras.Model` from `[batch, height, width, channels]` uint8 to `[batch, classes]`, not
        compiled.

    Raises:
        UserError: If a file cannot be read or does not fit these images.
    """
    shape = tuple(data.image_shape)
    extractors = [_extractor(path, shape) for path in files(settings.features)]
    with checking_flags():
        if SCATTER in _kinds(settings.features):
            extractors.insert(0, keras.Model(*scattering_features(shape), name=SCATTER))
        body = LinearOnFeatures(data.num_classes, shape, extractors)
    images = keras.Input(shape, dtype="uint8", name="image")
    grey = keras.layers.Rescaling(1 / 255, name="normalise")(images)
    return keras.Model(images, body(grey), name=LINEAR_ON_FEATURES)


def _kinds(features):
    return [kind.strip() for kind in features.split("+")]


def _file(kind, features):
    path = pathlib.Path(kind)
    path = path / _FILE if path.is_dir() else path
    if not (kind and path.suffix == ".keras" and path.is_file()):
        raise UserError(
            f"Flag --features must join {SCATTER!r}, .keras files and working folders with a "
            f"{_FILE} by '+'. Received: --features={features}, where {kind!r} is none of these."
        )
    return str(path)


def _extractor(path, shape):
    found = finetuning.features_of(path)
    if tuple(found.input_shape[1:]) != shape:
        raise UserError(
            f"The model of --features, {path}, takes images of shape {found.input_shape[1:]}. "
            f"Received: images of shape {shape}. Pre-train for this --dataset, or give "
            "--image_size."
        )
    return found
