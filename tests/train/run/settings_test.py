"""Presets and flags: what wins, what is solved for or chosen, and what a run makes of them.

classify_test.py has what is refused.
"""

import math

import keras
import numpy as np
import pytest
import seeds

import tfdpx
from tfdpx.train.config import preset_lookup
from tfdpx.train.config.training import PRIVACY
from tfdpx.train.errors import UserError
from tfdpx.train.run import auto_settings, optimization
from tfdpx.train.run.checkpoint import RunFolder


def resolve(preset="digits", **given):
    return preset_lookup.resolve(preset, given)


def test_every_preset_resolves_at_any_budget():
    for name in preset_lookup.names():
        if resolve(name).private:
            for epsilon in (8.0, 1.0):
                settings = resolve(name, epsilon=epsilon)
                assert settings.epsilon == epsilon and settings.noise_multiplier is None


LEFT_OPEN = [
    ({}, "noise_multiplier"),
    ({"epsilon": 1.0, "steps": 7, "batch_size": 9}, "noise_multiplier"),
    ({"noise_multiplier": 0.0}, "epsilon"),
    ({"noise_multiplier": 2.0, "steps": 7}, "epsilon"),
    ({"noise_multiplier": 2.0, "epsilon": 1.0}, "steps"),
    ({"noise_multiplier": 2.0, "epsilon": 1.0, "steps": 7}, "batch_size"),
]


def test_what_is_left_open():
    for given, solved in LEFT_OPEN:
        settings, _ = auto_settings.complete(resolve(**given), 1437)
        assert [name for name in PRIVACY if getattr(settings, name) is None] == [solved]
        assert all(getattr(settings, name) == value for name, value in given.items())


def test_flags_beside_a_column_of_a_table():
    column = resolve("table12/eps8", model=None, momentum=0.25)
    assert (column.noise_multiplier, column.steps, column.epsilon) == (3.0, 2468, None)
    assert (column.model, column.momentum) == ("wrn_16_4", 0.25)
    chosen = resolve("table12/eps8", epsilon=3.0)
    assert (chosen.noise_multiplier, chosen.steps, chosen.epsilon) == (None, 2468, 3.0)
    assert resolve("table12/eps8", steps=7).noise_multiplier == 3.0


@pytest.mark.parametrize("preset", ["digits", "table12/eps8", "table21/last_eps8"])
def test_the_arm_without_privacy_keeps_everything_else(preset):
    private, plain = vars(resolve(preset)), vars(resolve(preset, private=False))
    assert (plain["noise_multiplier"], plain["epsilon"]) == (0.0, None)
    assert plain["l2_norm_clip"] == math.inf
    changed = {name for name in plain if plain[name] != private[name]}
    assert changed <= {"private", "noise_multiplier", "epsilon", "l2_norm_clip"}


def test_a_folder_has_a_preset_of_its_own():
    for dataset, preset in [(None, "digits"), ("folder:photos", "folder"), ("folders", "digits")]:
        assert preset_lookup.default_for(dataset) == preset


def chosen(num_examples=1437, replicas=1, **given):
    return auto_settings.complete(resolve(**given), num_examples, replicas)


@pytest.mark.parametrize(
    ("epsilon", "num_examples", "steps", "move"),
    [(3, 1437, 31, 1293), (0.1, 300, 10, 100), (8, 20_000, 120, 6000)],
)
def test_the_rule_of_epsilon_times_images(epsilon, num_examples, steps, move):
    settings, text = chosen(num_examples, epsilon=epsilon)
    assert settings.model == "scatter_linear" and settings.batch_size == num_examples
    assert (settings.l2_norm_clip, settings.ema_momentum) == (0.02, 0.0)
    assert settings.steps == steps
    assert settings.steps * settings.learning_rate == pytest.approx(move, rel=0.01)
    for shown in ("--model=scatter_linear", f"--steps={steps}", "0.3 * epsilon * images"):
        assert shown in text


