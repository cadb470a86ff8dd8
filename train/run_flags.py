"""Defines the flags of training: one for each setting, and flags for files and folders."""

import dataclasses
import types
import typing

from absl import flags

from tfdpx.train.errors import UserError
from tfdpx.train.settings import Settings


class _NumberOrAutomatic(flags.ArgumentParser):
    """A parser for a flag that is a number or `automatic`."""

    syntactic_help = "a number or automatic"

    def parse(self, argument):
        """Returns the number, or the word."""
        if argument == "automatic":
            return argument
        try:
            return float(argument)
        except ValueError:
            raise ValueError(f"give {self.syntactic_help}") from None

    def flag_type(self):
        """The kind of value in `--help`."""
        return self.syntactic_help


# By the type of a field, without None.
_DEFINE = {
    (str,): flags.DEFINE_string,
    (int,): flags.DEFINE_integer,
    (float,): flags.DEFINE_float,
    (bool,): flags.DEFINE_bool,
    (list,): flags.DEFINE_list,
    (float, str): lambda *args: flags.DEFINE(_NumberOrAutomatic(), *args),
}


def define(settings):
    """Defines a flag for each field that has none yet. An unset flag leaves the preset's value.

    Args:
        settings: A dataclass with fields that `setting` returned.
    """
    for field in dataclasses.fields(settings):
        text, choices = field.metadata["help"], field.metadata["choices"]
        if field.name in flags.FLAGS:
            continue
        if choices:
            flags.DEFINE_enum(field.name, None, choices, text)
            continue
        kinds = typing.get_args(field.type) or (field.type,)
        _DEFINE[tuple(kind for kind in kinds if kind is not types.NoneType)](field.name, None, text)


WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything written. Default: runs/<preset>-<date>-<time>."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with TensorFlow Datasets. Default: that of the library."
)
DOWNLOAD = flags.DEFINE_bool("download", False, "Fetch the data set if it is not in --data_dir.")
RESUME = flags.DEFINE_bool("resume", False, "Continue the unfinished run in --workdir, if any.")
FINAL = flags.DEFINE_bool(
    "final", False, "Train on all training images: --validation=0 --eval_split=test."
)
define(Settings)


def given(settings=Settings):
    """Returns a dict from the fields of `settings` to the values of their flags, None if unset.

    Args:
        settings: A dataclass that was passed to `define`.

    Raises:
        UserError: If a flag contradicts --final.
    """
    values = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(settings)}
    if not FINAL.value:
        return values
    final = {"validation": 0.0, "eval_split": "test"}
    for name, value in final.items():
        if values[name] not in (None, value):
            raise UserError(
                "Flag --final means --validation=0 --eval_split=test. Received: --final "
                f"--{name}={values[name]}."
            )
    return {**values, **final}
