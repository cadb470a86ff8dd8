"""Where the time of a private step goes, by timing ever longer prefixes of it."""

import dataclasses
import statistics

import tensorflow as tf

from experiments.benchmark import steps
from tfdpx._keras import model_internals
from tfdpx.mechanism import clip_factors, privatize
from tfdpx.per_example.engine import Engine
from tfdpx.per_example.loss import row_losses

PHASES = ("forward", "activation backward", "norms", "clipped sums", "noise", "update")


def measure(settings, repeats):
    """Median seconds of each phase, as differences between a prefix of the step and the next.

    Each prefix is a `tf.function` of its own, so what TensorFlow overlaps or prunes across the
    border of two phases is attributed roughly: read the shares, not the third digit. Noise is timed
    alone; `update` is the rest of the whole step, metrics included.

    Args:
        settings: `steps.Settings` of a step of one pass, `microbatch_size=None`.
        repeats: Int. Runs of each prefix.

    Returns:
        `{phase: seconds}` for each of `PHASES`, in order, and the seconds of an ordinary step.
    """
    one_microbatch = dataclasses.replace(settings, microbatch_size=settings.images)
    timed = {
        "ordinary": steps.make_step("ordinary", settings),
        **_prefixes(settings),
        "whole": steps.make_step("private", one_microbatch),
    }
    median = {k: statistics.median(v) for k, v in steps.interleaved(timed, repeats).items()}
    return split(median), median["ordinary"]


def split(median):
    """`{phase: seconds}` from the median seconds of the prefixes, of `noise` and of `whole`."""
    forward, backward, norms, sums = PHASES[:4]
    return {
        forward: median[forward],
        backward: median[backward] - median[forward],
        norms: median[norms] - median[backward],
        sums: median[sums] - median[norms],
        "noise": median["noise"],
        "update": median["whole"] - median[sums] - median["noise"],
    }


def _prefixes(settings):
    """Functions of no arguments, by the last phase that each runs; `noise` runs that one alone."""
    model, views = steps.make_model("private", settings), settings.augmult
    optimizer, (x, y) = model.optimizer, steps.make_rows(settings)
    engine = Engine(model, x, views)

    def forward(x, y):
        return row_losses(model, x, y, model_internals.call_model(model, x), None).losses

    def backward(x, y):
        differentiated = engine.differentiate((x, y, None), engine.update(), None, None)
        gradients = differentiated.output_gradients, differentiated.whole
        # One number of each keeps all of it alive, at no cost in time or memory.
        return [tf.reshape(g, [-1])[0] for g in tf.nest.flatten(gradients)]

    def norms(x, y):
        return engine(x, y, None).squared_norms

    def sums(x, y):
        result = engine(x, y, None)
        clipping = optimizer.l2_norm_clip, optimizer.batch_size
        factors = clip_factors(result.squared_norms, tf.constant(True), *clipping)
        return result.clipped_sums(factors)

    def noisy(sums):
        scale = optimizer.noise_multiplier, optimizer.batch_size
        noisy = privatize(sums, *scale, optimizer.step_key())
        return [gradient.tensor for gradient in noisy]

    prefixes = dict(zip(PHASES, (forward, backward, norms, sums), strict=False))
    traced = {k: steps.trace(f, (x, y), settings) for k, f in prefixes.items()}
    zeros = [tf.zeros(v.shape) for v in model.trainable_variables]
    return {**traced, "noise": steps.trace(noisy, (zeros,), settings)}