def test_what_is_chosen_otherwise():
    given = dict(learning_rate=0.5, steps=7, l2_norm_clip=1.0, ema_momentum=0.9, epsilon=2.0)
    settings, text = chosen(**given)
    assert {name: getattr(settings, name) for name in given} == given
    assert "--learning_rate" not in text and "--batch_size=1437" in text
    settings, text = chosen(model="small_cnn", epsilon=3.0)
    assert (settings.learning_rate, settings.l2_norm_clip) == (3.1, "automatic")
    assert settings.steps == 60 and "--model" not in text
    # Replicas share a batch evenly.
    assert chosen(replicas=8, epsilon=3.0)[0].batch_size == 1432
    with pytest.raises(UserError, match=r"20,000 training images. Received: 50,000.*wrn_16_4"):
        chosen(50_000)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_smoothed_crossentropy_is_that_of_keras_for_one_hot_targets(smoothing):
    logits, labels = np.random.default_rng(0).normal(size=(6, 4)), np.array([0, 1, 2, 3, 1, 0])
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)
    wanted = float(expected(np.eye(4)[labels], logits))
    loss = optimization.crossentropy(smoothing)
    assert float(loss(labels, logits)) == pytest.approx(wanted, rel=1e-6)
    assert float(loss(labels[:, None], logits)) == pytest.approx(wanted, rel=1e-6)


def test_views_by_the_settings():
    def views(**values):
        return optimization.views(resolve(**values))

    assert views() is None
    crops = views(augmult=2, augment_padding=3)
    assert (type(crops), crops.padding, crops.flip) == (tfdpx.augment.RandomCropFlip, 3, False)
    resized = views(augmult=2, augment_resize=1.2, image_size=10, augment_flip=True)
    assert isinstance(resized, tfdpx.augment.ResizeCropFlip)
    assert (resized.height, resized.scale, resized.flip) == (10, 1.2, True)
    mixed = views(augmult=6, augment_padding=1, augment_mix=2, augment_mix_alpha=1.0)
    assert (type(mixed), mixed.mixed_views, mixed.alpha) == (tfdpx.augment.MixViews, 2, 1.0)
    assert type(mixed.augment) is tfdpx.augment.RandomCropFlip and mixed.augment.padding == 1


def small_model():
    seeds.fix(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])


@pytest.mark.slow
def test_without_privacy_the_step_is_that_of_keras_on_the_same_batch():
    settings = resolve(
        private=False, steps=3, batch_size=8, learning_rate=0.5, momentum=0.9, ema_momentum=0
    )
    plan = settings.privacy_plan(8)
    x = np.random.default_rng(1).normal(size=(8, 3)).astype("float32") * 100
    y = np.arange(8) % 4
    ours, keras_own = small_model(), small_model()
    with pytest.warns(UserWarning, match="no noise is added.*l2_norm_clip=inf"):
        optimizer = optimization.private_optimizer(settings, plan, seed=0)
    loss = optimization.crossentropy(0.1)
    ours.compile(optimizer, loss)
    keras_own.compile(keras.optimizers.SGD(0.5, momentum=0.9), loss)
    # batch_size = num_examples: Poisson sampling draws every example at every step.
    ours.fit(plan.batches(x, y, seed=0), verbose=0)
    keras_own.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    for a, b in zip(ours.get_weights(), keras_own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def begin(workdir, resume=False, **given):
    workdir.mkdir(exist_ok=True)
    folder = RunFolder(workdir, {"seed": None, "batch_size": 512, **given}, resume)
    folder.begin()
    return folder


def test_seeds_of_a_run_survive_a_resume_and_differ_between_runs_and_uses(tmp_path):
    first = begin(tmp_path / "a").seeds
    assert begin(tmp_path / "a", resume=True).seeds == first
    given, again = (begin(tmp_path / name, seed=123_456_789) for name in "bc")
    assert given.seeds == again.seeds
    assert len({seed for seeds in (first, given.seeds) for seed in seeds.values()}) == 4
    assert all(b"123456789" not in path.read_bytes() for path in given.path.iterdir())
