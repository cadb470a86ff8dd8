"""Flags come from the fields of settings: one each, unset, with the field's help and choices."""

import dataclasses

import pytest
from absl import flags

from tfdpx.train.config import setting_flags
from tfdpx.train.config.pretraining import Pretraining
from tfdpx.train.config.settings import setting
from tfdpx.train.config.training import Training


@pytest.mark.parametrize("settings", [Training, Pretraining])
def test_every_field_has_its_flag(settings):
    setting_flags.define(settings)
    for field in dataclasses.fields(settings):
        flag = flags.FLAGS[field.name]
        assert flag.default is None and field.metadata["help"] in flag.help
        assert getattr(flag.parser, "enum_values", None) == field.metadata["choices"]
    assert setting_flags.define(settings) == []


def test_a_flag_of_another_module_is_not_taken_for_that_of_a_field():
    taken = dataclasses.make_dataclass("Taken", [("logtostderr", bool, setting("Mine."))])
    with pytest.raises(flags.DuplicateFlagError, match="logtostderr"):
        setting_flags.define(taken)
