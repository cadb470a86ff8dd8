"""A private step of people with k examples each, against one of as many examples with k views."""

import dataclasses
import statistics

import tensorflow as tf

import tfdpx
from experiments.benchmark import comparison, steps
from tfdpx.sampling.inputs import FLAGS


def measure(settings, num_examples, repeats):
    """The figures of the JSON object: seconds of both steps and their ratio.

    Both see the same rows, in memory, in turn in one process; all rows are there.

    Args:
        settings: `steps.Settings`, whose `images` are the examples, or people, and `users` is k.
        num_examples: Int, of the plan.
        repeats: Int, timed runs of each.
    """
    settings = dataclasses.replace(settings, augmult=settings.users)
    arguments = dict(noise_multiplier=1.0, delta=1e-5)
    plan = tfdpx.PrivacyPlan(num_examples, settings.images, 1000, **arguments)
    of_users = tfdpx.PrivacyPlan(num_examples, settings.images, 1000, unit="user", **arguments)
    x, y = steps.make_batch("private", settings)
    labels = tf.repeat(y[:, tf.newaxis], settings.users, axis=1)
    batches = {
        "views": (plan, settings, (x, y, tf.ones(y.shape, FLAGS))),
        "users": (
            of_users,
            dataclasses.replace(settings, augmult=1),
            (x, labels, tf.ones(labels.shape, FLAGS)),
        ),
    }
    made = {}
    for name, (each, given, batch) in batches.items():
        comparison.PROGRESS.print(f"tracing: {name}")
        model = steps.make_model("private", given, each)
        made[name] = steps.trace(model.train_step, (batch,), given)
    seconds = steps.interleaved(made, repeats)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "users_ratio": median["users"] / median["views"],
        **{f"{name}_seconds": value for name, value in median.items()},
    }
