"""What makes a model or a loss unfit for private training, and the remedy.

Every check runs before the first step, on made-up data of the right shapes and dtypes: no private
example is read. One error lists every problem that was found: the layer, where it is known, and the
remedy. Checks give the texts of problems; only `errors.refusing` raises.
"""

from tfdpx import keras_internals
from tfdpx.checks.augmentation import check_augment
from tfdpx.checks.declared import declared_problems
from tfdpx.checks.errors import UnfitForPrivacy, refusing
from tfdpx.checks.gradients import problems_of_gradients, problems_of_loss
from tfdpx.checks.hidden_state import problems_of_state_of_loss
from tfdpx.checks.perturbed import perturbed
from tfdpx.checks.separation import examples_of_pass, problems_of_pass
from tfdpx.per_example import ENGINES
from tfdpx.per_example.layout import restored
from tfdpx.per_example.rows import synthetic

__all__ = ["UnfitForPrivacy", "check_augment", "check_step"]

# Of the comparison with batches of one.
_EXAMPLES = 3


def check_step(model, optimizer, rows, y, sample_weight, views, examples):
    """Raises unless `optimizer` can train `model` privately on batches like these.

    Args:
        model: A compiled, built `keras.Model`.
        optimizer: The tfdpx optimizer.
        rows: Nest of tensors [rows, ...], the model's input; only shapes and dtypes are read.
        y: Nest of tensors [B, ...]; only shapes and dtypes are read.
        sample_weight: As `y`, or None.
        views: Int K.
        examples: Int, of one pass through the model.

    Raises:
        UnfitForPrivacy: With every reason and its remedy.
    """
    with refusing() as problems:
        problems += declared_problems(model)
        # A model that declares any would show it again in what it computes.
        if not problems:
            batch = (rows, y, sample_weight)
            # Two views show what sixteen do.
            keras_internals.eagerly(
                _run, problems, model, optimizer, batch, min(views, 2), examples
            )


def _run(problems, model, optimizer, batch, views, examples):
    """Adds to `problems` what running the model shows."""
    # Losses of several outputs update metrics as they are computed.
    with (
        restored([*model.non_trainable_variables, *model.metrics_variables]),
        perturbed(model.trainable_variables),
    ):
        engine = ENGINES[optimizer.per_example_engine](model, batch[0], views)
        size = examples_of_pass(examples, views)
        problems += problems_of_pass(model, engine, batch[0], size, views)
        with keras_internals.still():
            few = synthetic(batch, _EXAMPLES * views, seed=0)
            y_pred = keras_internals.call_model(model, few[0])
            problems += problems_of_state_of_loss(model, *few, y_pred)
            problems += problems_of_loss(model, *few, y_pred, examples_of_pass(examples, 1))
            # Norms differ where examples mix.
            if not problems:
                problems += problems_of_gradients(model, engine, *few, views)
