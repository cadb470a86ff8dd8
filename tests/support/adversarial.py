"""Examples that try to move a clipped sum by more than C, in whole models with extreme weights."""

import contextlib

import cancelling
import fuzz_configurations
import keras
import numpy as np
import seeds
import tensorflow as tf

import tfdpx

BOUND = 1.0 + 1e-5
EXAMPLES, CLASSES = 6, fuzz_configurations.CLASSES
MODELS = ("dense", "twice", "standardized", "residual", "attention", "tokens", "conv1d", "lstm")
PATTERNS = ("huge gradients", "duplicates", "zero gradients", "one among duplicates", "plain")


def batch(name, pattern, rng):
    """Draws inputs, and gradients at the outputs, of a hostile first example and a few others."""
    shape = fuzz_configurations.MODELS[name][0]
    size = 10.0 ** rng.uniform(2, 12)
    y = rng.normal(size=(EXAMPLES, CLASSES)) * 10.0 ** rng.uniform(-3, 3)
    if name == "tokens":
        x = rng.integers(0, 7, (EXAMPLES, *shape))
    else:
        x = rng.normal(size=(EXAMPLES, *shape)).astype("float32")
    if pattern == "huge gradients":
        y[0] *= size
    elif pattern == "zero gradients":
        y[1:] = 0.0
    elif "duplicates" in pattern:
        x[1:], y[1:] = x[:1], y[:1]
        if pattern.startswith("one"):
            y[0] *= -size
    return x, y.astype("float32")


def extreme(model, rng):
    """Assigns random weights of very different sizes."""
    for variable in model.trainable_variables:
        scale = 10.0 ** rng.uniform(-6, 3)
        variable.assign(scale * rng.normal(size=variable.shape))


def largest_ratio(name, policy="float32", jit_compile=False, trials=30, seed=0):
    """Returns the largest change of the clipped sum when an example is left out, in units of C.

    Args:
        name: String, a key of `fuzz_configurations.MODELS`, for example "tokens".
        policy: String, a dtype policy of Keras.
        jit_compile: Bool.
        trials: Int; each tries the hostile example and a neighbour.
        seed: Int.
    """
    rng, sums, worst = np.random.default_rng(seed), None, 0.0
    with fuzz_configurations.policy(policy):
        seeds.fix(seed)
        model = cancelling.model_of(*fuzz_configurations.ends_of(name))
        for trial in range(trials):
            extreme(model, rng)
            x, y = batch(name, PATTERNS[trial % len(PATTERNS)], rng)
            sums = sums or cancelling.clipped_sums(model, x, jit_compile=jit_compile)
            for example in (0, 1):
                moved = cancelling.sensitivity(sums, x, y, EXAMPLES, example)
                assert np.isfinite(moved)
                worst = max(worst, moved)
    return worst


def largest_ratio_of_updates(strategy=None, policy="float32", trials=4):
    """Returns the same for whole updates of `fit`, with and without an example, under a strategy.

    The weights begin at zero: this keeps the update to the last bit.
    """
    rng, worst, batch_size = np.random.default_rng(0), 0.0, 4
    plan = tfdpx.PrivacyPlan(
        batch_size, batch_size=batch_size, steps=1, noise_multiplier=0.0, delta=1e-3
    )
    with fuzz_configurations.policy(policy):
        for trial in range(trials):
            x = rng.normal(size=(batch_size, 8)).astype("float32")
            y = rng.normal(size=(batch_size, CLASSES)).astype("float32")
            y[0] *= 10.0 ** rng.uniform(0, 12)
            if trial % 2:
                x[1:], y[1:] = x[:1], y[:1]
            updates = []
            for weights in (np.ones(batch_size), np.arange(batch_size) != 0):
                with strategy.scope() if strategy else contextlib.nullcontext():
                    inputs = keras.Input((8,))
                    outputs = keras.layers.Dense(CLASSES, kernel_initializer="zeros")(inputs)
                    optimizer = tfdpx.DPSGD(1.0, plan=plan)
                    model = cancelling.model_of(inputs, outputs, optimizer)
                tfdpx.distributed.fit(
                    model, plan, x, y, sample_weight=weights.astype("float32"), verbose=0
                )
                values = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
                updates.append(np.concatenate([v.ravel().astype("float64") for v in values]))
            worst = max(worst, batch_size * np.linalg.norm(updates[0] - updates[1]))
    return worst


def ratio_on_two_replicas():
    """Returns `largest_ratio_of_updates` under MirroredStrategy, on two logical devices."""
    devices = [device.name for device in tf.config.list_logical_devices("CPU")]
    assert len(devices) == 2
    return largest_ratio_of_updates(tf.distribute.MirroredStrategy(devices), trials=2)


def updates_on_replicas():
    """A case of `processes`: whole updates with and without a hostile example."""
    assert 0.5 < ratio_on_two_replicas() <= BOUND
