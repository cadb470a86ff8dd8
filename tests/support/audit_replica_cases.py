"""The white-box audit on replicas, in cases as in `replica_cases`."""

from unittest import mock

import tensorflow as tf
from replica_cases import make_model, strategies

import tfdpx
from tfdpx import audit, mechanism, noise
from tfdpx.training import replicas


def report(strategy):
    model = make_model(
        strategy, lambda: tfdpx.DPSGD(0.5, batch_size=20, noise_multiplier=1.0), jit_compile=False
    )
    return audit.check_optimizer(model, model.optimizer, trials=200, seconds=30.0)


def honest_and_planted():
    _, two = strategies()
    outcome = report(two)
    assert outcome.passed and outcome.epsilon_lower_bound > 0.5 * outcome.epsilon, str(outcome)
    privatize, add_up = mechanism.privatize, replicas.sum_over_replicas

    def drawn_by_each(sums, noise_multiplier, batch_size, seed):
        context = tf.distribute.get_replica_context()
        seed = noise.fold_in(seed, context.replica_id_in_sync_group)
        return privatize(sums, noise_multiplier, batch_size, seed)

    def counted_by_each(nest, context):
        seed = tf.cast(tf.stack([context.replica_id_in_sync_group, 5]), "int64")
        mixed = noise.fold_in(seed, tf.cast(1e6 * tf.timestamp(), "int64"))
        noisy = [t + noise.normal(t.shape, mixed, 1 / 20) for t in tf.nest.flatten(nest)]
        return add_up(tf.nest.pack_sequence_as(nest, noisy), context)

    with mock.patch.object(mechanism, "privatize", drawn_by_each):
        outcome = report(two)
        assert not outcome.passed and "Replicas hold different weights" in str(outcome), str(
            outcome
        )
    with (
        mock.patch.object(replicas, "sum_over_replicas", counted_by_each),
        mock.patch.object(mechanism, "privatize", lambda s, m, b, seed: privatize(s, 0.0, b, seed)),
    ):
        outcome = report(two)
        assert not outcome.passed and "standard deviation" in str(outcome), str(outcome)
