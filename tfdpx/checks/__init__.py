"""What makes a model or a loss unfit for private training, and the remedy.

Every check runs before the first step, on made-up data of the right shapes and dtypes: no private
example is read. Each error names the layer, where it is known, and the remedy.
"""

from tfdpx import keras_internals
from tfdpx.checks.augmentation import check_augment
from tfdpx.checks.declared import check_layers, check_precision, check_train_step
from tfdpx.checks.errors import UnfitForPrivacy
from tfdpx.checks.gradients import check_gradients, check_loss
from tfdpx.checks.hidden_state import check_state_of_loss
from tfdpx.checks.perturbed import perturbed
from tfdpx.checks.separation import check_separation, examples_of_pass
from tfdpx.per_example import ENGINES
from tfdpx.per_example.layout import restored
from tfdpx.per_example.rows import synthetic

__all__ = ["UnfitForPrivacy", "check_augment", "check_declared", "check_step"]

# Of the comparison with batches of one.
_EXAMPLES = 3


def check_declared(model):
    """Raises if what `model` declares about itself is unfit; nothing of it is run.

    Args:
        model: A compiled, built `keras.Model`.

    Raises:
        UnfitForPrivacy: With the reason and the remedy.
    """
    check_precision(model)
    check_train_step(model)
    check_layers(model)
    if not model.trainable_variables:
        raise UnfitForPrivacy(
            f"Model '{model.name}' has no trainable variables, so there is nothing to train. Set "
            "`trainable = True` on a layer and compile again."
        )


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
        UnfitForPrivacy: With the reason and the remedy.
    """
    # Two views show what sixteen do.
    keras_internals.eagerly(
        _check_runs, model, optimizer, rows, y, sample_weight, min(views, 2), examples
    )


def _check_runs(model, optimizer, rows, y, sample_weight, views, examples):
    # Losses of several outputs update metrics as they are computed.
    with (
        restored([*model.non_trainable_variables, *model.metrics_variables]),
        perturbed(model.trainable_variables),
    ):
        engine = ENGINES[optimizer.per_example_engine](model, rows, views)
        check_separation(model, engine, rows, examples_of_pass(examples, views), views)
        with keras_internals.still():
            few = synthetic((rows, y, sample_weight), _EXAMPLES * views, seed=0)
            check_state_of_loss(model, *few)
            check_loss(model, *few, examples_of_pass(examples, 1))
            check_gradients(model, engine, *few, views)
