"""Reads objects on a command line, for example `--head=adamix:shots=2,quantile=0.9`.

An object is written as `NAME:ARGUMENT=VALUE,ARGUMENT=VALUE`. The arguments are those of the
object's constructor: the signature lists them, the annotations tell which values are valid, and the
docstring explains them. A value is a number, several numbers joined by `..`, true, false, none, or
a text.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdpx
from tfdpx import heads, models
from tfdpx._arguments import check_positive_integer
from tfdpx.heads.head import optional
from tfdpx.train.errors import UserError, did_you_mean

_WORDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "None": "none"}


@dataclasses.dataclass(frozen=True)
class Objects:
    """The objects that a flag can name.

    Attributes:
        flag: String, the name of the flag.
        find: Function from a name to the constructor of the object, or to None if there is none.
        names: Tuple of the names to show in errors and help.
        by_flags: Names of the arguments that the run sets from other flags. Users cannot set them
            here.
        trial: Dict of arguments, or None. To find errors early, `problems` builds an object with
            these and the user's arguments. With None, `problems` builds no object, for example if
            that takes long. Some errors are then found only when the run builds the object.
    """

    flag: str
    find: Callable[[str], Callable | None]
    names: tuple
    by_flags: tuple = ()
    trial: dict | None = None

    def constructor(self, name: str) -> Callable:
        """Returns the constructor of an object, a class or a function."""
        constructor = self.find(name)
        while isinstance(constructor, functools.partial):
            constructor = constructor.func
        return constructor

    def arguments(self, name: str) -> dict[str, str]:
        """Returns a dict from each argument of an object to its annotation (a string)."""
        parameters = inspect.signature(self.find(name)).parameters.values()
        return {
            parameter.name: inspect.formatannotation(parameter.annotation).strip("'")
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and parameter.name not in self.by_flags
        }

    def read(self, text: str) -> tuple[str, dict[str, Any], list[str]]:
        """Returns an object's name, a dict of its arguments, and a list of sentences about errors.

        Args:
            text: String, the value of the flag.
        """
        name, _, rest = text.partition(":")
        if self.find(name) is None:
            near = did_you_mean(name, [text.split()[-1] for text in self.names])
            use = f"Use one of: {', '.join(self.names)}."
            return name, {}, [f"There is no {self.flag} {name!r}.{near} {use}"]
        pairs = [pair.partition("=") for pair in filter(None, rest.split(","))]
        annotations, values, problems = self.arguments(name), {}, []
        for argument, _, word in pairs:
            if argument in self.by_flags:
                problem = f"is a flag: give --{argument}={word}"
            elif argument not in annotations:
                near = did_you_mean(argument, annotations)
                problem = f"does not exist.{near} Use: {', '.join(annotations) or 'none'}"
            elif argument in values:
                problem = "is there twice: give it once"
            else:
                values[argument], problem = _value(word, annotations[argument])
                lines = explanations(self.constructor(name))
                problem = problem and f"{problem}. It is: {lines.get(argument, 'not described')}"
            if problem:
                problems.append(f"Argument {argument!r} of {name} {problem.rstrip('.')}.")
        return name, values, problems

    def problems(self, text: str) -> list[str]:
        """Returns a list with a sentence for each error in the value of the flag."""
        if self.trial is None:
            problems = self.read(text)[2]
            return [*problems, f"Received: --{self.flag}={text}."] if problems else []
        try:
            self.make(text, **self.trial)
        except UserError as error:
            return [str(error)]
        return []

    def make(self, text: str, **fixed: Any) -> Any:
        """Builds the object that the flag names.

        Args:
            text: String, the value of the flag.
            **fixed: Arguments of the constructor that the run sets.

        Raises:
            UserError: If there is no such object, or an argument is invalid.
        """
        name, values, problems = self.read(text)
        try:
            if not problems:
                return self.find(name)(**fixed, **values)
        except (TypeError, ValueError) as error:
            problems = [str(error)]
        raise UserError(" ".join([*problems, f"Received: --{self.flag}={text}."]))


def explanations(constructor: Callable) -> dict[str, str]:
    """Returns a dict from each argument of a constructor to its description in the docstring."""
    owners = reversed(getattr(constructor, "__mro__", (constructor,)))
    texts = [inspect.cleandoc(owner.__doc__) for owner in owners if owner.__doc__]
    lines = re.findall(r"^    (\w+): (.*?)(?=\n    [\w*]|\n\n|\Z)", "\n\n".join(texts), re.M | re.S)
    return {argument: " ".join(text.split()) for argument, text in lines}


def without_folders(text: str | None) -> str | None:
    """Returns the value of a flag, with each path replaced by the name of its file."""
    return text and re.sub(r"(=(?:\w+:)?)[^,]*/", r"\1", text)


def _value(word, annotation):
    """Converts a word to the value of an argument. Also returns an error text, or None."""
    value, expected = _plain(word), []
    for kind in map(str.strip, annotation.split("|")):
        choices = re.findall(r"'(\w+)'", kind)
        if kind == "str" or word in choices:
            return word, None
        if kind not in _WORDS and not choices:
            return value, None  # The constructor checks the value.
        if type(value).__name__ in (kind, kind.replace("None", "NoneType")):
            return value, None
        if (kind, type(value)) == ("float", int):
            return float(value), None
        expected += choices or [_WORDS[kind]]
    return value, f"must be {' or '.join(expected)}, not {word!r}"


def _plain(word):
    """Converts a word to a number, a tuple of numbers, a bool or None, or returns it unchanged."""
    words = {"true": True, "false": False, "none": None}
    if word.lower() in words:
        return words[word.lower()]
    numbers = []
    for part in word.split(".."):
        for number in (int, float):
            try:
                numbers.append(number(part))
                break
            except ValueError:
                continue
        else:
            return word
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


@dataclasses.dataclass(eq=False)
class _AdaMix(heads.AdaMix):
    """The head `tfdpx.heads.AdaMix`, with arguments that tell which images are public.

    Args:
        shots: Int, the number of training images of each class to take as public, for experiments.
        public_dataset: String, public images of the same classes, as for --dataset.
        initial_weights: String, a .npy file of public weights [features, classes] to start from,
            for example those that tfdpx.models.zero_shot_head computes.
    """

    _: dataclasses.KW_ONLY
    shots: int | None = None
    public_dataset: str | None = None
    initial_weights: str | None = None

    _checks = {**heads.AdaMix._checks, "shots": optional(check_positive_integer)}

    def __post_init__(self):
        if isinstance(self.initial_weights, str):
            try:
                self.initial_weights = np.load(self.initial_weights, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"Cannot read initial_weights={self.initial_weights}: {error}."
                ) from error
        super().__post_init__()
        if (self.public_dataset is None) == (self.shots is None):
            raise ValueError(
                "Exactly one of `public_dataset` and `shots` says which images of the head adamix "
                f"are public: public_dataset={self.public_dataset}, shots={self.shots}."
            )


# Learning rates and alpha were chosen on the mixture in docs/heads.md, with other examples. The
# numbers of steps are from the paper.
_HEADS = {
    "least_squares": functools.partial(heads.LeastSquares, alpha=1.0),
    "newton": functools.partial(heads.Newton, steps=10, learning_rate=0.1),
    "feature_covariance": functools.partial(heads.FeatureCovariance, steps=10, learning_rate=8.0),
    "first_order": functools.partial(heads.FirstOrder, steps=100, learning_rate=0.1),
    "adamix": _AdaMix,
}
HEADS = Objects(
    "head",
    _HEADS.get,
    tuple(_HEADS),
    tuple(
        "num_classes epsilon delta noise_multiplier l2_norm_clip accountant seed steps "
        "learning_rate".split()
    ),
    dict(num_classes=2, epsilon=1.0),
)

# Special values of `model`: `defaults` chooses the model; a linear classifier on `features`; the
# network in the file `init_from`, unchanged.
AUTO, LINEAR_ON_FEATURES, OF_FILE = "auto", "linear_on_features", "of init_from"
_MODELS = {
    "small_cnn": models.SmallCNN,
    "scatter_linear": models.ScatterLinear,
    "scatter_cnn": models.ScatterCNN,
    "lenet": models.LeNet,
    "resnet_20": models.ResNet20,
}
_BY_NUMBERS = {r"wrn_(\d+)_(\d+)": models.WideResNet, r"nf_resnet_(\d+)": models.NFResNet}


def _model(name):
    """Returns the constructor of the model with this name; None if there is none."""
    for pattern, constructor in _BY_NUMBERS.items():
        if match := re.fullmatch(pattern, name):
            return functools.partial(constructor, *map(int, match.groups()))
    if name in (AUTO, LINEAR_ON_FEATURES, OF_FILE):  # `start_from` builds these models.
        return object
    return _MODELS.get(name)


MODELS = Objects(
    "model",
    _model,
    (*_MODELS, "wrn_<depth>_<width> such as wrn_16_4", "nf_resnet_<depth> such as nf_resnet_50"),
    ("num_classes", "input_shape", "name"),
)

_OPTIMIZERS = {"dpsgd": tfdpx.DPSGD, "dpadam": tfdpx.DPAdam, "dpadamw": tfdpx.DPAdamW}
OPTIMIZERS = Objects(
    "optimizer",
    _OPTIMIZERS.get,
    tuple(_OPTIMIZERS),
    ("learning_rate",),
    dict(learning_rate=1.0, batch_size=1, noise_multiplier=1.0),
)


def _step(learning_rate, steps, decay_steps: tuple | int):
    """Returns a schedule that divides the learning rate by ten at each of `decay_steps`.

    Args:
        learning_rate: Float, the first rate.
        steps: Int, the number of updates of the run.
        decay_steps: Numbers of updates after which the rate falls, in rising order, joined by `..`.
    """
    ends = decay_steps if isinstance(decay_steps, tuple) else (decay_steps,)
    is_valid = all(isinstance(end, int) for end in ends)
    if not is_valid or not all(a < b for a, b in itertools.pairwise((0, *ends))):
        raise ValueError("Argument `decay_steps` must be whole numbers that rise from above 0.")
    # Keras still uses the old value in the step that equals the boundary.
    rates = [learning_rate / 10**i for i in range(len(ends) + 1)]
    boundaries = [end - 1 for end in ends]
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, rates)


def _cosine(learning_rate, steps, warmup_steps: int = 0):
    """Returns a schedule that rises linearly from 0, and then falls to 0 along a cosine.

    Args:
        learning_rate: Float, the largest rate.
        steps: Int, the number of updates of the run.
        warmup_steps: Int, less than --steps: the number of updates in which the rate rises.
    """
    if not 0 <= warmup_steps < steps:
        raise ValueError(
            "Argument `warmup_steps` must be at least 0, and below --steps. Received: "
            f"warmup_steps={warmup_steps}, --steps={steps}."
        )
    return keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup_steps, warmup_target=learning_rate, warmup_steps=warmup_steps
    )


_SCHEDULES = {"step": _step, "cosine": _cosine}
SCHEDULES = Objects(
    "schedule",
    _SCHEDULES.get,
    tuple(_SCHEDULES),
    ("learning_rate", "steps"),
    dict(learning_rate=1.0, steps=2**53),
)


def _resized(image_shape, scale: float = 1.2, flip: bool = True):
    """Returns a `tfdpx.augment.ResizeCropFlip` with views of the shape `image_shape`.

    Args:
        image_shape: `(height, width, channels)`.
        scale: Float, the size of the images from which views are cut, relative to a view.
        flip: Bool, whether views are flipped left to right at random.
    """
    return tfdpx.augment.ResizeCropFlip(*image_shape[:2], scale=scale, flip=flip)


_VIEWS = {
    "RandomCropFlip": tfdpx.augment.RandomCropFlip,
    "ResizeCropFlip": _resized,
    "MixViews": tfdpx.augment.MixViews,
}


def _augmentation(name):
    """Returns the augmentation of tfdpx, Keras or KerasCV with this name; None if there is none."""
    layer = _VIEWS.get(name) or getattr(keras.layers, name, None)
    if layer is None:
        with warnings.catch_warnings(), contextlib.suppress(ImportError):
            warnings.simplefilter("ignore")  # The import warns about Keras 2.
            layer = getattr(importlib.import_module("keras_cv").layers, name, None)
    return layer


# Matches a + between objects, but not the sign of an exponent.
_SEVERAL = re.compile(r"\+(?=[A-Za-z_])")


class _Augmentations(Objects):
    def make(self, text, image_shape):
        """Returns the augmentation that `--augment` names, one or several objects joined by `+`.

        Args:
            text: String, for example `RandomFlip+RandomRotation:factor=0.1`. The objects are
                applied in this order. `MixViews` must come last; it mixes the views of the other
                objects.
            image_shape: `(height, width, channels)` of the images that the model takes.

        Raises:
            UserError: If there is no such object, or an argument is invalid.
        """
        layers = _SEVERAL.split(text)
        mixed = layers.pop() if layers[-1].startswith("MixViews") else None
        parts = []
        for layer in layers:
            fixed = {"image_shape": image_shape} if layer.startswith("ResizeCropFlip") else {}
            parts.append(super().make(layer, **fixed))
        if not parts or (parts[1:] and not all(isinstance(part, keras.Layer) for part in parts)):
            raise UserError(
                "Flag --augment is one of tfdpx.augment, or layers of Keras that are joined by +; "
                f"MixViews comes last, after what it mixes. Received: --augment={text}."
            )
        augment = keras.Sequential(parts) if parts[1:] else parts[0]
        return super().make(mixed, augment=augment) if mixed else augment


AUGMENTATIONS = _Augmentations(
    "augment",
    _augmentation,
    (*_VIEWS, "RandomFlip", "RandomRotation and other layers of keras.layers and keras_cv.layers"),
    ("augment", "image_shape"),
    dict(image_shape=(1, 1)),
)


def view_scale(text: str | None) -> float:
    """Returns the factor by which training images must be larger than the model's input.

    Args:
        text: String, the value of `--augment`.
    """
    if not (text or "").startswith("ResizeCropFlip"):
        return 1.0
    return AUGMENTATIONS.make(_SEVERAL.split(text)[0], image_shape=(1, 1)).scale
