"""What makes a model or a loss unfit for private training, and the remedy.

Every check runs before the first step, on made-up data of the right shapes and dtypes: no private
example is read. One error lists every problem that was found: the layer, where it is known, and the
remedy. Checks give the texts of problems; only `errors.refusing` raises.
"""

import contextlib

import tensorflow as tf
from absl import logging

from tfdpx import keras_internals
from tfdpx.checks.adapted import public
from tfdpx.checks.augmentation import problems_of_augment
from tfdpx.checks.declared import declared_problems
from tfdpx.checks.errors import UnfitForPrivacy, refusing
from tfdpx.checks.gradients import problems_of_gradients, problems_of_loss
from tfdpx.checks.perturbed import perturbed
from tfdpx.checks.separation import examples_of_pass, problems_of_pass
from tfdpx.checks.training_pass import TrainingPass
from tfdpx.independence.hidden_state import (
    problems_of_state,
    problems_of_state_of_loss,
    problems_of_state_of_metrics,
)
from tfdpx.independence.verdict import (
    Independence,
    independence_of,
    independence_of_pass,
    shared_draws,
)
from tfdpx.per_example.layout import restored
from tfdpx.per_example.rows import Rows, synthetic

__all__ = [
    "Independence",
    "UnfitForPrivacy",
    "check_alone",
    "check_declared",
    "check_step",
    "public",
    "independence_of",
    "why_alone",
]

# Of the comparison with batches of one.
_EXAMPLES = 3
# Of random numbers that decide which branches run.
_KEYS = 6


def check_declared(model):
    """Raises if what `model` declares about itself is unfit; nothing of it is run.

    Args:
        model: A compiled, built `keras.Model`.

    Raises:
        UnfitForPrivacy: With every reason and its remedy.
    """
    with refusing() as problems:
        problems += declared_problems(model)


def check_step(model, engine, views, x, y, sample_weight, sizes):
    """Raises unless `model` can be trained privately on batches like these.

    Passes whose number of rows varies are let pass only if it is proved, for every number, that
    examples keep apart: comparing some of made-up data would speak for one number alone.

    Args:
        model: A compiled, built `keras.Model` that `check_declared` lets pass.
        engine: The per-example engine of the step.
        views: `tfdpx.augmult.Views`: what makes the model's rows of `x`.
        x: Nest of tensors [B, ...]; only shapes and dtypes are read, as of what follows.
        y: As `x`, or None.
        sample_weight: As `x`, or None.
        sizes: List of `tfdpx.memory.pass_size.PassSize`, what may be taken, the best first; the
            last does not vary.

    Returns:
        Pair of a `Independence`, for the rows that were tried or for any number of them: whether it
        is also proved that they keep apart; and the one of `sizes` that it speaks for.

    Raises:
        UnfitForPrivacy: With every reason and its remedy.
    """
    with refusing() as problems:
        if views.augment is not None:
            problems += keras_internals.eagerly(
                problems_of_augment, views.augment, views.count, x, sizes[-1].examples
            )
        batch, specs = (views.example_rows(x), y, sample_weight), views.row_specs(x)
        # Two views show what sixteen do.
        few = min(views.count, 2)
        weighted = any(weight is not None for weight in tf.nest.flatten(sample_weight))
        absent = weighted or not sizes[-1].fits(Rows(x).count)
        with _not_optimized():
            return keras_internals.eagerly(
                _run, problems, model, engine.with_views(few), batch, specs, few, sizes, absent
            )


def why_alone(model, views, x, separation):
    """Text of why each example must be computed alone for its random draws to be its own, or None.

    Args:
        model: A compiled, built `keras.Model`.
        views: As for `check_step`, like `x`.
        x: Nest of tensors [B, ...]; only shapes and dtypes are read.
        separation: The `Independence` of its passes.
    """
    if not separation.reasons or not keras_internals.seed_generators(model):
        return None
    found = keras_internals.eagerly(shared_draws, model, views.row_specs(x), separation.rows)
    return next(iter(found), None)


