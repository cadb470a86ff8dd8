"""What individual accounting adds to a private step."""

import statistics

import numpy as np
import tensorflow as tf

import tfdpx
from tfdpx.data.draws import draws_of
from tfdpx.train.benchmarks import comparison, steps


def measure(settings, num_examples, repeats):
    """The figures of the JSON object: seconds of a step with and without it, their ratio, memory.

    Both take the same batch, which is in memory, in turn in one process; no norm is refreshed.

    Args:
        settings: `steps.Settings`, whose `images` are the batch size B.
        num_examples: Int, N.
        repeats: Int, timed runs of each.
    """
    plan = tfdpx.PrivacyPlan(num_examples, settings.images, 1000, noise_multiplier=1.0, delta=1e-5)
    accountant = tfdpx.accounting.IndividualAccountant(plan)
    x, y = steps.make_rows(settings)
    batch = (x, y, tf.ones([settings.images]))
    draws = draws_of(plan.batches(np.zeros([num_examples], "uint8")))
    generator = np.random.default_rng(0)
    ids = tf.constant(generator.permutation(num_examples)[: settings.images], tf.int32)
    made = {}
    for name, each, data in (("plain", None, batch), ("individual", accountant, (*batch, ids))):
        comparison.PROGRESS.print(f"tracing: {name}")
        model = steps.make_model("private", settings, plan, each)
        model.optimizer.draws = draws  # As within `fit`.
        made[name] = steps.trace(model.train_step, (data,), settings)
    seconds = steps.interleaved(made, repeats)
    # Of neighbours in time: a machine that slows down does not count.
    extra = np.subtract(seconds["individual"], seconds["plain"])
    median = {name: statistics.median(found) for name, found in seconds.items()}
    held = accountant.norms().size + 1
    return {
        "individual_ratio": median["individual"] / median["plain"],
        "individual_extra_seconds": float(np.median(extra)),
        **{f"{name}_seconds": value for name, value in median.items()},
        "individual_mib": 4 * held * (len(accountant.fractions) + 4) / 2**20,
    }
