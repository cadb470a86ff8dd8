"""Loads the initial weights of a run, and accounts for their earlier trainings.

The initial weights may already depend on the private data. So every run reads the records in the
files that it starts from. If they record a privacy loss on the same data, the run adds this loss to
its epsilon. If the weights were trained on these data without a record of the privacy loss, the run
ends with an error.
"""

import copy
import dataclasses
import functools
import math
import pathlib
import types
import warnings
import zipfile

import keras
import numpy as np

from tfdpx import account
from tfdpx._keras import layer_internals
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import UpstreamTraining, plain
from tfdpx.layers import UnitNormWithConstant
from tfdpx.layers.few_weights import last_layer, trainable
from tfdpx.models import LinearOnFeatures, backbone, transfer
from tfdpx.models.networks import logits
from tfdpx.models.on_features import linear, scattering_features
from tfdpx.report import measure
from tfdpx.report.spent import MODEL
from tfdpx.train.data import identity, tfds
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.objects import AUTO, LINEAR_ON_FEATURES, MODELS, OF_FILE, without_folders

_SCATTER = "scatter"


class Start:
    """The trained weights of `--init_from`, and the fixed features of `--features`.

    Without `--model`, the network of a `.keras` file is used unchanged. With `--model`, the network
    with that name gets the weights of a `.keras` or `.weights.h5` file. In both cases the last
    layer is new.

    Args:
        settings: A `settings.Settings`.

    Attributes:
        settings: The settings, with the path of a file as `init_from`. If the network of this file
            is used unchanged, `model` is `OF_FILE`.
        files: Paths of the files to read.
        image_shape: `(height, width, channels)` of the images that the network of the file takes. A
            number is None if any value fits.
        notes: Sentences to print.

    Raises:
        UserError: If a file does not exist or cannot be read, or if flags contradict the file.
    """

    def __init__(self, settings):
        path = settings.init_from and model_file(settings.init_from)
        self.files = [*([path] if path else []), *_feature_files(settings.features)]
        for file in self.files:  # Checks all files before any weight is loaded.
            _record_in(file)
        self.image_shape, self.notes, self._model = (None, None, None), [], None
        if path and path.endswith(".keras"):
            self._model = read(path)
        if self._model is not None and settings.model in (AUTO, OF_FILE, None):
            if settings.precision != "float32":
                raise UserError(
                    f"The layers of --init_from={path} keep the precision that they were saved "
                    f"with. Received: --precision={settings.precision}. Leave it out."
                )
            settings = dataclasses.replace(settings, model=OF_FILE)
            self.image_shape, note = _described(self._model, path, settings.pixels)
            self.notes = [note]
        elif path and settings.model in (AUTO, OF_FILE, None):
            raise UserError(
                "A .weights.h5 file has weights and no architecture: build its network in Keras, "
                "load_weights, and save it as a .keras file, or, without --head, name a network "
                f"of tfdpx by --model. Received: --init_from={path} --model={settings.model}."
            )
        elif (settings.pixels and not settings.features) or settings.batch_norm:
            raise UserError(
                "Flags --pixels and --batch_norm belong to a network of --init_from that is taken "
                f"as it is: leave them out, or give --init_from and --model={AUTO}. Received: "
                f"--model={settings.model} --init_from={path}."
            )
        self.settings = dataclasses.replace(settings, init_from=path)

    @functools.cached_property
    def seen(self):
        """The earlier trainings of the weights in the files, a tuple of `UpstreamTraining`.

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

    def build(self, data, prepare=None):
        """Builds the classifier of the run, uncompiled, with `--trainable` applied to its weights.

        Args:
            data: `images.ImageData`.
            prepare: Optional function that takes the whole model. It is called before weights are
                frozen.

        Returns:
            A `keras.Model` from uint8 images `[batch, height, width, channels]` to logits.

        Raises:
            UserError: If a file does not match the settings.
        """
        settings, shape = self.settings, tuple(data.image_shape)
        if settings.features:
            return _on_features(settings, shape, data.num_classes)
        if settings.model == OF_FILE:
            model = self._as_it_is(shape, data.num_classes, settings.trainable)
        else:
            model = self._by_name(data)
        if prepare is not None:
            prepare(model)
        if settings.trainable != "all":
            with checking_flags():
                trainable(model, settings.trainable, settings.lora_rank)
        return model

    def sketch(self, name, shape, num_classes):
        """Returns an untrained copy of the run's classifier, for example to count weights.

        Pixels are scaled by placeholders, because the true constants do not matter.
        """
        about = {"image_shape": tuple(shape), "num_classes": num_classes}
        data = types.SimpleNamespace(**about, centre=127.5, deviation=127.5)
        start = copy.copy(self)
        start.settings = dataclasses.replace(self.settings, model=name)
        return start.build(data)

    def extractor(self, shape, largest=255):
        """Builds a `keras.Model` from uint8 images to features `[batch, dimensions]` of norm one.

        If --init_from names no file, the model computes scattering features, which do not depend on
        data. Images are first divided by `largest`, the largest grey level of their format.
        """
        if self._model is not None:
            model = self._as_it_is(shape, None, "last")
            return keras.Model(model.inputs, keras.layers.UnitNormalization()(model.output))
        inputs, outputs = scattering_features(shape)
        body = keras.Model(inputs, UnitNormWithConstant(name="unit_norm")(outputs))
        return _of_bytes(body, shape, _SCATTER, 1 / largest)

    def _by_name(self, data):
        """Builds the network that `--model` names, and loads the weights of the file, if any."""
        path, source = self.settings.init_from, self._model
        scale = data.centre, data.deviation
        normalise = source and next((x for x in source.layers if x.name == "normalise"), None)
        if normalise:
            factor, offset = np.array(normalise.scale), np.array(normalise.offset)
            scale = (-offset / factor).tolist(), (1 / factor).tolist()
        model = classifier(self.settings.model, data.image_shape, data.num_classes, *scale)
        if path:
            flat = layer_internals.flatten_layers
            kinds = source and [type(layer) for layer in flat(source)]
            if kinds not in (None, [type(layer) for layer in flat(model)]):
                raise UserError(
                    f"The network of --init_from={path}, {source.name!r}, has other layers than "
                    f"--model={self.settings.model}: name it with the arguments that it was "
                    f"trained with, or give --model={AUTO} to take it as it is."
                )
            _load(model, path)
        return model

    def _as_it_is(self, shape, num_classes, trained):
        """Builds the network of the file, with a new last layer unless `num_classes` is None."""
        # Sets each layer. Keras would skip the layers if the model itself already had the value.
        for layer in layer_internals.flatten_layers(self._model):
            layer.trainable = trained != "last"
        images = keras.Input(shape)
        with checking_flags():
            x = backbone(
                self._model,
                input_shape=shape,
                batch_norm=self.settings.batch_norm or "freeze",
                pixels=self.settings.pixels,
            )(images)
        if num_classes is not None:
            x = linear(x, num_classes) if trained == "last" else logits(x, num_classes)
        model = _of_bytes(keras.Model(images, x, name="body"), shape, self._model.name)
        account.mark_known(model.variables)  # `seen` counts the file's earlier trainings.
        return model


def classifier(text, image_shape, num_classes, centre, deviation=None):
    """Returns a model from uint8 images to logits.

    The first layer maps a grey level x to `(x - centre) / deviation`. So images are sent to the
    device as bytes, and a saved model needs no preprocessing. For models on scattering features,
    the layer divides x by 255 instead.

    Args:
        text: String, a model of `objects.MODELS` with its arguments.
        image_shape: `(height, width, channels)`.
        num_classes: Number of logits.
        centre: Grey level that is mapped to 0, or a tuple with one for each channel.
        deviation: Divisor of grey levels after `centre` is subtracted, or a tuple with one for each
            channel. Defaults to `centre`.

    Returns:
        A `keras.Model` from `[batch, height, width, channels]` uint8 to `[batch, num_classes]`.

    Raises:
        UserError: If there is no such model, or the model does not fit images of this shape.
    """
    body = MODELS.make(text, num_classes=num_classes, input_shape=tuple(image_shape))
    if text.startswith("scatter_"):
        centre, deviation = 0.0, 255.0
    centre, deviation = np.array(centre), np.array(centre if deviation is None else deviation)
    scale, offset = (1 / deviation).tolist(), (-centre / deviation).tolist()
    return _of_bytes(body, image_shape, text.partition(":")[0], scale, offset)


def _of_bytes(body, shape, name, scale=1.0, offset=0.0):
    """Returns a model that rescales uint8 images and applies `body` to them."""
    images = keras.Input(shape, dtype="uint8", name="image")
    scaled = keras.layers.Rescaling(scale, offset, name="normalise")(images)
    return keras.Model(images, body(scaled), name=name)


def _load(model, path):
    """Loads the weights of a file into all layers but the last."""
    last = last_layer(model)
    new, ends = last.get_weights(), {id(v) for v in last.weights}
    rest = [v for v in model.weights if id(v) not in ends and "float" in v.dtype]
    for variable in rest:  # Weights that the file lacks stay NaN. (Keras would only warn.)
        variable.assign(keras.ops.full(variable.shape, float("nan"), variable.dtype))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.load_weights(path, skip_mismatch=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"Cannot read --init_from={path}: {error}") from error
    missing = [v.path for v in rest if bool(keras.ops.any(keras.ops.isnan(v)))]
    if missing:
        raise UserError(
            f"The weights of --init_from={path} do not fit --model={model.name} for images of "
            f"shape {model.input_shape[1:]}: {len(missing)} are not in the file, such as "
            f"{missing[0]}."
        )
    last.set_weights(new)
    account.mark_known(model.variables)  # `Start.seen` counts the file's earlier trainings.


def ledger_on(trainings, dataset, allow_unaccounted=False):
    """Returns a `Ledger` of the earlier trainings that may have used a data set.

    Args:
        trainings: Tuple of `UpstreamTraining`.
        dataset: String, the value of `--dataset`.
        allow_unaccounted: Bool. If True, a training without a recorded privacy loss makes epsilon
            infinite. If False, such a training is an error.

    Raises:
        UserError: If a training without a recorded privacy loss may have used these data.
    """
    before = Ledger()
    for training in trainings:
        if not training.ledger.steps:
            continue
        is_known = training.limit not in (None, math.inf)
        # `tfdpx.report` records any name that a user chooses, so such data may be the same data.
        is_unnamed = training.data.identifier is None and not tfds.is_known(training.data.name)
        may_be_these = is_known and is_unnamed and tfds.Name.parse(dataset).path is not None
        if not (may_be_these or identity.overlap(training.data, dataset)):
            continue
        if not is_known and not allow_unaccounted:
            raise UserError(
                f"The weights to start from were trained on {training.data.name} already, without "
                "an account, so any epsilon of this run would be too small. Received: "
                f"--dataset={dataset}. Start from weights that have not seen these data, or "
                "that tfdpx trained on them. To train the last layer first and then all, give "
                "one run of classify --head_steps. With --private=false epsilon is infinite."
            )
        before += training.ledger if is_known else not_private()
    return before


def not_private():
    """Returns the `Ledger` of an update without noise, which has an infinite epsilon."""
    return Ledger((Entry(0.0, 1.0, 1),))


def without_secrets(settings):
    """Returns the settings for a record: a dict of JSON values, without the seed and without paths.

    Args:
        settings: A `settings.Settings`.
    """
    recorded = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if settings.kind in field.metadata["of"]
    }
    del recorded["seed"]  # Anyone with the seed could remove the noise.
    hide = dict.fromkeys(("dataset", "init_data"), identity.called) | {"head": without_folders}
    hide |= dict.fromkeys(("init_from", "features"), without_paths)
    return recorded | {n: hide[n](recorded[n]) for n in hide if recorded.get(n)}


def without_paths(text):
    """Shortens each path in a value of `--init_from` or `--features` to its last two parts."""
    return text and "+".join("/".join(pathlib.Path(part).parts[-2:]) for part in text.split("+"))


def _described(model, path, pixels):
    """Returns the shape of a Keras model's images, and a sentence on how the model is used."""
    try:
        shape = transfer.image_shape(model)
        _, head = transfer.without_head(model)
        _, scaled = transfer.preparation(model, pixels)
    except ValueError as error:
        text = str(error).replace(" pixels=", " --pixels=")
        raise UserError(f"Cannot start from --init_from={path}: {text}") from error
    head = head and f"without its last layer, {head!r} of {model.outputs[0].shape[-1]} outputs"
    size = "x".join(str(side or "any") for side in shape[:2])
    colours = "gray" if shape[2] == 1 else "in colour"
    return shape, (
        f"Start from {model.name!r} of {model.count_params():,} weights, {head or 'no head'}; "
        f"images of {size} pixels, {colours}; pixels {scaled} (--pixels changes it)."
    )


