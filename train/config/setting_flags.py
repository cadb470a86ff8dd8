"""Flags from the fields of settings: one of the same name for each, unset by default."""

import dataclasses
import types
import typing

from absl import flags

from tfdpx.train.config.training import Training
from tfdpx.train.errors import UserError


class NumberOrAutomatic(flags.ArgumentParser):
    """Parser of a flag that is a number or `automatic`."""

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
        """What `--help` calls values of this flag."""
        return self.syntactic_help


# By the types of a field, None aside.
_DEFINE = {
    (str,): flags.DEFINE_string,
    (int,): flags.DEFINE_integer,
    (float,): flags.DEFINE_float,
    (bool,): flags.DEFINE_bool,
    (list,): flags.DEFINE_list,
    (float, str): lambda *args: flags.DEFINE(NumberOrAutomatic(), *args),
}


def define(settings):
    """Defines a flag for each field that has none yet, and returns their names.

    Unset means: as the preset or the recipe says.

    Args:
        settings: A dataclass whose fields `settings.setting` made.
    """
    owner, fields = flags.FLAGS.find_module_defining_flag, dataclasses.fields(settings)
    fresh = [field for field in fields if owner(field.name) != __name__]
    for field in fresh:
        text, choices = field.metadata["help"], field.metadata["choices"]
        if choices:
            flags.DEFINE_enum(field.name, None, choices, text)
        else:
            kinds = typing.get_args(field.type) or (field.type,)
            kinds = tuple(kind for kind in kinds if kind is not types.NoneType)
            _DEFINE[kinds](field.name, None, text)
    return [field.name for field in fresh]


_FINAL = flags.DEFINE_bool(
    "final", False, "Train on all training images: --validation=0 --eval_split=test."
)
define(Training)


def given(settings=Training):
    """Returns what the flags say, a dict from the fields of `settings`; None where they are unset.

    Args:
        settings: A dataclass for which `define` was called.

    Raises:
        UserError: If --final comes with something that it excludes.
    """
    values = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(settings)}
    if not _FINAL.value:
        return values
    final = {"validation": 0.0, "eval_split": "test"}
    for name, value in final.items():
        if values[name] not in (None, value):
            raise UserError(
                "Flag --final means --validation=0 --eval_split=test. Received: --final "
                f"--{name}={values[name]}."
            )
    return {**values, **final}
