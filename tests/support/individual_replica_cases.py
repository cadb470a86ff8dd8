"""Individual accounting on replicas, in a process of its own."""

import individual_replay as replay
import numpy as np
import replica_cases
import tensorflow as tf

import tfdpx
from tfdpx.accounting import IndividualAccountant


def replicas_agree():
    """Every fit on two replicas has the norms, epsilons and weights of one device."""
    plan, (x, y) = replay.make_plan(batch_size=16), replay.data()
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    mirrored = tf.distribute.MirroredStrategy(names)
    wanted = None
    for strategy in (tf.distribute.get_strategy(), mirrored):
        for fit in ("ours", "Keras's"):
            for refreshes in (0, 1):
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
                found = {refreshes: (accountant.epsilon(), replica_cases.weights(model))}
                wanted = {**found, **(wanted or {})}
                np.testing.assert_allclose(found[refreshes][0], wanted[refreshes][0], rtol=1e-9)
                replica_cases.assert_close(found[refreshes][1], wanted[refreshes][1])
    assert np.ptp(wanted[0][0]) > 0.1 and not np.allclose(wanted[0][0], wanted[1][0])