def check_alone(model, engine, views, x, y, sample_weight, why):
    """Raises unless TensorFlow can compute each example of such batches alone, random layers too.

    Args:
        model: As for `check_step`, like what follows.
        engine: The engine that does.
        views: `tfdpx.augmult.Views`.
        x: Nest of tensors [B, ...]; only shapes and dtypes are read.
        y: As `x`, or None.
        sample_weight: As `x`, or None.
        why: Str, why they are to be.

    Raises:
        UnfitForPrivacy: With the reason and the remedy.
    """
    batch = views.example_rows(x), y, sample_weight

    def run():
        with restored([*model.non_trainable_variables, *model.metrics_variables]):
            for number in range(_KEYS):
                made_up = synthetic(batch, 2 * views.count, seed=number)
                engine(*made_up, key=tf.constant([0, number], tf.int64)).squared_norms.numpy()

    try:
        keras_internals.eagerly(run)
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        raise UnfitForPrivacy(
            f"{why}, so one example more or less would change the draws of others; and TensorFlow "
            "cannot compute such a model for each example alone. Give the random layer to the "
            "optimizer as `augment=`, which makes each view by itself, or leave it out."
        ) from error


@contextlib.contextmanager
def _not_optimized():
    """Within it graphs are run as they are: for a few runs, optimizing them does not pay."""
    off = "disable_meta_optimizer"
    before = tf.config.optimizer.get_experimental_options().get(off, False)
    tf.config.optimizer.set_experimental_options({off: True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({off: before})


def _run(problems, model, engine, batch, specs, num_views, sizes, absent):
    """Adds to `problems` what running the model shows; returns as `check_step` if nothing does."""
    found = []
    # Losses of several outputs update metrics as they are computed.
    with (
        restored([*model.non_trainable_variables, *model.metrics_variables]),
        perturbed(model.trainable_variables),
    ):
        examples = sizes[-1].examples
        targets = batch[1:]
        if sizes[0].varies and (proof := _proof_for_any_number(model, engine, specs, targets)):
            found = [proof, sizes[0]]
        else:
            size = examples_of_pass(examples, num_views)

            def look(one_pass):
                rows = size * num_views
                separation = independence_of_pass(model, one_pass, *targets, rows)
                found.extend([separation, sizes[-1]])
                problems.extend(problems_of_state_of_loss(model, one_pass, *targets, rows))
                problems.extend(
                    problems_of_state_of_metrics(model, one_pass, *targets, rows, absent)
                )
                return not separation.reasons

            problems += problems_of_pass(model, engine, batch[0], specs, size, num_views, look)
        with keras_internals.still():
            few = synthetic(batch, _EXAMPLES * num_views, seed=0)
            y_pred = keras_internals.call_model(model, few[0])
            problems += problems_of_loss(model, *few, y_pred, examples_of_pass(examples, 1))
            # Norms differ where examples mix.
            if not problems:
                problems += problems_of_gradients(model, engine, *few, num_views)
    return tuple(found)


def _proof_for_any_number(model, engine, specs, targets):
    """The `Independence` of passes of any number of rows, or None where nothing proves it."""
    if model.run_eagerly:
        return None
    try:
        one_pass = TrainingPass(model, engine, specs, None)
        kept = [
            *problems_of_state(model, one_pass),
            *problems_of_state_of_loss(model, one_pass, *targets, None),
            *problems_of_state_of_metrics(model, one_pass, *targets, None, absent=True),
        ]
    except Exception as error:  # Whatever a layer or metric raises that asks for the number.
        logging.info("Passes are of one size: '%s' needs a number of rows (%s).", model.name, error)
        return None
    if one_pass.added or kept:
        return None
    separation = independence_of_pass(model, one_pass, *targets, None)
    return None if separation.reasons else separation