def _feature_files(features):
    """Returns the `.keras` files that `--features` names."""
    if features is None:
        return []
    kinds = [kind.strip() for kind in features.split("+")]
    for index, kind in enumerate(kinds):
        path = pathlib.Path(kind)
        path = path / MODEL if path.is_dir() else path
        if kind != _SCATTER and not (kind and path.suffix == ".keras" and path.is_file()):
            raise UserError(
                f"Flag --features must join {_SCATTER!r}, .keras files and working folders with a "
                f"{MODEL} by '+'. Received: --features={features}, where {kind!r} is none of "
                "these."
            )
        kinds[index] = kind if kind == _SCATTER else str(path)
    if len(set(kinds)) < len(kinds):
        raise UserError(
            f"Flag --features must name each kind once. Received: --features={features}."
        )
    return [kind for kind in kinds if kind != _SCATTER]


def _on_features(settings, shape, num_classes):
    """Builds the linear classifier on `--features`. Only its last layer is trainable."""
    with checking_flags():
        networks = [read(path, "features") for path in _feature_files(settings.features)]
        parts = [backbone(n, input_shape=shape, pixels=settings.pixels) for n in networks]
        if settings.whiten:
            parts = [transfer.whitened(part, 255.0, settings.whiten) for part in parts]
        if _SCATTER in [kind.strip() for kind in settings.features.split("+")]:
            images = keras.Input(shape)
            scattering = keras.Model(*scattering_features(shape))
            grey = keras.layers.Rescaling(1 / 255)(images)
            parts.insert(0, keras.Model(images, scattering(grey), name=_SCATTER))
        body = LinearOnFeatures(num_classes, shape, parts)
    return _of_bytes(body, shape, LINEAR_ON_FEATURES)


