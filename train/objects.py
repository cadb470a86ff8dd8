"""Reads the objects on a command line, each `NAME:ARGUMENT=VALUE,ARGUMENT=VALUE`.

For example, `--head=adamix:shots=2,quantile=0.9`. The arguments are those of the constructor: its
signature lists them, its annotations say which values they take, and its docstring explains them.
A value is a number, several numbers joined by `..`, true, false, none, or a text.
"""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdpx import heads
from tfdpx._arguments import check_positive_integer
from tfdpx.heads.head import optional
from tfdpx.train.errors import UserError, did_you_mean

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", types.NoneType: "none"}


@dataclasses.dataclass(frozen=True)
class Objects:
    """The objects that a flag can name.

    Attributes:
        flag: String, the name of the flag.
        find: Function from a name to the constructor of the object, or None.
        names: Tuple of names for errors and help.
        by_flags: Arguments of constructors that the run sets itself, from its other flags.
    """

    flag: str
    find: Callable[[str], Callable | None]
    names: tuple
    by_flags: tuple = ()

    def constructor(self, name: str) -> Callable:
        """Returns the class or function that makes an object."""
        constructor = self.find(name)
        while isinstance(constructor, functools.partial):
            constructor = constructor.func
        return constructor

    def arguments(self, name: str) -> dict[str, Any]:
        """Returns a dict from the arguments of an object to their annotations."""
        parameters = inspect.signature(self.find(name), eval_str=True).parameters.values()
        return {
            parameter.name: parameter.annotation
            for parameter in parameters
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and parameter.name not in self.by_flags
        }

    def read(self, text: str) -> tuple[str, dict[str, Any], list[str]]:
        """Returns the name of an object, a dict of its arguments, and sentences about all errors.

        Args:
            text: String, the value of the flag.
        """
        name, _, rest = text.partition(":")
        if self.find(name) is None:
            near = did_you_mean(name, self.names)
            use = f"Use one of: {', '.join(self.names)}."
            return name, {}, [f"There is no {self.flag} {name!r}.{near} {use}"]
        pairs = [pair.partition("=") for pair in filter(None, rest.split(","))]
        annotations, values, problems = self.arguments(name), {}, []
        for argument, _, word in pairs:
            if argument in self.by_flags:
                problem = f"is a flag of its own: give --{argument}={word}"
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
        """Returns sentences about all errors in the value of the flag, an empty list if none."""
        problems = self.read(text)[2]
        return [*problems, f"Received: --{self.flag}={text}."] if problems else []

    def make(self, text: str, **others: Any) -> Any:
        """Builds the object that the flag names.

        Args:
            text: String, the value of the flag.
            **others: Arguments of the constructor that the run sets.

        Raises:
            UserError: If there is no such object, or an argument is invalid. It names all errors.
        """
        name, values, problems = self.read(text)
        constructor = self.find(name)
        try:
            if not problems:
                return constructor(**others, **values)
        except (TypeError, ValueError) as error:
            problems = [str(error)]
            for argument, value in values.items():
                try:
                    constructor(**others, **{argument: value})
                except ValueError as another:
                    problems.append(str(another))
                except TypeError:  # Another argument is missing.
                    pass
        received = f"Received: --{self.flag}={text}."
        raise UserError(" ".join([*dict.fromkeys(problems), received]))


def explanations(constructor: Callable) -> dict[str, str]:
    """Returns a dict from the arguments of a constructor to their lines in its docstring."""
    owners = reversed(getattr(constructor, "__mro__", (constructor,)))
    texts = [inspect.cleandoc(owner.__doc__) for owner in owners if owner.__doc__]
    lines = re.findall(r"^    (\w+): (.*?)(?=\n    \w|\n\n|\Z)", "\n\n".join(texts), re.M | re.S)
    return {argument: " ".join(text.split()) for argument, text in lines}


def without_folders(text: str | None) -> str | None:
    """Returns the value of a flag without the folders of paths in it."""
    return text and re.sub(r"(=(?:\w+:)?)[^,]*/", r"\1", text)


def _value(word, annotation):
    """Returns the value of a word, and the reason why the argument does not take it, or None."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if is_union else (annotation,)
    value, expected = _plain(word), []
    for kind in kinds:
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        if kind is str or word in choices:
            return word, None
        if kind not in _WORDS and not choices:
            return value, None  # The constructor checks it.
        if type(value) is kind or (kind is float and type(value) is int):
            return value, None
        expected += choices or [_WORDS[kind]]
    return value, f"must be {' or '.join(expected)}, not {word!r}"


def _plain(word):
    """Returns a number, a tuple of numbers, a bool or None; else the word."""
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
    """The head `tfdpx.heads.AdaMix`, with the choice of the images that are public.

    Args:
        shots: Int, the number of training images of each class to take as public, for experiments.
        public_dataset: String, public images of the same classes, as for --dataset.
        initial_weights: String, a .npy file of public weights [features, classes] to start from,
            for example of tfdpx.models.zero_shot_head.
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


# Learning rates and alpha were chosen on other samples of the mixture in docs/heads.md; the numbers
# of steps are from the paper.
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
    ("num_classes epsilon delta noise_multiplier l2_norm_clip accountant seed steps learning_rate")
    .split(),
)  # fmt: skip
