"""The microbatches of one update: which rows each takes, and what they add up to.

A Poisson batch is padded to a capacity that is almost never reached. Rows of padding stand at its
end and add nothing, so microbatches end with the last row that is present. That number is known as
the step runs. So is the size of the last microbatch, which takes what is left; under XLA all
microbatches have one size. No row moves to another place: random layers draw by it, and a row that
is absent must leave the draws of all others as they are.
"""

import typing

import tensorflow as tf

from tfdpx.per_example.rows import Rows, along


class BatchTotals(typing.NamedTuple):
    """What the microbatches add up."""

    sums: list  # clipped sums over B, one float32 a variable
    loss: tf.Tensor  # of the present rows
    tracked: list
    examples: tf.Tensor  # float32 count of present examples
    nonfinite: tf.Tensor  # float32 count of present examples whose gradient is not finite
    measured: tf.Tensor | tuple = ()  # what the clip policy learns of norms


def run(one_microbatch, data, choices, present, size, zero):
    """The `BatchTotals` of all microbatches, and Keras's logs if one took the batch as it is.

    Args:
        one_microbatch: Function of `data`, `choices` and `present` of some rows, and of the number
            of the microbatch, to their `BatchTotals` and logs.
        data: `(x, y, sample_weight)`, nests of tensors [B, ...].
        choices: Nest of tensors [B, ...], or None.
        present: bool [B], or None where every row is present.
        size: `tfdpx.training.microbatch_size.MicrobatchSize`; the rows of a microbatch.
        zero: The `BatchTotals` of no microbatch at all.
    """
    count = Rows(data).count
    # Where all microbatches are full, none has a row to leave out. Those of any number of rows are
    # looked at as such: to what they run it must be unknown.
    full = present is None and size.fits(count)
    if full and 0 < count <= size.examples:
        return one_microbatch(data, choices, None, 0)
    rows = Rows((data, choices))
    examples = count
    if present is not None:
        examples = tf.reduce_max(tf.where(present, tf.range(1, count + 1), 0))

    def body(index, totals):
        start, length = index * size.examples, size.examples
        if size.varies:
            left = -(-(examples - start) // size.multiple) * size.multiple
            length = tf.minimum(length, left)
        places = start + tf.range(length)
        inside = places < examples
        # The rest of a last microbatch is filled with the first row, as an absent one.
        part = tf.where(inside, places, 0)
        (x, y, weights), drawn = rows.map(lambda t: tf.gather(t, part))
        if present is not None:
            inside &= tf.gather(present, part)
        if weights is not None:
            weights = Rows(weights).map(lambda w: tf.where(along(inside, w), w, tf.zeros_like(w)))
        more, _ = one_microbatch((x, y, weights), drawn, None if full else inside, index)
        return index + 1, tf.nest.map_structure(tf.add, totals, more)

    def is_left(index, _):
        return index * size.examples < examples

    loop = tf.while_loop(is_left, body, (tf.constant(0), zero), parallel_iterations=1)
    return loop[1], None
