"""Training the last layer on features that were computed once is training it in the model."""

import dataclasses

import keras
import numpy as np
import pytest
import seeds
from cases import slow

import tfdpx
from tfdpx.train.config import preset_lookup
from tfdpx.train.data import loading
from tfdpx.train.run import finetuning, fitting

COUNT = 24


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (COUNT, 8, 8, 1)).astype("uint8")
    labels = rng.integers(0, 3, COUNT)
    return loading.ImageData(
        "made up", images, labels, images[:5], labels[:5], COUNT, (8, 8, 1), "test",
        ("a", "b", "c"), 127.5, 127.5,
    )  # fmt: skip


def settings(**given):
    given = dict(model="small_cnn", trainable="last", pretrained_on="somewhere") | given
    values = dict(epsilon=3.0, steps=3, batch_size=COUNT, learning_rate=0.5, l2_norm_clip=0.1)
    return preset_lookup.resolve("digits", values | given)


def fitted(model, x, y):
    plan = tfdpx.PrivacyPlan(
        COUNT, batch_size=COUNT // 2, steps=3, noise_multiplier=0.5, delta=1e-5
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.5, plan=plan, l2_norm_clip=0.1, seed=0), loss)
    model.fit(plan.batches(x, y, optimizer=model.optimizer, seed=1), verbose=0)


@pytest.mark.parametrize("name", [slow("small_cnn"), slow("scatter_linear")])
def test_equals_training_the_whole_model(name, data):
    seeds.fix(0)
    whole = finetuning.build(settings(model=name), data)
    started = whole.get_weights()
    head, features = fitting.head_and_features(settings(model=name), whole, data)
    assert len(head.trainable_variables) == len(whole.trainable_variables)
    fitted(head, features.train_x, features.train_y)
    quick = whole.get_weights()
    np.testing.assert_allclose(
        head.predict(features.eval_x, verbose=0), whole.predict(data.eval_x, verbose=0), atol=1e-5
    )
    # Another model, since weights that were trained before continue their run.
    slow = finetuning.build(settings(model=name), data)
    slow.set_weights(started)
    fitted(slow, data.train_x, data.train_y)
    changed = [np.abs(a - b).max() > 1e-3 for a, b in zip(started, quick, strict=True)]
    assert sum(changed) == len(head.trainable_variables)
    for ours, plain in zip(quick, slow.get_weights(), strict=True):
        np.testing.assert_allclose(ours, plain, atol=2e-5)


@pytest.mark.parametrize(
    "given",
    [dict(trainable="all"), dict(augmult=2, augment_padding=1)],
)
def test_what_must_run_in_every_update_does(given, data):
    model = finetuning.build(settings(**given), data)
    assert fitting.head_and_features(settings(**given), model, data) == (model, data)


def test_features_too_large_for_memory_are_not_kept(monkeypatch, data):
    model = finetuning.build(settings(), data)
    monkeypatch.setattr(fitting, "MOST_BYTES", 10_000)
    assert fitting.head_and_features(settings(), model, data) == (model, data)


def test_no_images_to_measure_on(data):
    none = dataclasses.replace(data, eval_x=data.eval_x[:0], eval_y=data.eval_y[:0])
    _, features = fitting.head_and_features(settings(), finetuning.build(settings(), data), none)
    assert features.eval_x.shape == (0, *features.train_x.shape[1:])
