"""The noise of an update on replicas is from one draw; cases as in `replica_cases`."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from replica_cases import NUM_EXAMPLES, data, make_model, make_plan, strategies, weights
from scipy import stats

import tfdpx
from tfdpx import mechanism, noise
from tfdpx.checks import UnfitForPrivacy
from tfdpx.training import replicas


def noise_problems(strategy, steps=3):
    """Returns errors in the noise of updates on `strategy`, which absent examples do not change."""
    plan = make_plan(steps, sigma=2.0)
    model = make_model(strategy, lambda: tfdpx.DPSGD(20.0, plan=plan, seed=1), units=400)
    for layer in model.layers:
        layer.kernel_regularizer = layer.kernel.regularizer = None
    x, y = data()
    before = weights(model)
    tfdpx.distributed.fit(
        model, plan, x, y, sample_weight=np.zeros(NUM_EXAMPLES), seed=3, verbose=0
    )
    # Learning rate and batch size are both 20: the sum over the steps of the noise on the sum.
    sample = (before - weights(model)) / (2.0 * np.sqrt(steps))
    problems = []
    if stats.kstest(sample, "norm").pvalue < 1e-3:
        problems.append(f"variance {np.var(sample):.2f}")
    for variable in model.trainable_variables:
        copies = [np.asarray(v) for v in _copies(strategy, variable.value)]
        if not all(np.array_equal(copies[0], other) for other in copies):
            problems.append("copies differ")
            break
    return problems


def _copies(strategy, value):
    return strategy.experimental_local_results(value) if strategy else [value]


def noise_is_drawn_once():
    for strategy in strategies():
        assert noise_problems(strategy) == []


@contextlib.contextmanager
def replaced(module, name, function):
    original = getattr(module, name)
    setattr(module, name, lambda *args: function(original, *args))
    try:
        yield
    finally:
        setattr(module, name, original)


def planted_bugs_in_the_noise_are_found():
    def its_own(original, shape, seed, stddev):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        return original(shape, noise.fold_in(seed, replica), stddev)

    def its_own_before_the_sum(original, nest, context):
        seed = tf.stack([tf.cast(context.replica_id_in_sync_group, "int64"), 5])
        noisy = [t + 2.0 * noise.normal(t.shape, seed) for t in tf.nest.flatten(nest)]
        return original(tf.nest.pack_sequence_as(nest, noisy), context)

    def summed(original, *arguments):
        context, gradients = tf.distribute.get_replica_context(), original(*arguments)
        for gradient in gradients:
            gradient.tensor = context.all_reduce("sum", gradient.tensor)
        return gradients

    def no_other_noise(original, sums, noise_multiplier, batch_size, seed):
        return original(sums, 0.0, batch_size, seed)

    one, two = strategies()
    with replaced(noise, "normal", its_own):
        assert noise_problems(one) == []
        assert "copies differ" in noise_problems(two)
    with (
        replaced(replicas, "sum_over_replicas", its_own_before_the_sum),
        replaced(mechanism, "privatize", no_other_noise),
    ):
        assert any("variance" in problem for problem in noise_problems(two))
    with replaced(mechanism, "privatize", summed), pytest.raises(UnfitForPrivacy, match="no noise"):
        noise_problems(two)
