"""Presets and flags: what wins, what is solved for, what is refused and in which words."""

import math

import pytest

from tfdpx.train.config import preset_lookup, setting_flags
from tfdpx.train.config.errors import UserError
from tfdpx.train.config.training import PRIVACY
from tfdpx.train.run import auto_settings


def test_digits_is_a_preset_and_every_preset_resolves():
    assert "digits" in preset_lookup.names()
    for name in preset_lookup.names():
        if preset_lookup.resolve(name, {}).private is False:
            continue
        for epsilon in (8.0, 3.0, 1.0):
            settings = preset_lookup.resolve(name, {"epsilon": epsilon})
            assert settings.epsilon == epsilon and settings.noise_multiplier is None


def test_flags_win_over_the_preset_and_unset_flags_do_not():
    settings = preset_lookup.resolve(
        "digits", {"learning_rate": 0.25, "momentum": 0.0, "model": None}
    )
    assert settings.learning_rate == 0.25
    assert settings.momentum == 0.0
    assert settings.model == preset_lookup.resolve("digits", {}).model


LEFT_OPEN = [
    ({}, "noise_multiplier"),
    ({"epsilon": 1.0}, "noise_multiplier"),
    ({"epsilon": 1.0, "steps": 7, "batch_size": 9}, "noise_multiplier"),
    ({"noise_multiplier": 2.0}, "epsilon"),
    ({"noise_multiplier": 0.0}, "epsilon"),
    ({"noise_multiplier": 2.0, "steps": 7}, "epsilon"),
    ({"noise_multiplier": 2.0, "epsilon": 1.0}, "steps"),
    ({"noise_multiplier": 2.0, "epsilon": 1.0, "steps": 7}, "batch_size"),
]


def test_what_is_left_open():
    for given, solved in LEFT_OPEN:
        settings, _ = auto_settings.complete(preset_lookup.resolve("digits", given), 1437)
        assert [name for name in PRIVACY if getattr(settings, name) is None] == [solved]
        assert all(getattr(settings, name) == value for name, value in given.items())


def test_all_four_given_is_an_error():
    given = {"noise_multiplier": 2.0, "epsilon": 1.0, "steps": 7, "batch_size": 9}
    with pytest.raises(UserError, match="Exactly one of --noise_multiplier.*Left out: none"):
        preset_lookup.resolve("digits", given)


UNKNOWN_PRESETS = ["no_such_preset", "", "../digits", "__init__"]


def test_unknown_preset_lists_the_known_ones():
    for name in UNKNOWN_PRESETS:
        with pytest.raises(UserError, match="Use one of: .*digits"):
            preset_lookup.resolve(name, {})


OUT_OF_RANGE = [
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
    ("validation", 2.5),
    ("validation", math.inf),
    ("augment_resize", 0.5),
    ("augment_resize", math.inf),
    ("image_size", 0),
    ("steps", 0),
    ("batch_size", 0),
    ("microbatch_size", 0),
    ("report_every", 0),
    ("augmult", -1),
    ("augment_padding", -1),
    ("augment_mix", -1),
    ("seed", -1),
]


def test_values_out_of_range_name_flag_and_value():
    for flag, value in OUT_OF_RANGE:
        with pytest.raises(UserError, match=f"--{flag}={value}"):
            preset_lookup.resolve("digits", {flag: value})


VIEWS_ALONE = [
    {"augmult": 4, "augment_padding": 0, "augment_flip": False},
    {"augmult": 0, "augment_padding": 1},
    {"augmult": 0, "augment_padding": 0, "augment_flip": True},
]


def test_views_without_augmentation_and_the_reverse():
    for given in VIEWS_ALONE:
        with pytest.raises(UserError, match="--augmult"):
            preset_lookup.resolve("digits", given)


IGNORED = [
    {"optimizer": "dpadam", "momentum": 0.9},
    {"optimizer": "dpsgd", "weight_decay": 0.1},
]


def test_settings_that_the_optimizer_would_ignore():
    for given in IGNORED:
        with pytest.raises(UserError, match="--optimizer"):
            preset_lookup.resolve("digits", given)


