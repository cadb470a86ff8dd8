"""Tests on replicas for separate processes of `processes.run_alone` or `run_workers`.

Each function without arguments is a case: it trains the same on one device and on replicas.
"""

import contextlib
import functools
import os

import keras
import numpy as np
import seeds
import tensorflow as tf

import tfdpx
from tfdpx import synthetic
from tfdpx.checks import UnfitForPrivacy
from tfdpx.layers import ChannelWhitening

NUM_EXAMPLES, FEATURES, STEPS = 60, 6, 4


@functools.cache
def strategies():
    """Returns None, and one strategy on all devices and hosts: two would mix messages."""
    if "TF_CONFIG" in os.environ:
        return None, tf.distribute.MultiWorkerMirroredStrategy()
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    return None, tf.distribute.MirroredStrategy(devices)


def data():
    """Draws vectors [60, 6] and labels [60]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_EXAMPLES, FEATURES)).astype("float32")
    return x, rng.integers(0, 3, NUM_EXAMPLES)


def make_plan(steps=STEPS, sigma=1.0, batch_size=20):
    return tfdpx.PrivacyPlan(
        NUM_EXAMPLES, batch_size=batch_size, steps=steps, noise_multiplier=sigma, delta=1e-3
    )


def make_model(strategy, optimizer, loss=None, units=5, **compile_arguments):
    """Returns a compiled model under `strategy`, with the same weights each time."""
    seeds.fix(7)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(units, "relu", kernel_regularizer="l2"),
                keras.layers.Dense(3),
            ]
        )
        loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, weighted_metrics=["accuracy"], **compile_arguments)
    return model


def train(strategy, optimizer, plan, seed=3, **compile_arguments):
    """Trains with `tfdpx.distributed.fit`; returns model and history."""
    model = make_model(strategy, lambda: optimizer(plan=plan, seed=1), **compile_arguments)
    x, y = data()
    history = tfdpx.distributed.fit(
        model, plan, x, y, seed=seed, epochs=2, steps_per_epoch=2, verbose=0,
        validation_data=(x[:50].copy(), y[:50]), validation_batch_size=16,
        callbacks=[tfdpx.callbacks.PrivacyBudget(plan)],
    )  # fmt: skip
    return model, history.history


def weights(model):
    """Returns all trainable weights as one vector."""
    return np.concatenate(
        [keras.ops.convert_to_numpy(v).ravel() for v in model.trainable_variables]
    )


def assert_close(values, wanted, tolerance=1e-6):
    np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=tolerance * abs(wanted).max())


OPTIMIZERS = {
    "momentum and EMA": lambda **k: tfdpx.DPSGD(
        0.5, momentum=0.9, use_ema=True, ema_momentum=0.5, **k
    ),
    "Adam": lambda **k: tfdpx.DPAdam(0.05, **k),
    "adaptive": lambda **k: tfdpx.DPSGD(0.5, l2_norm_clip=tfdpx.AdaptiveClip(0.1), **k),
}


def updates_agree(name="momentum and EMA", jit_compile=(False,)):
    """Updates on replicas equal the updates on one device, by XLA too if `jit_compile` names it."""
    one, several = strategies()
    model, wanted = train(one, OPTIMIZERS[name], make_plan(), jit_compile=jit_compile[0])
    assert set(wanted) == {
        "loss", "accuracy", "val_loss", "val_accuracy", "epsilon",
        *(["l2_norm_clip"] if name == "adaptive" else []),
    }  # fmt: skip
    for compiled in jit_compile:
        other, history = train(several, OPTIMIZERS[name], make_plan(), jit_compile=compiled)
        assert_close(weights(other), weights(model))
        assert set(history) == set(wanted)
        for key, values in history.items():
            np.testing.assert_allclose(values, wanted[key], rtol=1e-5, err_msg=key)


def adaptive_updates_agree():
    """Weights, the clip in the logs and the noise do not depend on the number of devices."""
    updates_agree("adaptive")


def updates_agree_with_and_without_jit():
    updates_agree(jit_compile=(False, True))


def every_fit_agrees(make, plan, x, y, **people):
    """Keras's `fit` and ours end in the same weights, on one device and on replicas.

    Args:
        make: Function from a strategy to a compiled model.
        plan: The `PrivacyPlan`.
        x: Array of the examples.
        y: Array of the labels.
        **people: Arguments of `fit` that say to whom an example belongs.
    """
    wanted = None
    for strategy in strategies():
        for fit in (_fit_ours, _fit_keras):
            model = make(strategy)
            fit(model, plan, x, y, **people)
            wanted = weights(model) if wanted is None else wanted
            assert_close(weights(model), wanted)


def keras_fit_agrees_with_ours():
    plan, optimizer = make_plan(), OPTIMIZERS["momentum and EMA"]
    every_fit_agrees(lambda s: make_model(s, lambda: optimizer(plan=plan, seed=1)), plan, *data())


def augmented_updates_agree():
    """Views and their mixtures follow the example's number in the draw, on any replica."""
    plan = tfdpx.PrivacyPlan(30, batch_size=20, steps=2, noise_multiplier=1.0, delta=1e-3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 6, 6, 1)).astype("float32"), rng.integers(0, 3, 30)

    def make(strategy):
        seeds.fix(7)
        with strategy.scope() if strategy else contextlib.nullcontext():
            whitening = ChannelWhitening()
            model = keras.Sequential(
                [keras.Input((6, 6, 1)), whitening, keras.layers.Conv2D(2, 3),
                 keras.layers.Flatten(), keras.layers.Dense(3)]
            )  # fmt: skip
            whitening.adapt(synthetic.DeadLeaves(6), num_images=50)
            model.compile(
                tfdpx.DPSGD(
                    1.0, plan=plan, seed=1, l2_norm_clip=50.0, microbatch_size=3, augmult=3,
                    augment=tfdpx.augment.MixViews(tfdpx.augment.RandomCropFlip(2), 1),
                ),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
            )  # fmt: skip
        return model

    every_fit_agrees(make, plan, x, y)


