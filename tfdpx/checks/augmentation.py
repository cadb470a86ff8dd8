"""Whether an augmentation keeps examples apart."""

import numpy as np
import tensorflow as tf

from tfdpx._warnings import warn
from tfdpx.checks import made_up
from tfdpx.checks.closeness import same_rows
from tfdpx.checks.hidden_state import state_of_augment
from tfdpx.checks.separation import examples_of_pass
from tfdpx.per_example.layout import restored

# Random augmentations may mix other examples, or by little, in any one draw.
_DRAWS = 6
_TOLERANCE = 1e-4


def problems_of_augment(augment, views, x, examples):
    """Texts, a list, of how a view of one example depends on another, or on what came before.

    Args:
        augment: An object with `draw` and `apply`.
        views: Int, of each example: some augmentations make the last in another way than the first.
        x: Nest of one tensor [B, ...]; only shape and dtype are read.
        examples: Int, of one pass.
    """
    examples = examples_of_pass(examples, views)
    batches = made_up.batches(x, examples, 1, vocabulary=256, shuffled=False)
    [small], [wide], [huge] = (tf.nest.flatten(batch.x) for batch in batches)
    kept = batches[0].kept
    variables = getattr(getattr(augment, "layer", None), "variables", [])
    with restored(variables):
        choices = augment.draw(examples, views, tf.zeros([2], tf.int64))
        found = state_of_augment(augment, lambda t: augment.apply(t, choices), small)
        problems = list(found.problems("The augmentation", drawing=True))
        if problems:
            return problems
        if found.drawn:
            warn(
                "The augmentation draws random numbers outside of any keras.random.SeedGenerator, "
                "so it could not be checked that it keeps examples apart.",
            )
            return []
        for draw in range(_DRAWS):
            choices = augment.draw(examples, views, tf.constant([0, draw], tf.int64))
            before = [v.numpy() for v in variables]
            made = []
            for images in (small, wide, huge):
                for variable, value in zip(variables, before, strict=True):
                    variable.assign(value)
                made.append(augment.apply(images, choices))
            shared = [np.flatnonzero(flags) for flags in (kept, kept | batches[0].wide)]
            for a, b, rows in zip(made, made[1:], shared, strict=False):
                if not same_rows(a, b, (rows, rows), _TOLERANCE):
                    return [
                        f"The augmentation {augment.get_config()} makes the view of one example "
                        "depend on another (as MixUp and CutMix do), so clipping each example "
                        "bounds nothing. Use one that treats images one by one."
                    ]
    return []
