"""Loads the trained weights that a run starts from, and accounts for their earlier trainings.

Otherwise a model that was trained on the private data before would have a guarantee for its last
training alone. So every run reads the records of the weights or features that it starts from. It
adds the privacy loss on the same data, and refuses weights that were trained on them without an
account.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import math
import pathlib
import types

import keras
import numpy as np

from tfdpx import account
from tfdpx._keras import layer_internals, lora
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import UpstreamTraining
from tfdpx.accounting.statement import why_unknown
from tfdpx.layers import UnitNormWithConstant
from tfdpx.layers.few_weights import last_layer, trainable
from tfdpx.models import LinearOnFeatures, backbone, transfer
from tfdpx.models.networks import logits
from tfdpx.models.on_features import linear, scattering_features
from tfdpx.train import classifiers
from tfdpx.train.data import identity
from tfdpx.train.defaults import AUTO, LINEAR_ON_FEATURES, OF_FILE
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.model_files import MODEL_FILE, model_file, read
from tfdpx.train.objects import without_folders

_SCATTER = "scatter"


class Start:
    """The trained model of `--init_from`, and the fixed features of `--features`.

    A `.keras` file of `classify` gives the weights of all layers but the last, and
    the normalisation of grey levels. A `.weights.h5` file gives the weights of all layers. Any
    other Keras image model is used unchanged, in place of `--model`.

    Args:
        settings: A `settings.Settings`.
        pixels: See `tfdpx.models.backbone`.
        batch_norm: "freeze" or "replace"; None is "freeze".
        features: String, the value of `--features`, or None.

    Attributes:
        settings: The settings with the path of a file, and with `model` `OF_FILE` if the model in
            the file is used unchanged.
        files: Paths of the files to read.
        image_shape: `(height, width, channels)` that the model in the file takes; None for any.
        notes: Sentences to print.

    Raises:
        UserError: If a file does not exist or cannot be read, or flags contradict it.
    """

    def __init__(self, settings, pixels=None, batch_norm=None, features=None):
        if settings.init_from:
            settings = dataclasses.replace(settings, init_from=model_file(settings.init_from))
        path = settings.init_from
        self._pixels, self._batch_norm, self._features = pixels, batch_norm, features
        self._model = read(path) if path and path.endswith(".keras") else None
        self._as_it_is = self._model is not None and (
            settings.model in (AUTO, None) or not is_ours(self._model)
        )
        self.image_shape, self.notes = (None, None, None), []
        if self._as_it_is:
            if settings.precision != "float32":
                raise UserError(
                    f"The layers of --init_from={path} keep the precision that they were saved "
                    f"with. Received: --precision={settings.precision}. Leave it out."
                )
            settings = dataclasses.replace(settings, model=OF_FILE)
            self.image_shape, note = _described(self._model, path, pixels)
            self.notes = [note]
        elif (pixels and not features) or batch_norm:
            raise UserError(
                "Flags --pixels and --batch_norm belong to a model of --init_from that is taken as "
                f"it is. Received: --pixels={pixels} --batch_norm={batch_norm}, with "
                f"--model={settings.model} --init_from={path}. Leave them out."
            )
        self.settings = settings
        self.files = [*([path] if path else []), *_feature_files(features)]

    @functools.cached_property
    def seen(self):
        """The earlier trainings of the files, a tuple of `UpstreamTraining`.

        Raises:
            UserError: If a file is missing, or neither the file nor the user names its data.
        """
        init_data, pretrained_on = self.settings.init_data, self.settings.pretrained_on
        if pretrained_on and not self.files:
            raise UserError(
                f"These settings fine-tune a model trained on {pretrained_on!r}: name its file "
                "with --init_from. Received: no --init_from."
            )
        return tuple(
            dict.fromkeys(training for path in self.files for training in _seen_by(path, init_data))
        )

    def ledger_on(self, dataset, allow_unaccounted=False):
        """Returns the result of `ledger_on` for the earlier trainings of the files."""
        return ledger_on(self.seen, dataset, allow_unaccounted)

    def build(self, data, prepare=None):
        """Builds the classifier of the run, not compiled, with `--trainable` applied.

        Args:
            data: `images.ImageData`.
            prepare: Optional function of the whole model, called before weights are frozen.

        Returns:
            A `keras.Model` from uint8 images `[batch, height, width, channels]` to logits.

        Raises:
            UserError: If a file does not match the settings.
        """
        settings, shape = self.settings, tuple(data.image_shape)
        if self._features:
            return _on_features(
                self._features, shape, data.num_classes, settings.whiten, self._pixels
            )
        if self._as_it_is:
            model = self._as_classifier(shape, data.num_classes, settings.trainable)
        else:
            model = self._by_name(data)
        if prepare is not None:
            prepare(model)
        if settings.trainable != "all":
            with checking_flags():
                count = trainable(model, settings.trainable, settings.lora_rank)
            print(
                f"Train {count:,} of {model.count_params():,} weights "
                f"(--trainable={settings.trainable})."
            )
        return model

    def sketch(self, name, shape, num_classes):
        """Returns the classifier `--model` as it trains, but for its scaling, without any data."""
        about = {"image_shape": tuple(shape), "num_classes": num_classes}
        data = types.SimpleNamespace(**about, centre=127.5, deviation=127.5)
        start = copy.copy(self)
        start.settings = dataclasses.replace(self.settings, model=name)
        with contextlib.redirect_stdout(io.StringIO()):
            return start.build(data)

    def extractor(self, shape, largest=255):
        """Builds a `keras.Model` from uint8 images to features `[batch, dimensions]` of norm one.

        Without a file these are scattering features, which depend on no data, of images divided by
        the largest grey level of their format.
        """
        if self.settings.init_from and self._model is None:
            raise UserError(
                "Flag --head needs a whole model, a .keras file. Received: "
                f"--init_from={self.settings.init_from}."
            )
        if self._model is None:
            images = keras.Input(shape, dtype="uint8", name="image")
            grey = keras.layers.Rescaling(1 / largest, name="normalise")(images)
            inputs, outputs = scattering_features(shape)
            body = keras.Model(inputs, UnitNormWithConstant(name="unit_norm")(outputs))
            return keras.Model(images, body(grey), name=_SCATTER)
        if is_ours(self._model):
            model = features(self._model)
        else:
            model = self._as_classifier(shape, None, "last")
        return keras.Model(model.inputs, keras.layers.UnitNormalization()(model.output))

    def _by_name(self, data):
        path, source = self.settings.init_from, self._model
        centre, deviation = data.centre, data.deviation
        if source is not None:
            centre, deviation = _standardization(source, path)
        model = classifiers.build(
            self.settings.model, data.image_shape, data.num_classes, centre, deviation
        )
        if source is not None:
            _copy(source, model, path)
        elif path:
            _load_weights(model, path)
        return model

    def _as_classifier(self, shape, num_classes, trained):
        """Builds the model in the file for uint8 images, with a new last layer or for features."""
        # Layer by layer, because Keras sets no layer of a model that is already trainable.
        for layer in layer_internals.flatten_layers(self._model):
            layer.trainable = trained != "last"
        pixels = keras.Input(shape)
        with checking_flags():
            x = backbone(
                self._model,
                input_shape=shape,
                batch_norm=self._batch_norm or "freeze",
                pixels=self._pixels,
            )(pixels)
        if num_classes is not None:
            x = linear(x, num_classes) if trained == "last" else logits(x, num_classes)
        body = keras.Model(pixels, x, name="body")
        images = keras.Input(shape, dtype="uint8", name="image")
        outputs = body(keras.layers.Rescaling(1.0, name="normalise")(images))
        model = keras.Model(images, outputs, name=self._model.name)
        account.mark_known(model.variables)  # `seen` has the earlier trainings of the file.
        return model


def ledger_on(trainings, dataset, allow_unaccounted=False):
    """Returns the `Ledger` of earlier trainings that may have used a data set.

    Args:
        trainings: Tuple of `UpstreamTraining`.
        dataset: String, the value of `--dataset`.
        allow_unaccounted: Bool, whether a training without an account makes epsilon infinite or is
            an error.

    Raises:
        UserError: If a training without an account may have used these data.
    """
    before = Ledger()
    for training in trainings:
        if not (training.ledger.steps and identity.overlap(training.data, dataset)):
            continue
        is_known = training.epsilon < math.inf and not why_unknown(training.ledger)
        if not is_known and not allow_unaccounted:
            raise UserError(
                f"The weights to start from were trained on {training.data.name} already, without "
                "an account: no epsilon of this run would be true. Received: "
                f"--dataset={dataset}. Start from weights that have not seen these data, or "
                "that tfdpx trained on them. To train the last layer first and then all, give "
                "one run of classify --head_steps. With --allow_seen_data classify reports an "
                "infinite epsilon."
            )
        before += training.ledger if is_known else not_private()
    return before


def not_private(steps=1):
    """Returns the `Ledger` of updates without noise."""
    return Ledger((Entry(0.0, 1.0, steps),))


def without_secrets(settings):
    """Returns settings for a record, a dict of JSON values without the seed and paths.

    Args:
        settings: A `settings.Settings`.
    """
    recorded = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if settings.kind in field.metadata["of"]
    }
    del recorded["seed"]  # The seed would allow to remove the noise.
    for name in {"dataset", "init_data"} & set(recorded):
        recorded[name] = recorded[name] and identity.called(recorded[name])
    for name in {"init_from", "features"} & set(recorded):
        recorded[name] = without_paths(recorded[name])
    if settings.head:
        recorded["head"] = without_folders(settings.head)
    return recorded


def without_paths(text):
    """Returns the last two parts of each path of `--init_from` or `--features`; None for None."""
    return text and "+".join("/".join(pathlib.Path(part).parts[-2:]) for part in text.split("+"))


def is_ours(model):
    """Returns whether `classifiers.build` made a model, and so can make it again."""
    return classifiers.is_name(model.name) and any(x.name == "normalise" for x in model.layers)


def features(model):
    """Returns a model from uint8 images to the inputs of the last layer of a classifier.

    It shares the weights of the classifier, which `classifiers.build` made.
    """
    return keras.Model(model.inputs, _before_last(model)(model.get_layer("normalise").output))


def _described(model, path, pixels):
    """Returns the shape of the images of a Keras model, and a sentence about its use."""
    try:
        shape = transfer.image_shape(model)
        _, head = transfer.without_head(model)
        _, scaled = transfer.preparation(model, pixels)
    except ValueError as error:
        raise UserError(f"Cannot start from --init_from={path}: {error}") from error
    outputs = model.outputs[0].shape[-1]
    last = f"its last layer, {head!r} of {outputs} outputs, is left out" if head else "no head"
    height, width, channels = shape
    size = f"{height or 'any'}x{width or 'any'} pixels" if height or width else "any size"
    return shape, (
        f"Start from {model.name!r} of {model.count_params():,} weights: {last}; images of "
        f"{size}, {'gray' if channels == 1 else 'in colour'}; pixels {scaled} (--pixels "
        "changes it)."
    )


def _feature_files(features):
    """Returns the `.keras` files that `--features` names."""
    if features is None:
        return []
    kinds = [kind.strip() for kind in features.split("+")]
    for index, kind in enumerate(kinds):
        path = pathlib.Path(kind)
        path = path / MODEL_FILE if path.is_dir() else path
        if kind != _SCATTER and not (kind and path.suffix == ".keras" and path.is_file()):
            raise UserError(
                f"Flag --features must join {_SCATTER!r}, .keras files and working folders with a "
                f"{MODEL_FILE} by '+'. Received: --features={features}, where {kind!r} is none of "
                "these."
            )
        kinds[index] = kind if kind == _SCATTER else str(path)
    if len(set(kinds)) < len(kinds):
        raise UserError(
            f"Flag --features must name each kind once. Received: --features={features}."
        )
    return [kind for kind in kinds if kind != _SCATTER]


def _on_features(features, shape, num_classes, whiten, pixels):
    """Builds the linear classifier of `--features`. Only its last layer trains."""
    extractors = [_extractor_of(path, shape, pixels) for path in _feature_files(features)]
    if pixels and all(is_ours(read(path, "features")) for path in _feature_files(features)):
        raise UserError(
            "Flag --pixels belongs to files of --features that tfdpx did not make. Received: "
            f"--pixels={pixels} --features={features}. Leave it out."
        )
    if whiten:
        extractors = [transfer.whitened(extractor, 1.0, whiten) for extractor in extractors]
    with checking_flags():
        if _SCATTER in [kind.strip() for kind in features.split("+")]:
            extractors.insert(0, keras.Model(*scattering_features(shape), name=_SCATTER))
        body = LinearOnFeatures(num_classes, shape, extractors)
    images = keras.Input(shape, dtype="uint8", name="image")
    grey = keras.layers.Rescaling(1 / 255, name="normalise")(images)
    return keras.Model(images, body(grey), name=LINEAR_ON_FEATURES)


def _extractor_of(path, shape, pixels):
    """Returns a frozen model from images in [0, 1] to the inputs of the last layer of a file."""
    model = read(path, "features")
    if not is_ours(model):
        images = keras.Input(shape)
        with checking_flags():
            body = backbone(model, input_shape=shape, pixels=pixels)
        return keras.Model(images, body(keras.layers.Rescaling(255.0)(images)))
    centre, deviation = map(np.array, _standardization(model, path, "features"))
    body = _before_last(model)
    if tuple(body.input_shape[1:]) != shape:
        raise UserError(
            f"The model of --features, {path}, takes images of shape {body.input_shape[1:]}. "
            f"Received: images of shape {shape}. Pre-train for this --dataset, or give "
            "--image_size."
        )
    images = keras.Input(shape)
    normalise = keras.layers.Rescaling(
        (255 / deviation).tolist(), (-centre / deviation).tolist(), name="normalise"
    )
    return keras.Model(images, body(normalise(images)))


def _before_last(model):
    body = model.layers[-1]
    return keras.Model(body.inputs, last_layer(body).input, name="body")


def _standardization(source, path, flag="init_from"):
    layer = next((layer for layer in source.layers if layer.name == "normalise"), None)
    if layer is None or not isinstance(source.layers[-1], keras.Model):
        remedy = " Its weights in a .weights.h5 file do, if they fit --model."
        raise UserError(
            f"The model of --{flag}={path} was not written by tfdpx.train.classify: it has no "
            f"layer 'normalise'.{remedy * (flag == 'init_from')}"
        )
    scale, offset = np.array(layer.scale), np.array(layer.offset)
    return (-offset / scale).tolist(), (1 / scale).tolist()


def _copy(source, model, path):
    """Copies the weights of all layers but the last."""
    factors = {id(v) for v in lora.factors_of(source)}  # The kernels include their product.
    old, new = [v for v in source.weights if id(v) not in factors], model.weights
    last = {id(weight) for weight in last_layer(model).weights}
    is_fit = len(old) == len(new) and source.name == model.name
    is_fit = is_fit and all(
        a.shape == b.shape or id(b) in last for a, b in zip(old, new, strict=True)
    )
    if not is_fit:
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
            "give --model with the arguments that it was trained with."
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
    account.mark_known(model.variables)  # `Start.seen` has the earlier trainings of the file.


def _seen_by(path, init_data):
    """Returns the earlier trainings of one file, a tuple of `UpstreamTraining`."""
    try:
        record = records.read(path) if path.endswith(".keras") else None
    except (OSError, ValueError) as error:
        raise UserError(f"Damaged: what the file says of its training data: {error}") from error
    if record is None or record.data is None:
        if init_data is None:
            raise UserError(
                f"The file {path} does not say what it was trained on. If it was trained on none "
                "of the private data, name its data with --init_data."
            )
        return (UpstreamTraining(identity.of(init_data), not_private()),)
    return (*record.seen, UpstreamTraining(record.data, record.ledger, record.delta))
