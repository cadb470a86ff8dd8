"""Whether the examples of a pass keep apart, at its real size, forward and backward.

What the private step clips for an example is formed from the inputs of each captured layer and from
the gradients at its outputs. If these rows depend neither on other rows nor on their place, then
neither does what the example contributes, and clipping bounds it. So they are compared between
batches that share some examples and differ in others.
"""

import contextlib

import numpy as np
import tensorflow as tf

from tfdpx import keras_internals
from tfdpx._warnings import warn
from tfdpx.checks import made_up
from tfdpx.checks.closeness import close, is_full_precision, same_rows
from tfdpx.checks.culprit import find_mixing_operation
from tfdpx.checks.training_pass import TrainingPass
from tfdpx.independence.hidden_state import problems_of_state
from tfdpx.per_example.layout import restored
from tfdpx.per_example.outputs import Outputs
from tfdpx.per_example.rows import Rows

# The fewest examples that show anything, and the most rows that are made up for a huge pass.
_FEWEST, _MOST_ROWS = 4, 512
# Relative to a row's size. Batches in another order may be rounded otherwise, and rounding turns
# single gradients of ReLU on or off.
_FORWARD, _BACKWARD, _BACKWARD_REORDERED, _HALF = 1e-4, 1e-3, 2e-2, 5e-2
_ADVICE = (
    "the other examples of the batch or on its place in the batch, so clipping each example bounds "
    "nothing. Use layers that treat examples one by one (GroupNorm or LayerNormalization in place "
    "of batch statistics)."
)


def examples_of_pass(examples, views):
    """How many examples are made up for a pass of `examples` with `views` rows each."""
    return max(min(examples, _MOST_ROWS // views), _FEWEST)


def problems_of_pass(model, engine, x, specs, examples, views, look):
    """Texts of what a training pass keeps, and of the first way in which its examples mix.

    Where `look` proves that they keep apart, nothing is run to see whether they do.

    Args:
        model: A compiled, built `keras.Model`.
        engine: The per-example engine.
        x: Nest of tensors [rows, ...]; only shapes and dtypes are read.
        specs: As `TrainingPass` takes them.
        examples: Int, of a pass.
        views: Int, rows an example.
        look: Function of the `TrainingPass` in training mode, called if it keeps nothing. It says
            whether its examples are proved to keep apart.
    """
    rows = examples * views
    looked_at = TrainingPass(model, engine, specs, rows)
    if looked_at.added:
        yield (
            f"These layers call `add_loss`: {looked_at.added}. Such a loss is not known by "
            "example. Put a loss on weights into a `kernel_regularizer`, one on data into "
            "`compile(loss=...)`."
        )
    kept = list(problems_of_state(model, looked_at))
    yield from kept
    # Run, it would leave its traces, and two runs could not be compared.
    if kept or look(looked_at):
        return
    random = bool(keras_internals.seed_generators(model))
    for still in (False, True) if random else (False,):
        with keras_internals.still() if still else contextlib.nullcontext():
            compared = TrainingPass(model, engine, specs, rows, fingerprints=True)
            # Random layers draw by place: the examples are reordered only where they hold still.
            batches = _made_up(model, x, examples, views, shuffled=still or not random)
            mixing, whole = _compare_batches(model, compared, batches)
            if mixing:
                yield mixing
                return
    with keras_internals.still():
        yield from _compare_alone(model, whole)


def _made_up(model, x, examples, views, shuffled):
    """The three batches of `made_up.batches`."""
    vocabulary = made_up.vocabulary(lambda batch: keras_internals.call_model(model, batch), x)
    return made_up.batches(x, examples, views, vocabulary, shuffled)


def _compare_batches(model, one_pass, batches):
    """How rows that batches share differ, a text or None; and what the second batch gave."""

    def run(batch):
        # The same random numbers each time.
        with restored(keras_internals.seed_states(model)):
            return one_pass(batch)

    first, second, third = batches
    small, wide = run(first), run(second)
    mixing = _difference(model, one_pass, small, wide, first.kept) or _difference(
        model, one_pass, wide, run(third), first.kept | first.wide
    )
    if model.run_eagerly:
        # Python may remember what it saw; a graph cannot.
        mixing = mixing or _difference(model, one_pass, small, run(first), first.kept)
    floats = [t for t in small.predictions if t.dtype.is_floating]
    if not mixing and not all(tf.reduce_any(tf.math.is_finite(t)) for t in floats):
        warn(
            "It could not be checked that examples keep apart: on made-up data the model's outputs "
            "are not finite.",
        )
    return mixing, wide


def _difference(model, one_pass, a, b, flags):
    """How `a` and `b`, both `Captured`, differ in the rows that `flags` marks; None if nowhere."""
    places = [captured.batch.places(np.flatnonzero(flags)) for captured in (a, b)]
    floor = 0.0 if is_full_precision(model) else _HALF

    def same(first, second, tolerance):
        tolerance = max(tolerance, floor)
        pairs = zip(first, second, strict=True)
        return all(same_rows(*pair, places, tolerance) for pair in pairs)

    if not all(same(*each, _FORWARD) for each in zip(a.outputs, b.outputs, strict=True)):
        culprit = find_mixing_operation(model, a.batch.x, b.batch.x, places)
        return f"{culprit} makes the output for one example depend on {_ADVICE}"
    reordered = (places[0] != places[1]).any()
    tolerance = _BACKWARD_REORDERED if reordered else _BACKWARD
    for name, *pair in reversed(list(zip(one_pass.layers, a.gradients, b.gradients, strict=True))):
        if not same(*pair, tolerance):
            return (
                f"Layer '{name}', or what follows it, makes the gradient at its output for one "
                f"example depend on {_ADVICE} A custom gradient that scales or clips by the whole "
                "batch has to do so example by example."
            )
    return None


def _compare_alone(model, whole):
    """The text of how single rows differ from what they gave in the whole batch, a `Captured`."""
    x, last = whole.batch.x, len(whole.batch.order) - 1
    for row in (0, last // 2, last):
        one = Rows(x).map(lambda t, row=row: t[row : row + 1])
        alone = Outputs(keras_internals.call_model(model, one)).tensors
        if not all(
            close(w[row : row + 1], a, is_full_precision(model))
            for w, a in zip(whole.predictions, alone, strict=True)
        ):
            culprit = find_mixing_operation(model, x, one, ([row], [0]))
            yield f"{culprit} makes the output for one example depend on {_ADVICE}"
            return
