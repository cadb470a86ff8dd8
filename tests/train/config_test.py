"""Presets and flags: what wins, what is solved for, what is refused and in which words."""

import math

import pytest

from tfdpx.train import config
from tfdpx.train.errors import UserError


def test_digits_is_a_preset_and_every_preset_resolves():
    assert "digits" in config.preset_names()
    for name in config.preset_names():
        for epsilon in (8.0, 3.0, 1.0):
            settings = config.resolve(name, {"epsilon": epsilon})
            assert settings.epsilon == epsilon and settings.noise_multiplier is None


def test_flags_win_over_the_preset_and_unset_flags_do_not():
    settings = config.resolve("digits", {"learning_rate": 0.25, "momentum": 0.0, "model": None})
    assert settings.learning_rate == 0.25
    assert settings.momentum == 0.0
    assert settings.model == config.resolve("digits", {}).model


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ({}, "noise_multiplier"),
        ({"epsilon": 1.0}, "noise_multiplier"),
        ({"epsilon": 1.0, "steps": 7, "batch_size": 9}, "noise_multiplier"),
        ({"noise_multiplier": 2.0}, "epsilon"),
        ({"noise_multiplier": 0.0}, "epsilon"),
        ({"noise_multiplier": 2.0, "steps": 7}, "epsilon"),
        ({"noise_multiplier": 2.0, "epsilon": 1.0}, "steps"),
        ({"noise_multiplier": 2.0, "epsilon": 1.0, "steps": 7}, "batch_size"),
    ],
)
def test_what_is_left_open(given, solved):
    settings = config.resolve("digits", given)
    assert [name for name in config.PRIVACY if getattr(settings, name) is None] == [solved]
    assert all(getattr(settings, name) == value for name, value in given.items())


def test_all_four_given_is_an_error():
    given = {"noise_multiplier": 2.0, "epsilon": 1.0, "steps": 7, "batch_size": 9}
    with pytest.raises(UserError, match="exactly three.*--noise_multiplier=2.0 --epsilon=1.0"):
        config.resolve("digits", given)


@pytest.mark.parametrize("name", ["no_such_preset", "", "../digits", "__init__"])
def test_unknown_preset_lists_the_known_ones(name):
    with pytest.raises(UserError, match="Use one of: .*digits"):
        config.resolve(name, {})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("epsilon", 0.0),
        ("epsilon", -1.0),
        ("epsilon", math.nan),
        ("epsilon", math.inf),
        ("delta", 0.0),
        ("delta", 1.0),
        ("delta", math.nan),
        ("noise_multiplier", -0.1),
        ("noise_multiplier", math.inf),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("l2_norm_clip", -1.0),
        ("l2_norm_clip", math.inf),
        ("momentum", 1.0),
        ("ema_momentum", -0.1),
        ("ema_momentum", 1.0),
        ("weight_decay", -1.0),
        ("validation", 1.0),
        ("steps", 0),
        ("batch_size", 0),
        ("microbatch_size", 0),
        ("report_every", 0),
        ("augmult", -1),
        ("augment_padding", -1),
        ("seed", -1),
    ],
)
def test_values_out_of_range_name_flag_and_value(flag, value):
    with pytest.raises(UserError, match=f"--{flag}={value}"):
        config.resolve("digits", {flag: value})


@pytest.mark.parametrize(
    "given",
    [
        {"augmult": 4, "augment_padding": 0, "augment_flip": False},
        {"augmult": 0, "augment_padding": 1},
        {"augmult": 0, "augment_padding": 0, "augment_flip": True},
    ],
)
def test_views_without_augmentation_and_the_reverse(given):
    with pytest.raises(UserError, match="--augmult"):
        config.resolve("digits", given)


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": "dpadam", "momentum": 0.9},
        {"optimizer": "dpsgd", "weight_decay": 0.1},
    ],
)
def test_settings_that_the_optimizer_would_ignore(given):
    with pytest.raises(UserError, match="--optimizer"):
        config.resolve("digits", given)


@pytest.mark.parametrize(
    ("epsilon", "steps", "learning_rate"),
    [(1.0, 875, 2.0), (3.0, 1593, 2.0), (8.0, 2468, 4.0), (0.1, 875, 2.0), (6.5, 1843, 4.0)],
)
def test_cifar10_follows_table_12(epsilon, steps, learning_rate):
    settings = config.resolve("cifar10_wrn_16_4", {"epsilon": epsilon})
    assert (settings.steps, settings.learning_rate) == (steps, learning_rate)
    assert (settings.batch_size, settings.augmult, settings.l2_norm_clip) == (4096, 16, 1.0)


def test_a_microbatch_size_is_a_number_or_auto():
    parser = config.MicrobatchSizeParser()
    assert parser.parse("32") == 32
    assert parser.parse("auto") == "auto"
    for wrong in ("Auto", "1.5", ""):
        with pytest.raises(ValueError, match="integer or auto"):
            parser.parse(wrong)
    assert config.resolve("digits", {"microbatch_size": "auto"}).microbatch_size == "auto"
