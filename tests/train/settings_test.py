"""Presets and flags: their precedence, solved and chosen quantities, and the step of a run.

classify_test.py has the refusals.
"""

import math
import sys

import keras
import numpy as np
import pytest
import seeds

import tfdpx
from tfdpx.train import defaults, fitting, heads, objects, settings
from tfdpx.train.errors import UserError


def resolve(preset="digits", **arguments):
    return settings.resolve(preset, arguments)


def chosen(num_examples=1437, replicas=1, **arguments):
    return defaults.complete(resolve(**arguments), num_examples, replicas)


LEFT_OPEN = [
    ({}, "noise_multiplier"),
    ({"epsilon": 1.0, "steps": 7, "batch_size": 9}, "noise_multiplier"),
    ({"noise_multiplier": 0.0}, "epsilon"),
    ({"noise_multiplier": 2.0, "steps": 7}, "epsilon"),
    ({"noise_multiplier": 2.0, "epsilon": 1.0}, "steps"),
    ({"noise_multiplier": 2.0, "epsilon": 1.0, "steps": 7}, "batch_size"),
]


def test_the_quantity_that_is_left_open():
    for arguments, solved in LEFT_OPEN:
        values, _ = chosen(**arguments)
        assert [name for name in settings.PRIVACY if getattr(values, name) is None] == [solved]
        assert all(getattr(values, name) == value for name, value in arguments.items())


def test_flags_beside_a_column_of_a_table():
    column = resolve("table12/eps8", model=None, optimizer="dpsgd:momentum=0.25")
    assert (column.noise_multiplier, column.steps, column.epsilon) == (3.0, 2468, None)
    assert (column.model, column.optimizer) == ("wrn_16_4", "dpsgd:momentum=0.25")
    values = resolve("table12/eps8", epsilon=3.0)
    assert (values.noise_multiplier, values.steps, values.epsilon) == (None, 2468, 3.0)
    assert resolve("table12/eps8", steps=7).noise_multiplier == 3.0


def test_right_guesses_take_the_place_of_epsilon():
    values, text = chosen(right_guesses=65.0)
    assert (values.epsilon, values.noise_multiplier) == (None, None)
    assert values.learning_rate == chosen(epsilon=3.2456)[0].learning_rate
    plan = values.privacy_plan(1437)
    assert plan.right_guesses == 0.65 and 3.245 < plan.epsilon < 3.246
    column = resolve("table12/eps8", right_guesses=60.0)
    assert (column.noise_multiplier, column.steps, column.epsilon) == (None, 2468, None)
    noisy, _ = chosen(right_guesses=60.0, noise_multiplier=40.0)
    assert noisy.privacy_plan(1437).attack_bounds().right_guesses <= 0.6
    head = heads.build(resolve(None, dataset="digits", head="newton", right_guesses=60.0), 10)
    assert head.noise_multiplier == pytest.approx(10**0.5 / 0.50669, rel=0.5)
    assert head.epsilon == pytest.approx(2.0229, abs=1e-3)
    for arguments, message in (
        ({"right_guesses": 60.0, "epsilon": 1.0}, "Give one of --epsilon and --right_guesses"),
        ({"right_guesses": 0.6}, "--right_guesses must lie between 50 and 100"),
        ({"right_guesses": 60.0, "private": False}, "--private=false means no noise"),
        ({"right_guesses": 60.0, "sampling": "shuffle", "batch_size": 64}, '"poisson" with'),
    ):
        with pytest.raises(UserError, match=message):
            chosen(**arguments)[0].privacy_plan(1437)


def test_the_arm_without_privacy_keeps_everything_else():
    for preset in ("digits", "table12/eps8", "table21/last_eps8"):
        private, plain = vars(resolve(preset)), vars(resolve(preset, private=False))
        assert (plain["noise_multiplier"], plain["epsilon"]) == (0.0, None)
        assert plain["l2_norm_clip"] == math.inf
        changed = {name for name in plain if plain[name] != private[name]}
        assert changed <= {"private", "noise_multiplier", "epsilon", "l2_norm_clip"}


@pytest.mark.parametrize(
    ("epsilon", "num_examples", "move", "steps"),
    [(3, 1437, 1207, 200), (0.1, 300, 8.4, 200), (8, 4000, 8960, 498), (8, 20_000, 10_800, 600)],
)
def test_the_rule_of_epsilon_times_images(epsilon, num_examples, move, steps):
    values, text = chosen(num_examples, epsilon=epsilon)
    assert values.model == "scatter_linear" and values.batch_size == num_examples
    assert (values.l2_norm_clip, values.ema_momentum, values.steps) == (0.1, 0.9, steps)
    assert values.steps * values.learning_rate == pytest.approx(move, rel=0.02)
    for phrase in ("--model=scatter_linear", f"--steps={steps}", "0.28 * epsilon * N"):
        assert phrase in text


