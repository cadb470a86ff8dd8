"""Individual accounting on replicas, in a separate process."""

import individual_replay as replay
import numpy as np
import replica_cases
import tensorflow as tf

import tfdpx
from tfdpx.accounting import IndividualAccountant


def replicas_agree():
    """Every fit on two replicas has the norms, epsilons and weights of one device."""
    plan, (x, y) = replay.make_plan(batch_size=16), replay.data()
    mirrored = replica_cases.strategies()[1]
    alone, wanted = tf.distribute.get_strategy(), {}
    cases = [(alone, "Keras's", 0), (alone, "Keras's", 1), (mirrored, "Keras's", 0)]
    for strategy, fit, refreshes in [*cases, (mirrored, "ours", 1)]:
        accountant = IndividualAccountant(plan, 0.05, refreshes)
        with strategy.scope():
            model = replay.make_model(plan, accountant, microbatch_size=3)
        if fit == "ours":
            tfdpx.distributed.fit(model, plan, x, y, seed=replay.SEED, verbose=0)
        else:
            batches = plan.batches(
                x, y, seed=replay.SEED, pad_to_multiple_of=2, optimizer=model.optimizer
            )
            model.fit(batches, verbose=0)
        epsilons, weights = accountant.epsilon(), replica_cases.weights(model)
        wanted.setdefault(refreshes, (epsilons, weights))
        np.testing.assert_allclose(epsilons, wanted[refreshes][0], rtol=1e-9)
        replica_cases.assert_close(weights, wanted[refreshes][1])
    assert np.ptp(wanted[0][0]) > 0.1 and not np.allclose(wanted[0][0], wanted[1][0])
