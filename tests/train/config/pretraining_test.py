"""Schedules and weight decay against their formulas; recipes against appendix C.3 of the paper."""

import keras
import numpy as np
import pytest

from tfdpx.train.config import pretraining
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import optimization


def resolve(recipe="digits", **given):
    return pretraining.resolve(recipe, given)


def test_recipes_of_the_paper():
    cifar, imagenet = resolve("cifar100"), resolve("imagenet32")
    assert (cifar.batch_size, cifar.steps, cifar.learning_rate) == (128, 100_000, 0.1)
    assert (cifar.weight_decay, cifar.decay_steps) == (5e-4, [50_000, 75_000])
    assert (imagenet.batch_size, imagenet.steps, imagenet.learning_rate) == (1024, 240_000, 0.3)
    assert (imagenet.weight_decay, imagenet.schedule) == (5e-5, "constant")
    jft = resolve("jft", dataset="imagenet2012", steps=6_000)
    assert (jft.schedule, jft.warmup_steps) == ("cosine", 5_000)
    assert (jft.learning_rate, jft.weight_decay, jft.image_size) == (0.4, 1e-6, 224)
    with pytest.raises(UserError, match="--warmup_steps.*below --steps.*--steps=9"):
        resolve("jft", dataset="imagenet2012", steps=9, warmup_steps=9)
    with pytest.raises(UserError, match="--dataset must be given"):
        resolve("jft")
    assert {r.momentum for r in (cifar, imagenet, jft)} == {0.9}


def rates(settings, steps):
    schedule = optimization.learning_rates(settings)
    if isinstance(schedule, float):
        return np.full(len(steps), schedule)
    return np.array([float(schedule(step)) for step in steps])


def test_a_step_takes_a_tenth_after_so_many_updates():
    settings = resolve(schedule="step", decay_steps=[3, 5], learning_rate=0.2)
    np.testing.assert_allclose(
        rates(settings, range(7)), [0.2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002], rtol=1e-5
    )


@pytest.mark.parametrize("warmup", [0, 10])
def test_cosine_rises_from_zero_and_falls_to_zero(warmup):
    settings = resolve(schedule="cosine", warmup_steps=warmup, steps=50, learning_rate=0.4)
    steps = np.arange(51)
    rise = 0.4 * steps / max(warmup, 1)
    fall = 0.2 * (1 + np.cos(np.pi * (steps - warmup) / (50 - warmup)))
    expected = np.where(steps < warmup, rise, fall)
    np.testing.assert_allclose(rates(settings, steps), expected, atol=1e-6)


def test_constant():
    settings = resolve(schedule="constant", learning_rate=0.3)
    assert settings.warmup_steps == 0
    np.testing.assert_array_equal(rates(settings, range(3)), 0.3)


def test_weight_decay_is_added_to_the_gradient_before_the_momentum():
    settings = resolve(
        schedule="constant", learning_rate=0.1, momentum=0.9, weight_decay=0.5, steps=3
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    optimization.add_weight_decay(model, settings.weight_decay)
    sgd = keras.optimizers.SGD(optimization.learning_rates(settings), settings.momentum)
    model.compile(sgd, "mse")
    model.fit(np.ones([4, 1]), np.zeros([4, 1]), epochs=3, verbose=0)
    w, b, vw, vb = 1.0, 0.0, 0.0, 0.0
    for _ in range(3):
        error = 2 * (w + b)
        vw = 0.9 * vw - 0.1 * (error + 0.5 * w)
        vb = 0.9 * vb - 0.1 * (error + 0.5 * b)
        w, b = w + vw, b + vb
    np.testing.assert_allclose(np.concatenate(model.get_weights(), axis=None), [w, b], rtol=1e-5)


OUT_OF_RANGE = [
    (dict(learning_rate=0.0), "--learning_rate=0.0"),
    (dict(weight_decay=-1.0), "--weight_decay=-1.0"),
    (dict(momentum=1.0), "--momentum=1.0"),
    (dict(steps=0), "--steps=0"),
    (dict(schedule="step"), "--decay_steps"),
    (dict(schedule="step", decay_steps=[5, 3]), "rise from above 0"),
    (dict(schedule="constant", warmup_steps=5), "--warmup_steps belongs"),
    (dict(epsilon=1.0, augmult=4), "leave out --augmult, --epsilon"),
    (dict(augment_resize=1.2), "--augment_resize needs --image_size"),
    (dict(validation=1.5), "--validation=1.5"),
    (dict(eval_split="validation"), "--eval_split=validation measures"),
    (dict(trainable="last"), "give --init_from"),
]


def test_values_out_of_range():
    for given, message in OUT_OF_RANGE:
        with pytest.raises(UserError, match=message):
            resolve(**given)


def test_unknown_recipe():
    with pytest.raises(UserError, match="no recipe 'imagenet'.*imagenet32"):
        pretraining.resolve("imagenet", {})
