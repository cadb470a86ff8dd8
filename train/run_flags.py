"""Defines the flags of training: one for each setting, and flags for files and folders."""

import dataclasses
import types
import typing

from absl import flags

from tfdpx.train.errors import UserError
from tfdpx.train.settings import Settings


class _NumberOrAutomatic(flags.FloatParser):
    def convert(self, argument):
        """Returns the number, or the word `automatic`."""
        return argument if argument == "automatic" else super().convert(argument)


# By the type of a field.
_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    list: flags.DEFINE_list,
}
for _field in dataclasses.fields(Settings):
    _help, _choices = _field.metadata["help"], _field.metadata["choices"]
    if _choices:
        flags.DEFINE_enum(_field.name, None, _choices, _help)
        continue
    _kinds = set(typing.get_args(_field.type) or (_field.type,)) - {types.NoneType}
    if _kinds == {float, str}:
        flags.DEFINE(_NumberOrAutomatic(), _field.name, None, _help)
    else:
        _DEFINE[_kinds.pop()](_field.name, None, _help)

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything written. Default: runs/<preset>-<date>-<time>."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with TensorFlow Datasets. Default: the library's."
)
DOWNLOAD = flags.DEFINE_bool("download", False, "Fetch the data set if it is not in --data_dir.")
RESUME = flags.DEFINE_bool("resume", False, "Continue the unfinished run in --workdir, if any.")
FINAL = flags.DEFINE_bool(
    "final", False, "Train on all training images: --validation=0 --eval_split=test."
)


def given():
    """Returns a dict from the fields of `Settings` to the values of their flags, None if unset.

    Raises:
        UserError: If a flag contradicts --final.
    """
    values = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Settings)}
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
