"""What --grid means, and what it may not say."""

import pytest
from absl import flags
from absl.testing import flagsaver
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.train import sweep
from tfdpx.train.config import preset_lookup, setting_flags
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import auto_settings
from tfdpx.train.sweeps.grid import HELD_OUT, parse, runs


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["sweep"])


values = st.lists(st.integers(1, 999), min_size=1, max_size=4, unique=True)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["steps", "batch_size", "augmult"]), values, min_size=1))
def test_a_grid_is_what_its_text_says(grid):
    text = ";".join(f"{name}={','.join(map(str, several))}" for name, several in grid.items())
    assert parse(text) == {name: tuple(several) for name, several in grid.items()}


def test_values_have_the_types_of_their_flags():
    grid = parse(" learning_rate = 1, 2.5 ;group_norm=false,true;microbatch_size=4,8")
    assert grid == {
        "learning_rate": (1.0, 2.5),
        "group_norm": (False, True),
        "microbatch_size": (4, 8),
    }
    assert isinstance(grid["learning_rate"][0], float)


ERRORS = [
    ("", "lists settings and their values"),
    ("learning_rate", "Received: 'learning_rate'"),
    ("learning_rate=", "lists settings and their values"),
    ("color=1", "can sweep .*learning_rate.*Received: --grid=color=1"),
    ("seed=1,2", "can sweep"),
    ("steps=1;steps=2", "names steps twice"),
    ("steps=1,1", "a value twice"),
    ("steps=many", "invalid value of steps.*Received: 'many'"),
    ("optimizer=sgd", "invalid value of optimizer"),
]


def test_errors():
    for text, message in ERRORS:
        with pytest.raises(UserError, match=message):
            parse(text)


def runs_of(text, given=(), preset="digits", seeds=(0,)):
    return runs(preset, dict(given), parse(text), seeds)


@pytest.mark.slow
def test_every_point_runs_with_every_seed_at_one_epsilon():
    made = runs_of("batch_size=128,512;learning_rate=1,2", {"epsilon": 3.0}, seeds=(4, 5))
    assert len({run.name for run in made}) == len(made) == 8
    assert {run.settings.epsilon for run in made} == {3.0}
    complete = [auto_settings.complete(run.settings, 1000)[0] for run in made]
    sigmas = {each.batch_size: each.privacy_plan(1000).noise_multiplier for each in complete}
    assert sigmas[512] > 1.5 * sigmas[128]  # A budget that stays fixed, and not the noise.
    assert [run.settings.seed for run in made] == [4, 5] * 4


def test_the_arguments_of_a_run_lead_to_its_settings():
    for run in runs_of("group_norm=true,false;steps=7", {"private": True, "augmult": 0}):
        preset, *rest = run.arguments
        assert preset == "--preset=digits"
        with flagsaver.flagsaver():
            flags.FLAGS(["classify", *rest])
            assert preset_lookup.resolve("digits", setting_flags.given()) == run.settings


def test_a_grid_may_complete_what_the_flags_begin():
    made = runs_of("augmult=1,2", {"augment_padding": 1})
    assert [run.settings.augmult for run in made] == [1, 2]
    made = runs_of("optimizer=dpadamw;learning_rate=1,2", {"weight_decay": 0.01})
    assert {run.settings.weight_decay for run in made} == {0.01}


@pytest.mark.parametrize(
    "text", ["batch_size=256,512", "noise_multiplier=2,3", "preset=table12/eps6,table12/eps8"]
)
def test_points_of_budgets_that_differ_silently_are_refused(text):
    preset = "digits" if text.startswith("preset") else "table12/eps8"
    with pytest.raises(UserError, match=f"Sweeping {text.partition('=')[0]} changes epsilon"):
        runs_of(text, preset=preset)
    assert {run.settings.epsilon for run in runs_of(text, {"epsilon": 2.0}, preset)} == {2.0}
    both = runs_of(f"{text};epsilon=1,2", (), preset)
    assert {run.settings.epsilon for run in both} == {1.0, 2.0}


def test_a_budget_that_nothing_changes_need_not_be_known():
    assert runs_of("learning_rate=1,2", preset="table12/eps8")[0].settings.epsilon is None
    assert runs_of("batch_size=1,2", {"private": False}, "table12/eps8")[0].settings.epsilon is None


def test_presets_are_swept_like_settings():
    made = runs_of("preset=table2/baseline,table2/ema")
    assert [run.arguments[0] for run in made] == ["--preset=table2/baseline", "--preset=table2/ema"]
    assert [run.settings.ema_momentum for run in made] == [0.0, 0.9999]
    assert not any(
        argument.startswith("--preset") for run in made for argument in run.arguments[1:]
    )
    with pytest.raises(UserError, match="no preset 'table2/none'"):
        runs_of("preset=table2/none")


def test_images_are_held_out_unless_preset_or_flags_say_what_to_measure_on():
    assert runs_of("steps=5")[0].settings.validation == HELD_OUT
    assert runs_of("steps=5", {"eval_split": "test"})[0].settings.validation == 0
    assert runs_of("steps=5", {"validation": 0.0})[0].settings.validation == 0
    assert runs_of("learning_rate=1", preset="table2/ema")[0].settings.validation == 0.1


@pytest.mark.parametrize("preset", ["digits", "table12/eps8", "table12/eps6", "table2/ema"])
def test_nothing_is_chosen_on_test_images_unless_the_flags_ask_for_it(preset):
    for said in ({}, {"validation": 0.1}):
        chosen = runs_of("learning_rate=1", said, preset)[0].settings
        assert chosen.eval_split == "validation" and chosen.validation > 0
    asked = runs_of("learning_rate=1", {"eval_split": "test"}, preset)[0].settings
    assert asked.eval_split == "test"


def test_what_is_swept_cannot_be_given_too():
    with pytest.raises(UserError, match="--steps=3"):
        runs_of("steps=5,6", {"steps": 3})
    with pytest.raises(UserError, match="--steps must be at least 1"):
        runs_of("steps=0")


@pytest.mark.parametrize("texts", [[], ["a"], ["-1"], ["1.5"], ["0", "0"]])
def test_unfit_seeds(texts):
    with pytest.raises(UserError, match="--seeds"):
        sweep.parse_seeds(texts)
