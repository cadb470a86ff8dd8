"""Checks that do not run the model: its methods, its precision, and layers that keep statistics."""

import keras

from tfdpx._keras import layer_internals, model_internals
from tfdpx.checks.adapted import problems_of_adapted
from tfdpx.checks.errors import refusing
from tfdpx.mechanism import INSTEAD_OF_TRAIN_STEP


def check_declared(model):
    """Checks a model's methods, layers and optimizer; raises an error if they are unfit.

    The model is not run.

    Args:
        model: A compiled, built `keras.Model`.

    Raises:
        UnfitForPrivacy: If the model is unfit. The message has every reason and its remedy.
    """
    with refusing() as problems:
        problems += declared_problems(model)


def check_methods(model):
    """Raises UnfitForPrivacy if `model`, built or not, replaces Keras's training step.

    Args:
        model: A compiled `keras.Model`.
    """
    with refusing() as problems:
        problems += _problems_of_methods(model)


def declared_problems(model):
    """Yields a text for each reason why `model` is unfit for private training.

    The model is not run.

    Args:
        model: A compiled, built `keras.Model`. Its class, the bases and the instance are checked.
    """
    if model.optimizer is not model_internals.innermost(model.optimizer):
        yield (
            f"The optimizer is wrapped in {type(model.optimizer).__name__}. Scaling the loss by "
            "what the gradients look like uses the data beyond what the guarantee covers. "
            'Use the "mixed_bfloat16" policy in place of "mixed_float16" (or no wrapper).'
        )
    yield from _problems_of_methods(model)
    for layer in layer_internals.flatten_layers(model):
        yield from _problems_of_layer(layer)
    yield from problems_of_adapted(model)
    if not model.trainable_variables:
        yield (
            f"Model '{model.name}' has no trainable variables, so there is nothing to train. Set "
            "`trainable = True` on a layer and compile again."
        )


def _problems_of_methods(model):
    """Yields a text for each overridden method that may mix examples before Keras's step runs."""
    for method in model_internals.own_training_methods(model):
        yield (
            f"Model '{model.name}' (of type {type(model).__name__}) overrides `{method}`. Its "
            f"effect on the batch cannot be checked: for example, it may mix examples. "
            f"{INSTEAD_OF_TRAIN_STEP}"
        )


def _problems_of_layer(layer):
    """Yields texts if a layer mixes examples, or changes weights without noise."""
    if isinstance(layer, keras.layers.SpectralNormalization):
        yield (
            f"Layer '{layer.name}' is a SpectralNormalization, which overwrites the kernel of "
            "the layer inside in every training pass, frozen or not: what is clipped is then "
            "not the gradient of the weights that the optimizer updates. Use the layer inside "
            "alone, with a `kernel_constraint` that divides the kernel by its largest singular "
            "value: it acts after the noise."
        )
    if type(layer).__name__ == "AugMix":
        yield (
            f"Layer '{layer.name}' is an AugMix, which draws by Python's own random numbers: they "
            "are not secret, and the same for all examples of a pass. Give it to the optimizer as "
            "`augment=`, which makes each view by itself."
        )
    if getattr(layer, "activity_regularizer", None) is not None:
        yield (
            f"Layer '{layer.name}' has an activity regulariser, a loss over the whole batch. "
            "Build the layer without `activity_regularizer`; weight regularisers are fine."
        )
    variables = layer_internals.overwritten_with_gradients(layer)
    if variables:
        yield (
            f"Layer '{layer.name}' (of type {type(layer).__name__}) is quantized to float8: "
            f"Keras replaces its variables {variables} by maxima of the batch's activations "
            "and gradients, without clipping or noise. Build the layer with another dtype "
            'policy, such as "mixed_bfloat16", and do not call `quantize("float8")` before '
            "training."
        )
