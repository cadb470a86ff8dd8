"""Whether an augmentation keeps examples apart."""

import numpy as np
import tensorflow as tf

from tfdpx import keras_internals
from tfdpx.augment import LayerViews, is_own
from tfdpx.checks import made_up
from tfdpx.checks.closeness import same_rows
from tfdpx.checks.separation import examples_of_pass
from tfdpx.independence.hidden_state import Found

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
    if is_own(augment):
        return list(_problems_of_layer(augment))
    examples = examples_of_pass(examples, views)
    batches = made_up.batches(x, examples, 1, vocabulary=256, shuffled=False)
    [small], [wide], [huge] = (tf.nest.flatten(batch.x) for batch in batches)
    if problems := _problems_of_state(augment, examples, views, small):
        return problems
    kept = batches[0].kept
    for draw in range(_DRAWS):
        choices = augment.draw(examples, views, tf.constant([0, draw], tf.int64))
        made = [augment.apply(images, choices) for images in (small, wide, huge)]
        shared = [np.flatnonzero(flags) for flags in (kept, kept | batches[0].wide)]
        for a, b, rows in zip(made, made[1:], shared, strict=False):
            if not same_rows(a, b, (rows, rows), _TOLERANCE):
                return [
                    f"The augmentation {augment.get_config()} makes the view of one example depend "
                    "on another, so clipping each example bounds nothing. Use one that treats "
                    "images one by one."
                ]
    return []


def _problems_of_state(augment, examples, views, images):
    def draw(number):
        return augment.draw(examples, views, tf.constant([0, number], tf.int64))

    choices = draw(0)
    for function, given in (
        (lambda t: augment.apply(t, choices), images),
        (lambda seed: augment.draw(examples, views, seed), tf.TensorSpec([2], tf.int64)),
    ):
        graph = tf.function(function, autograph=False).get_concrete_function(given).graph
        if problems := list(Found(graph, None, []).problems("The augmentation")):
            return problems
    again, other = (
        all(np.array_equal(*pair) for pair in zip(*map(tf.nest.flatten, nests), strict=True))
        for nests in ((choices, draw(0)), (choices, draw(1)))
    )
    alike = all(np.all(np.equal(t, t[:1])) for t in tf.nest.flatten(choices))
    if again and (alike or not other):
        return []
    return [
        f"The random choices of the augmentation {augment.get_config()} do not follow from the "
        "`seed` that its `draw` is given, so they are not secret. Draw by "
        "`tf.random.stateless_uniform(shape, seed)`."
    ]


def _problems_of_layer(augment):
    """Texts of what a layer does that makes each view alone: it may still draw or keep unseen."""
    inner = getattr(augment, "augment", augment)
    if not isinstance(inner, LayerViews):
        return
    for layer in keras_internals.flatten_layers(inner.layer):
        if type(layer).__name__ in ("MixUp", "CutMix"):
            yield (
                f"{type(layer).__name__} makes the view of one example depend on another, and here "
                "each view is made by itself. Use `tfdpx.augment.MixViews`, which mixes views of "
                "one example."
            )
    for graph in inner.graphs():
        yield from Found(graph, inner.layer, []).problems("The augmentation")