def _record_in(path):
    """Returns the record in a file, or None if it has no record. A damaged file is an error."""
    try:
        return records.read(path) if path.endswith(".keras") else None
    except (OSError, ValueError) as error:
        raise UserError(f"Damaged: the account in the file {path}: {error}") from error


def _seen_by(path, init_data):
    """Returns the earlier trainings of the weights in a file, a tuple of `UpstreamTraining`."""
    record = _record_in(path)
    if record is None or record.data is None:
        if init_data is None:
            raise UserError(
                f"The file {path} does not say what it was trained on. If it was trained on none "
                "of the private data, name its data with --init_data."
            )
        return (UpstreamTraining(identity.of(init_data), not_private()),)
    return (*record.seen, UpstreamTraining(record.data, record.ledger, record.delta))


def model_file(path, flag="init_from", suffixes=(".keras", ".weights.h5")):
    """Returns the file that a flag names or, if the flag names a run folder, the model in it.

    Args:
        path: String, the value of the flag.
        flag: String, the name of the flag, for errors.
        suffixes: Tuple of strings, the valid endings of files.

    Raises:
        UserError: If there is no such file.
    """
    file = pathlib.Path(path).expanduser()
    if file.is_dir():
        if not (file / records.FILE).exists() or not (file / MODEL).is_file():
            raise UserError(
                f"The folder --{flag}={path} holds no finished run: {records.FILE} and {MODEL}."
                " Name a finished run (--resume ends one that was interrupted), or a .keras file."
            )
        file = file / MODEL
    if not (file.name.endswith(suffixes) and file.is_file()):
        if path[:1].isupper() and hasattr(keras.applications, path) and not file.exists():
            raise UserError(
                f"Flag --{flag} must name a file. Received: --{flag}={path}, a network of Keras: "
                f'on a machine with internet, run keras.applications.{path}(weights="imagenet")'
                f'.save("m.keras"), copy the file, and give --{flag}=m.keras '
                "--init_data=imagenet2012."
            )
        reason = "a file of another kind" if file.exists() else "which does not exist"
        raise UserError(
            f"Flag --{flag} must name a run folder, or a file that ends in "
            f"{' or '.join(suffixes)}. Received: --{flag}={path}, {reason}. An .h5 file of a whole "
            "model becomes one by keras.saving.load_model(path).save('model.keras')."
        )
    if file.suffix == ".keras" and not zipfile.is_zipfile(file):
        raise UserError(
            f"Cannot read --{flag}={path}: it is not a model that Keras saved. Save one by "
            "model.save('model.keras')."
        )
    return str(file)


