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
from tfdpx.training import distributed

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


def train(strategy, optimizer, plan, seed=3, x=None, callbacks=(), **compile_arguments):
    """Trains with `tfdpx.distributed.fit`; returns model and history."""
    model = make_model(strategy, lambda: optimizer(plan=plan, seed=1), **compile_arguments)
    own_x, y = data()
    history = tfdpx.distributed.fit(
        model, plan, own_x if x is None else x, y, seed=seed, epochs=2, steps_per_epoch=2,
        validation_data=(own_x[:50].copy(), y[:50]), validation_batch_size=16, verbose=0,
        callbacks=[tfdpx.callbacks.PrivacyBudget(plan), *callbacks],
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


@contextlib.contextmanager
def counting_all_reduces(collectives):
    """Appends the collectives in the graph of each update to `collectives`."""
    original = distributed._make_execute

    def spy(model, strategy):
        function = original(model, strategy)

        def execute(batches, count):
            graph = function.get_concrete_function(batches, count).graph
            collectives.append([node for node in _nodes(graph) if "Collective" in node.op])
            return function(batches, count)

        return execute

    distributed._make_execute = spy
    try:
        yield
    finally:
        distributed._make_execute = original


def _nodes(graph):
    definition = graph.as_graph_def()
    return [*definition.node, *(n for f in definition.library.function for n in f.node_def)]


def updates_agree(name="momentum and EMA", jit_compile=(False,)):
    """Updates on replicas equal the updates on one device, by XLA too if `jit_compile` names it."""
    one, several = strategies()
    wanted, wanted_history = _counted_training(name, one, jit_compile[0])
    assert set(wanted_history) == {
        "loss", "accuracy", "val_loss", "val_accuracy", "epsilon",
        *(["l2_norm_clip"] if name == "adaptive" else []),
    }  # fmt: skip
    for compiled in jit_compile:
        trained, history = _counted_training(name, several, compiled)
        assert_close(trained, wanted)
        assert set(history) == set(wanted_history)
        for key, values in history.items():
            np.testing.assert_allclose(values, wanted_history[key], rtol=1e-5, err_msg=key)


def _counted_training(name, strategy, jit_compile):
    """Returns weights and history of a training with one all-reduce an update."""
    collectives = []
    with counting_all_reduces(collectives):
        model, history = train(strategy, OPTIMIZERS[name], make_plan(), jit_compile=jit_compile)
    # One for each replica of this host.
    expected = len(strategy.extended.worker_devices) if strategy else 0
    assert [len(nodes) for nodes in collectives] == [expected] * STEPS, collectives
    return weights(model), history


def adaptive_updates_agree():
    """Weights, the clip in the logs and the noise do not depend on the number of devices."""
    updates_agree("adaptive")


def updates_agree_with_and_without_jit():
    updates_agree(jit_compile=(False, True))


def augmented_updates_agree():
    """Views and their mixtures follow the example's number in the draw, on any replica."""
    plan = tfdpx.PrivacyPlan(30, batch_size=20, steps=2, noise_multiplier=1.0, delta=1e-3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 6, 6, 1)).astype("float32"), rng.integers(0, 3, 30)
    wanted = None
    for strategy in strategies():
        for fit in (_fit_ours, _fit_keras):
            if fit is _fit_keras and strategy is None:
                continue
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
            fit(model, plan, x, y)
            wanted = weights(model) if wanted is None else wanted
            assert_close(weights(model), wanted)


def updates_on_people_agree():
    """Each person's examples follow the person and the update, on any replica."""
    plan = tfdpx.PrivacyPlan(12, 8, 3, noise_multiplier=1.0, delta=1e-3, unit="user")
    x, y = data()
    ids, wanted = np.arange(NUM_EXAMPLES) ** 2 % 13 % 12, None
    ids[:12] = np.arange(12)
    for strategy in strategies():
        for fit in (_fit_ours, _fit_keras):
            if fit is _fit_keras and strategy is None:
                continue
            model = make_model(strategy, lambda: tfdpx.DPSGD(0.5, plan=plan, seed=1))
            fit(model, plan, x, y, user_ids=ids, examples_per_user=3)
            wanted = weights(model) if wanted is None else wanted
            assert_close(weights(model), wanted)


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


def keras_fit_agrees_with_ours():
    plan, (x, y) = make_plan(), data()
    optimizer = OPTIMIZERS["momentum and EMA"]
    wanted = None
    for strategy in strategies():
        model = make_model(strategy, lambda: optimizer(plan=plan, seed=1))
        batches = plan.batches(x, y, seed=3, pad_to_multiple_of=2, optimizer=model.optimizer)
        history = model.fit(
            batches, callbacks=[tfdpx.callbacks.PrivacyBudget(plan)], verbose=0
        ).history
        assert "epsilon" in history, history  # Not epsilon_approximate.
        if wanted is None:
            wanted = weights(model)
            ours = make_model(None, lambda: optimizer(plan=plan, seed=1))
            tfdpx.distributed.fit(ours, plan, x, y, seed=3, verbose=0)
            assert_close(weights(ours), wanted)
        assert_close(weights(model), wanted)


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
