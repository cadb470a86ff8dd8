"""The loss, the augmentation and the step without privacy that settings name."""

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf

import tfdpx
from tfdpx.train.config import preset_lookup
from tfdpx.train.run import auto_settings, optimization

LOGITS = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
CLASSES = np.array([0, 1, 2, 3, 1, 0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_crossentropy_is_that_of_keras_for_one_hot_targets(smoothing):
    expected = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)
    loss = optimization.crossentropy(smoothing)
    wanted = float(expected(np.eye(4)[CLASSES], LOGITS))
    assert float(loss(CLASSES, LOGITS)) == pytest.approx(wanted, rel=1e-6)
    assert float(loss(CLASSES[:, None], LOGITS)) == pytest.approx(wanted, rel=1e-6)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert float(again(CLASSES, LOGITS)) == pytest.approx(wanted, rel=1e-6)


def test_augmentation_by_the_settings():
    def given(**values):
        return optimization.augmentation(preset_lookup.resolve("digits", values))

    assert given() is None
    crops = given(augmult=2, augment_padding=3)
    assert (type(crops), crops.padding, crops.flip) == (tfdpx.augment.RandomCropFlip, 3, False)
    views = given(augmult=2, augment_resize=1.2, image_size=10, augment_flip=True)
    assert isinstance(views, tfdpx.augment.ResizeCropFlip)
    assert (views.height, views.scale, views.flip) == (10, 1.2, True)


def test_mixed_views_by_the_settings():
    def given(**values):
        values = {"augmult": 6, "augment_padding": 1, "augment_mix": 2, **values}
        return optimization.views(preset_lookup.resolve("digits", values))

    made = given()
    assert (type(made), made.mixed_views, made.alpha) == (tfdpx.augment.MixViews, 2, 0.2)
    assert type(made.augment) is tfdpx.augment.RandomCropFlip and made.augment.padding == 1
    assert given(augment_mix_alpha=1.0).alpha == 1.0
    assert type(given(augment_mix=0)) is tfdpx.augment.RandomCropFlip
    settings = preset_lookup.resolve(
        "digits", {"augmult": 6, "augment_padding": 1, "augment_mix": 2}
    )
    settings, _ = auto_settings.complete(settings, 1437)
    optimizer = optimization.private_optimizer(settings, settings.privacy_plan(1437), seed=0)
    assert (optimizer.augment.mixed_views, optimizer.augmult) == (2, 6)


def small_model():
    seeds.fix(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    return model


@pytest.mark.slow
def test_without_privacy_the_step_is_that_of_keras_on_the_same_batch():
    settings = preset_lookup.resolve(
        "digits",
        dict(private=False, steps=3, batch_size=8, learning_rate=0.5, momentum=0.9, ema_momentum=0),
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


def test_labels_are_smoothed_for_each_example_by_itself():
    """The fast path, against Keras's own loss of one-hot labels on batches of one."""
    smoothing = preset_lookup.resolve("table21/all_eps8", {}).label_smoothing
    assert smoothing == 0.1
    clip, x = 0.5, np.random.default_rng(1).normal(size=(6, 3)).astype("float32")
    model = small_model()
    plan = tfdpx.PrivacyPlan(6, batch_size=6, steps=1, noise_multiplier=1e-6, delta=1e-3)
    optimizer = tfdpx.DPSGD(1.0, plan=plan, l2_norm_clip=clip)
    model.compile(optimizer, optimization.crossentropy(smoothing))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=smoothing)
    total, before = 0.0, model.get_weights()
    for row, label in zip(x, CLASSES, strict=True):
        with tf.GradientTape() as tape:
            value = loss(np.eye(4)[[label]], model(row[np.newaxis]))
        parts = tape.gradient(value, [v.value for v in model.trainable_variables])
        flat = np.concatenate([np.ravel(part) for part in parts])
        total = total + flat / max(np.linalg.norm(flat), clip)
    model.fit(plan.batches(x, CLASSES), verbose=0)
    moved = [np.ravel(b - a) for a, b in zip(model.get_weights(), before, strict=True)]
    np.testing.assert_allclose(np.concatenate(moved), total / 6, atol=1e-5)


def test_no_other_table_of_the_paper_smooths_labels():
    named = {name: preset_lookup.resolve(name, {}) for name in preset_lookup.names()}
    smoothed = {name for name, settings in named.items() if settings.label_smoothing}
    assert smoothed == {name for name in named if name.startswith("table21/")}


def test_an_example_that_is_not_finite_still_counts_as_nothing_without_clipping():
    factors = tfdpx.mechanism.clip_factors(
        tf.constant([4.0, np.inf, np.nan, 9.0]), tf.constant([True, True, True, False]), np.inf, 1
    )
    np.testing.assert_array_equal(factors, [1, 0, 0, 0])


def test_an_infinite_clip_with_noise_is_refused():
    with pytest.raises(ValueError, match="must be finite for noise.*noise_multiplier=1.0"):
        tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0, l2_norm_clip=np.inf)