def read(path, flag="init_from"):
    """Reads the model of a `.keras` file. `Start.seen` counts the file's earlier trainings."""
    try:
        model = keras.saving.load_model(path, compile=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"Cannot read --{flag}={path}: {error}") from error
    account.mark_known(model.variables)
    return model


def recorded_inputs(path):
    """Returns a dict of the inputs and the threshold in the record of a `.keras` file.

    If the file has no record, the dict is empty.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        record = records.read(path)
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read --model={path}: {error}") from error
    if not (record and record.inputs):
        return {}
    return {"threshold": record.results.get("threshold", 0.5), **record.inputs}


def inputs_of(data):
    """Returns the `inputs` of a record: a dict of JSON values on the model's images and classes.

    Args:
        data: `images.ImageData`.
    """
    resized = "resized without keeping the aspect ratio"
    if share := data.center_crop:
        resized = f"cropped around their centre to {share:.4g} of the shorter side and resized"
    preparation = (
        f"8-bit pixels, upright, transparent parts on white, {resized} to image_shape by Pillow's "
        "bilinear filter. The model scales them itself. Its outputs are logits: their softmax are "
        "probabilities."
    )
    names = ("image_shape", "class_names", "centre", "deviation", "center_crop")
    inputs = {name: plain(getattr(data, name)) for name in names}
    return inputs | {"preparation": preparation}


def image_input(path):
    """Returns the kind of images that the model of a `.keras` file takes, and its class names.

    Returns:
        Namespace with `image_shape` (`[height, width, channels]`), `class_names`, `center_crop`
        (see `images.decode`) and `threshold` (see `measure.predicted_classes`).

    Raises:
        UserError: If the file cannot be read, or has no record of the model's inputs.
    """
    inputs = recorded_inputs(path)
    if "image_shape" not in inputs:
        raise UserError(
            f"The file --model={path} does not say which images it takes and what its classes are: "
            "tfdpx.train.classify did not write it, or Keras has saved it again."
        )
    return types.SimpleNamespace(**inputs)


def check_threshold(threshold, class_names):
    """Raises UserError if `--threshold` is set and the number of classes is not two."""
    if threshold != measure.THRESHOLD and len(class_names) != 2:
        raise UserError(
            "Flag --threshold is the least probability of the second of two classes: leave it out. "
            f"Received: --threshold={threshold:g} for {len(class_names)} classes."
        )