def test_other_choices():
    arguments = dict(learning_rate=0.5, steps=7, l2_norm_clip=1.0, ema_momentum=0.9, epsilon=2.0)
    values, text = chosen(**arguments)
    assert {name: getattr(values, name) for name in arguments} == arguments
    assert "--learning_rate" not in text and "--batch_size=1437" in text
    values, text = chosen(model="small_cnn", epsilon=3.0)
    plan = values.privacy_plan(1437)
    assert values.learning_rate == tfdpx.suggest(plan, defaults.WEIGHTS).learning_rate
    assert (values.l2_norm_clip, values.steps) == (0.1, 200) and "--model" not in text
    sketched, text = defaults.complete(
        resolve(model="small_cnn", epsilon=1.0), 1437, sketch=lambda name: 3 * 10**6
    )
    assert sketched.learning_rate < values.learning_rate / 2 and "Hopeless" in text
    network = tfdpx.models.SmallCNN(10, (8, 8, 1))
    remedies = (
        "--trainable=last with --init_from, --warm_start, --model=scatter_linear, more examples"
    )
    text = defaults.complete(
        resolve(model="small_cnn", epsilon=0.1), 1437, sketch=lambda name: network
    )[1]
    assert remedies in text and "`" not in text
    # An individual clip lies below a constant.
    assert chosen(model="small_cnn", individual=True)[0].l2_norm_clip == 1.0
    # Replicas share a batch evenly.
    assert chosen(replicas=8, epsilon=3.0)[0].batch_size == 1432
    with pytest.raises(UserError, match=r"20,000 training images. Received: 50,000.*wrn_16_4"):
        chosen(50_000)


