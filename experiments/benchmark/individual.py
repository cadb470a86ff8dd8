"""What individual accounting adds to a private step."""

import statistics

import numpy as np
import tensorflow as tf

import tfdpx
from experiments.benchmark import comparison, steps
from tfdpx.sampling.batch_sampler import sampler_of
from tfdpx.training.session import Session


def measure(settings, num_examples, repeats):
    """The figures of the JSON object: seconds of a step with and without it, their ratio, memory.

    Both take the same batch, which is in memory, in turn in one process; no norm is refreshed. What
    they differ by, the gather and the scatter, is also timed alone: `share_of_step` is its time
    over the plain step's, which a busy machine disturbs less than the ratio.

    Args:
        settings: `steps.Settings`, whose `images` are the batch size B.
        num_examples: Int, N.
        repeats: Int, timed runs of each.
    """
    plan = tfdpx.PrivacyPlan(num_examples, settings.images, 1000, noise_multiplier=1.0, delta=1e-5)
    accountant = tfdpx.accounting.IndividualAccountant(plan)
    x, y = steps.make_rows(settings)
    batch = (x, y, tf.ones([settings.images]))
    draws = sampler_of(plan.batches(np.zeros([num_examples], "uint8")))
    generator = np.random.default_rng(0)
    ids = tf.constant(generator.permutation(num_examples)[: settings.images], tf.int32)
    made = {}
    for name, each, data in (("plain", None, batch), ("individual", accountant, (*batch, ids))):
        comparison.PROGRESS.print(f"tracing: {name}")
        model = steps.make_model("private", settings, plan, each)
        model.optimizer.session = Session(model.optimizer, draws, None)  # As within `fit`.
        made[name] = steps.trace(model.train_step, (data,), settings)
    policy = model.optimizer.clip_policy

    def books(ids, norms):
        clips = policy.clips(ids, settings.images)
        policy.count_update(ids, norms >= 0, norms)
        return clips

    norms = tf.random.stateless_uniform([settings.images], [0, 0])
    made["books"] = steps.trace(books, (ids, norms), settings)
    seconds = steps.interleaved(made, repeats)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    held = accountant.norms().size + 1
    return {
        "individual_ratio": median["individual"] / median["plain"],
        "share_of_step": median["books"] / median["plain"],
        **{f"{name}_seconds": value for name, value in median.items()},
        "individual_mib": 4 * held * (len(accountant.fractions) + 4) / 2**20,
    }