def test_budget_and_steps_given_beside_a_column_of_a_table():
    column = preset_lookup.resolve("table12/eps8", {})
    assert (column.noise_multiplier, column.steps, column.epsilon) == (3.0, 2468, None)
    chosen = preset_lookup.resolve("table12/eps8", {"epsilon": 3.0})
    assert (chosen.noise_multiplier, chosen.steps, chosen.epsilon) == (None, 2468, 3.0)
    assert preset_lookup.resolve("table12/eps8", {"steps": 7}).noise_multiplier == 3.0


def test_a_column_wins_over_what_its_table_shares():
    assert preset_lookup.resolve("table19/eps0.5", {}).batch_size == 1024
    assert preset_lookup.resolve("table19/eps1", {}).batch_size == 4096


@pytest.mark.parametrize("preset", ["digits", "table12/eps8", "table2/ema", "table21/last_eps8"])
def test_the_arm_without_privacy_keeps_everything_else(preset):
    private, plain = (
        preset_lookup.resolve(preset, {}),
        preset_lookup.resolve(preset, {"private": False}),
    )
    assert (plain.noise_multiplier, plain.epsilon, plain.l2_norm_clip) == (0.0, None, math.inf)
    changed = {name for name in vars(plain) if vars(plain)[name] != vars(private)[name]}
    assert changed <= {"private", "noise_multiplier", "epsilon", "l2_norm_clip"}


WITH_NOISE = [{"epsilon": 1.0}, {"noise_multiplier": 1.0}, {"l2_norm_clip": 1.0}]


def test_what_the_arm_without_privacy_would_ignore():
    for given in WITH_NOISE:
        [(name, value)] = given.items()
        with pytest.raises(UserError, match=f"--private=false.*--{name}={value}|Exactly one"):
            preset_lookup.resolve("table21/all_inf", given)


CONTRADICTIONS = [
    ({"trainable": "last"}, "--init_from"),
    ({"trainable": "first"}, "--trainable=first"),
    ({"eval_split": "validation"}, "--validation=0.0"),
    ({"eval_split": "train"}, "--eval_split=train"),
    ({"augmult": 2, "augment_resize": 1.2}, "--image_size=None"),
    (
        {"augmult": 2, "augment_resize": 1.2, "image_size": 64, "augment_padding": 4},
        "--augment_padding=4",
    ),
    ({"augment_resize": 1.2, "image_size": 64}, "--augmult=0"),
    ({"augment_mix": 2}, "--augment_mix=2 --augmult=0"),
    ({"augment_mix": 3, "augmult": 4, "augment_padding": 1}, "--augment_mix=3 --augmult=4"),
    ({"augment_mix_alpha": 0.5}, "--augment_mix=0"),
    ({"augment_mix_alpha": 0.0}, "--augment_mix_alpha=0.0"),
]


def test_settings_that_do_not_go_together():
    for given, message in CONTRADICTIONS:
        with pytest.raises(UserError, match=message):
            preset_lookup.resolve("digits", given)


UNKNOWN_COLUMNS = ["table12", "table12/", "table12/eps5", "table11/eps8", "digits/eps8"]


def test_unknown_column_lists_the_known_ones():
    for preset in UNKNOWN_COLUMNS:
        with pytest.raises(UserError, match=r"table12/\(eps1\|eps2"):
            preset_lookup.resolve(preset, {})


DEFAULTS = [
    (None, "digits"),
    ("mnist", "digits"),
    ("folder:photos", "folder"),
    ("folders", "digits"),
]


def test_a_folder_has_a_preset_of_its_own():
    for dataset, preset in DEFAULTS:
        assert preset_lookup.default_for(dataset) == preset
        assert preset_lookup.resolve(preset, {"dataset": dataset}).model == "auto"


def test_a_clip_is_a_number_or_automatic():
    parser = setting_flags.NumberOrAutomatic()
    assert parser.parse("0.5") == 0.5 and parser.parse("automatic") == "automatic"
    settings = preset_lookup.resolve("digits", {"l2_norm_clip": "automatic"})
    assert settings.l2_norm_clip == "automatic"
    with pytest.raises(UserError, match="must be automatic or positive"):
        preset_lookup.resolve("digits", {"l2_norm_clip": -1.0})