def test_flags_of_another_kind_of_run_and_all_problems_are_named_at_once():
    table, head = {"dataset": "csv:x.csv"}, {"head": "newton", "dataset": "digits"}
    for arguments, message in [
        ({**head, "augmult": 2, "target": "y"}, "--augmult .*--target belongs to tables, not"),
        ({**head, "head": "newton:quantile=3", "steps": 0}, "--steps must.*'quantile' of newton"),
        ({"pixels": "0..1", **table}, "--pixels belongs to images and heads, not to tables"),
        ({"steps": 0, "seed": -1}, "--steps must be at least 1.*--seed must not be negative"),
        (
            {"augment": "Flop", "optimizer": "dpadam:beta=0"},
            "of dpadam does not.*no augment 'Flop'",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            settings.resolve(None, arguments)
    with pytest.raises(UserError, match="Flag --preset belongs to images, not to heads"):
        settings.resolve("digits", head)


def views(text, shape=(8, 8, 1)):
    return objects.AUGMENTATIONS.make(resolve(augmult=4, augment=text).augment, shape)


def test_views_by_layers_of_keras_cv():
    pytest.importorskip("keras_cv", exc_type=ImportError)  # None can be with Keras 3.16.
    cutout = views("RandomCutout:height_factor=0.3,width_factor=0.1..0.2")
    assert type(cutout).__module__.startswith("keras_cv")


def test_a_keras_cv_that_cannot_be_imported_has_no_layers(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_cv", None)
    with pytest.raises(UserError, match="no augment 'Cutout'.*keras_cv.layers.*--augment=Cutout"):
        views("Cutout")


def test_views_by_name():
    resized = views("ResizeCropFlip:scale=1.5,flip=false", (10, 12, 3))
    assert isinstance(resized, tfdpx.augment.ResizeCropFlip)
    assert (resized.height, resized.width, resized.scale, resized.flip) == (10, 12, 1.5, False)
    assert objects.view_scale("ResizeCropFlip:scale=1.5") == 1.5
    several = views("RandomFlip:mode=horizontal+RandomContrast:factor=2e-1")
    assert [type(layer).__name__ for layer in several.layers] == ["RandomFlip", "RandomContrast"]
    assert several.layers[0].mode == "horizontal"
    assert several.layers[1].factor == keras.layers.RandomContrast(0.2).factor
    mixed = views("RandomCropFlip:padding=1,flip=false+MixViews:mixed_views=2")
    assert (mixed.augment.padding, mixed.augment.flip, mixed.mixed_views) == (1, False, 2)


OBJECTS = [
    (
        dict(model="wrn_16_4:groups=many,norm=false"),
        "a whole number or none, not 'many'.*'norm' of.*norm_before_relu",
    ),
    (dict(model="resnet"), "no model 'resnet'.*Use one of: small_cnn, scatter_linear"),
    (dict(optimizer="dpadamw:decay=1,momentum=2"), "'decay' of.*weight_decay.*'momentum' of"),
    (dict(optimizer="dpsgd:momentum=7"), "between .0, 1..*--optimizer=dpsgd:momentum=7"),
    (dict(optimizer="dpsgd:learning_rate=3"), "give --learning_rate=3"),
    (dict(schedule="cosine:warmup=3"), "Did you mean 'warmup_steps'"),
    (dict(augment="RandomFlip:modus=x+Flop"), "'modus' of RandomFlip.*'mode'"),
    (dict(augment="RandomRotation"), "missing 1 required.*'factor'"),
    (dict(augment="RandomCropFlip+RandomFlip"), "joined by +"),
    (dict(augment="MixViews:mixed_views=2"), "comes last, after what it mixes"),
]


@pytest.mark.parametrize(("arguments", "message"), OBJECTS)
def test_all_errors_of_an_object_are_named_with_the_remedy(arguments, message):
    with pytest.raises(UserError, match=message.replace("+", "[+]")):
        resolve(augmult=4 if "augment" in arguments else 0, **arguments)


def test_learning_rates_follow_their_schedule():
    def rates(count, text, rate, steps=50):
        schedule = objects.SCHEDULES.make(text, learning_rate=rate, steps=steps)
        return [float(schedule(i)) for i in range(count)]

    stepped = rates(7, "step:decay_steps=3..5", 0.2)
    np.testing.assert_allclose(stepped, [0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002], rtol=1e-5)
    for warmup in (0, 10):
        cosine, steps = rates(51, f"cosine:warmup_steps={warmup}", 0.4), np.arange(51)
        fall = 0.2 * (1 + np.cos(np.pi * (steps - warmup) / (50 - warmup)))
        expected = np.where(steps < warmup, 0.04 * steps, fall)
        np.testing.assert_allclose(cosine, expected, atol=1e-6)
    with pytest.raises(UserError, match="below --steps.*warmup_steps=50, --steps=50"):
        rates(1, "cosine:warmup_steps=50", 0.4)


# The paper's Table 11 and appendix C.3; Keras's weight decay is the paper's times 10.
PRETRAINING = {
    "cifar100": dict(batch_size=128, steps=100_000, learning_rate=0.1, validation=0,
        optimizer="dpsgd:momentum=0.9,weight_decay=0.005",
        schedule="step:decay_steps=50000..75000"),
    "imagenet32": dict(batch_size=1024, steps=240_000, learning_rate=0.3, schedule=None,
        optimizer="dpsgd:momentum=0.9,weight_decay=0.0005", validation=10_000),
    "jft": dict(schedule="cosine:warmup_steps=5000", learning_rate=0.4, image_size=224,
        optimizer="dpsgd:momentum=0.9,weight_decay=0.00001"),
}  # fmt: skip


def test_pretraining_of_the_paper():
    for name, wanted in PRETRAINING.items():
        values = vars(resolve(f"pretrain/{name}"))
        assert {key: values[key] for key in wanted} == wanted and not values["private"]


def small_model():
    seeds.fix(0)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])


@pytest.mark.slow
def test_without_privacy_the_step_is_that_of_keras_on_the_same_batch():
    values = resolve(
        private=False, steps=3, batch_size=8, learning_rate=0.5, ema_momentum=0, seed=0,
        optimizer="dpsgd:momentum=0.9,weight_decay=0.1",
    )  # fmt: skip
    plan = values.privacy_plan(8)
    x = np.random.default_rng(1).normal(size=(8, 3)).astype("float32") * 100
    y = np.arange(8) % 4
    ours, keras_own = small_model(), small_model()
    with pytest.warns(UserWarning, match="no noise is added.*l2_norm_clip=inf"):
        optimizer = fitting.private_optimizer(values, plan, (3,))
    smoothed = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    ours.compile(optimizer, fitting.crossentropy(0.1))
    keras_own.compile(keras.optimizers.SGD(0.5, 0.9, weight_decay=0.1), smoothed)
    # batch_size = num_examples: Poisson sampling draws every example at every step.
    ours.fit(plan.batches(x, y, seed=0), verbose=0)
    keras_own.fit(x, np.eye(4)[y], batch_size=8, epochs=3, shuffle=False, verbose=0)
    for a, b in zip(ours.get_weights(), keras_own.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
