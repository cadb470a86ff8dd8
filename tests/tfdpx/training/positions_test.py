"""Losses and metrics of examples with positions, compared with Keras's on batches of one."""

import re

import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf
from cases import slow
from oracle import batch_of_one_gradients

import tfdpx

N, T, D, V = 12, 5, 4, 3
PLAN = tfdpx.PrivacyPlan(N, batch_size=6, steps=2, noise_multiplier=0.0, delta=1e-3)
RNG = np.random.default_rng(0)
CLASSES = {
    name: value
    for name, value in vars(keras.losses).items()
    if isinstance(value, type) and value is not keras.losses.Loss
}
QUICK = ["SparseCategoricalCrossentropy", "CTC", "MeanSquaredError"]


def targets(name, shape):
    if name in ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy"):
        return RNG.integers(0, V, shape)
    if name == "CTC":
        return RNG.integers(1, V, (N, 2))
    if name.startswith("Binary") or "Hinge" in name or name in ("Dice", "Tversky"):
        return RNG.integers(0, 2, (*shape, V)).astype("float32")
    return np.eye(V, dtype="float32")[RNG.integers(0, V, shape)]


def made(loss, shape, mask=False, **arguments):
    layers = [keras.layers.Masking()] * mask + [keras.layers.Dense(V, "softmax")]
    seeds.fix(1)
    model = keras.Sequential([keras.Input([*shape[1:], D]), *layers])
    optimizer = tfdpx.DPSGD(1.0, plan=PLAN, l2_norm_clip=0.1)
    model.compile(optimizer, loss, jit_compile=False, **arguments)
    return model


def by_batches_of_one(model, x, y, weights=None):
    """Returns the sum over examples of gradients clipped to 0.1, divided by 0.1 B."""
    weights = None if weights is None else tf.constant(weights)
    gradients = batch_of_one_gradients(model, tf.constant(x), tf.constant(y), weights, 1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return (gradients / np.maximum(norms, 0.1)).sum(axis=0) / PLAN.batch_size


def change_of_one_update(model, batch):
    before = small.weights(model)
    logs = model.train_step(batch)
    return before - small.weights(model), {k: float(v) for k, v in logs.items()}


def batch_of(x, y, weights=None):
    """Returns a batch of `fit`, and a flag for each drawn example."""
    from tfdpx.sampling.batch_sampler import sampler_of

    model = made("mse", x.shape[:-1])  # Its session draws.
    draws = sampler_of(PLAN.batches(x, y, weights, optimizer=model.optimizer, seed=3))
    batch = next(iter(draws.fitted))
    weights = batch[2]
    present = tf.reduce_any(tf.reshape(tf.cast(weights, "bool"), [weights.shape[0], -1]), 1)
    return batch, present.numpy()


@pytest.mark.parametrize(
    "name, positions",
    [
        ("SparseCategoricalCrossentropy", False),
        slow("CTC", True),
        ("MeanSquaredError", True),
        # Of Keras's losses only Circle compares examples, and is refused.
        *(slow(name, True) for name in sorted(CLASSES) if name not in (*QUICK, "Circle")),
    ],
)
@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`", "ignore:The loss of each example")
def test_every_loss_is_that_of_a_batch_of_one(name, positions):
    shape = (N, T) if positions else (N,)
    x, y = RNG.normal(size=(*shape, D)).astype("float32"), targets(name, shape)
    model = made(CLASSES[name](), shape)
    batch, present = batch_of(x, y)
    assert 0 < present.sum() < len(present)
    wanted = by_batches_of_one(model, *(t.numpy()[present] for t in batch[:2]))
    change, _ = change_of_one_update(model, batch)
    np.testing.assert_allclose(change, wanted, rtol=1e-4, atol=1e-6)


WEIGHTS = {"[N]": (N,), "[N, 1]": (N, 1), "[N, T]": (N, T)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights, reduction",
    [
        (None, "sum_over_batch_size"),
        ("[N, T]", "sum_over_batch_size"),
        slow("[N]", "sum"),
        slow("[N, 1]", "mean_with_sample_weight"),
        ("[N, T]", "sum"),
        ("[N, T]", "mean_with_sample_weight"),
    ],
)
@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`", "ignore:The loss of each example")
def test_weights_and_masks_of_positions(weights, reduction):
    x, y = RNG.normal(size=(N, T, D)).astype("float32"), RNG.integers(0, V, (N, T))
    x[:6, 3:] = 0  # Masked.
    weights = None if weights is None else RNG.uniform(0.5, 2.0, WEIGHTS[weights]).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
    model = made(loss, (N, T), mask=True, metrics=["accuracy"], weighted_metrics=["accuracy"])
    batch, present = batch_of(x, y, weights)
    drawn = [None if t is None else t.numpy()[present] for t in batch]
    drawn = drawn if weights is not None else [*drawn[:2], None]
    wanted = by_batches_of_one(model, *drawn)
    change, logs = change_of_one_update(model, batch)
    np.testing.assert_allclose(change, wanted, rtol=1e-4, atol=1e-6)
    assert all(np.isfinite(value) for value in logs.values())


METRICS = {  # Metrics for each kind of targets.
    "sparse": lambda: [
        keras.metrics.SparseCategoricalAccuracy(),
        "accuracy",
        keras.metrics.MeanIoU(V, sparse_y_pred=False),
    ],
    "binary": lambda: [
        "mae",
        keras.metrics.CosineSimilarity(),
        keras.metrics.AUC(),
        keras.metrics.Precision(),
        keras.metrics.FalsePositives(),
        keras.metrics.Recall(class_id=1),
        keras.metrics.BinaryIoU(),
    ],
    "one-hot": lambda: [keras.metrics.OneHotMeanIoU(V), keras.metrics.TopKCategoricalAccuracy(2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.filterwarnings("ignore:`noise_multiplier=0`", "ignore:The loss of each example")
def test_metrics_count_the_positions_of_the_examples_that_were_drawn(kind):
    metrics = METRICS[kind]
    x = RNG.normal(size=(N, T, D)).astype("float32")
    y = {
        "sparse": RNG.integers(0, V, (N, T)),
        "binary": RNG.integers(0, 2, (N, T, V)),
        "one-hot": np.eye(V, dtype="float32")[RNG.integers(0, V, (N, T))],
    }[kind]
    loss = "sparse_categorical_crossentropy" if kind == "sparse" else "mse"
    model = made(loss, (N, T), metrics=metrics())
    batch, present = batch_of(x, y)
    rows = [t.numpy()[present] for t in batch[:2]]
    ordinary = keras.models.clone_model(model)
    ordinary.set_weights(model.get_weights())
    ordinary.compile("sgd", loss, metrics=metrics())
    wanted = ordinary.test_on_batch(*rows, return_dict=True)
    _, values = change_of_one_update(model, batch)
    values, wanted = (
        {re.sub(r"_\d+$", "", n): v for n, v in logs.items() if n != "loss"}
        for logs in (values, wanted)
    )
    assert values == pytest.approx(wanted, rel=1e-4) and len(values) == len(metrics())