def updates_on_people_agree():
    """Each person's examples follow the person and the update, on any replica."""
    plan = tfdpx.PrivacyPlan(12, 8, 3, noise_multiplier=1.0, delta=1e-3, unit="user")
    ids = np.arange(NUM_EXAMPLES) ** 2 % 13 % 12
    ids[:12] = np.arange(12)

    def make(strategy):
        return make_model(strategy, lambda: tfdpx.DPSGD(0.5, plan=plan, seed=1))

    every_fit_agrees(make, plan, *data(), user_ids=ids, examples_per_user=3)


def masks_are_drawn_for_each_replica():
    """An odd number of kept rows proves two draws: equal masks keep an even number."""
    plan = tfdpx.PrivacyPlan(20, batch_size=20, steps=16, noise_multiplier=0.0, delta=1e-3)
    strategy, totals = strategies()[1], []

    class Count(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            totals.append(20 * float(weights(self.model)[0]))

    x = np.full((20, 1), 2.0, "float32")
    for fit in (_fit_ours, _fit_keras):
        totals.clear()
        with strategy.scope():
            one = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dropout(0.5), one])
            model.compile(tfdpx.DPSGD(1.0, plan=plan), lambda y, z: -z, jit_compile=False)
        fit(model, plan, x, x, callbacks=[Count()])
        counts = np.round(np.diff([0.0, *totals])).astype(int)
        assert len(counts) == 16 and np.any(counts % 2), counts


def _fit_ours(model, plan, x, y, callbacks=(), **people):
    tfdpx.distributed.fit(model, plan, x, y, seed=3, verbose=0, callbacks=[*callbacks], **people)


def _fit_keras(model, plan, x, y, callbacks=(), **people):
    optimizer = model.optimizer
    batches = plan.batches(x, y, seed=3, pad_to_multiple_of=2, optimizer=optimizer, **people)
    model.fit(batches, verbose=0, callbacks=[*callbacks])


def refused(error, match, function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except error as raised:
        assert match in str(raised), raised
    else:
        raise AssertionError(f"nothing raised: {match}")


def batches_that_void_the_guarantee_are_refused():
    plan, (x, y) = make_plan(), data()
    two = strategies()[1]

    def make(strategy=two, **arguments):
        return make_model(strategy, lambda: tfdpx.DPSGD(1.0, plan=plan, seed=1), **arguments)

    model = make()
    batches = plan.batches(x, y, seed=3, pad_to_multiple_of=2, optimizer=model.optimizer)
    model.fit(batches, steps_per_epoch=1, verbose=0)
    # The same after the step has been traced for `fit`.
    for candidate in (model, make()):
        refused(
            UnfitForPrivacy,
            "count an example more than once",
            candidate.train_on_batch,
            x[:20],
            y[:20],
        )
    unplanned_step = tf.function(lambda: two.run(model.train_step, args=((x, y),)), autograph=False)
    refused(UnfitForPrivacy, "tfdpx.distributed.fit", unplanned_step)
    of_steps = two.distribute_datasets_from_function(lambda _: plan.batches(x, y))
    refused(UnfitForPrivacy, "different steps", make().fit, of_steps)
    refused(UnfitForPrivacy, "jit_compile=True", make(jit_compile=True).fit, batches)
    refused(UnfitForPrivacy, "steps_per_execution=2", make(steps_per_execution=2).fit, batches)
    odd = plan.batches(x, y).map(lambda *b: tf.nest.map_structure(lambda t: t[:21], b))
    refused(ValueError, "Use 20 or 22", make().fit, odd)
    odd = tfdpx.PrivacyPlan(60, batch_size=7, steps=2, noise_multiplier=1.0, delta=1e-3)
    model = make_model(two, lambda: tfdpx.DPSGD(1.0, plan=odd))
    refused(ValueError, "Use 6 or 8", tfdpx.distributed.fit, model, odd, x, y)
    model = make_model(two, lambda: tfdpx.DPSGD(1.0, plan=plan))
    refused(
        ValueError, "`batch_size`", tfdpx.distributed.fit, model, make_plan(batch_size=10), x, y
    )


def hosts_must_hold_the_same():
    strategy, worker = strategies()[1], tf.distribute.cluster_resolver.TFConfigClusterResolver()
    plan, (x, y), worker = make_plan(), data(), worker.task_id

    def make(**arguments):
        return make_model(strategy, lambda: tfdpx.DPSGD(1.0, plan=plan, seed=1), **arguments)

    model = make()
    refused(
        UnfitForPrivacy, "one Poisson sample over 2 hosts", model.fit, plan.batches(x, y, seed=3)
    )
    fit = tfdpx.distributed.fit
    refused(ValueError, "different data", fit, model, plan, x if worker else x[::-1], y, seed=3)
    refused(ValueError, "arguments of `fit`", fit, model, plan, x, y, epochs=1 + worker)
    # Simulates one host that did not load the checkpoint.
    if worker:
        model.trainable_variables[0].assign_add(tf.ones_like(model.trainable_variables[0]))
    refused(ValueError, "different weights", fit, model, plan, x, y)
    # The chief's seed counts.
    optimizer = OPTIMIZERS["Adam"]
    trained, _ = train(strategy, optimizer, plan, seed=3 if worker == 0 else 4)
    wanted, _ = train(None, optimizer, plan, seed=3)
    assert_close(weights(trained), weights(wanted))
