"""The examples of a `tf.data.Dataset`, read into memory: a draw needs every example at hand."""

import keras
import numpy as np
import tensorflow as tf


def arrays_of(dataset, num_examples=None):
    """All that a data set gives, as arrays, and a line on how much that is.

    Args:
        dataset: `tf.data.Dataset` of `x`, `(x, y)` or `(x, y, sample_weight)`, of known size.
        num_examples: Optional int. A data set of so many elements is one of examples, any other
            one of batches.

    Returns:
        Tuple `(x, y, sample_weight)`; y and sample_weight can be None.

    Raises:
        ValueError: If its size is unknown or infinite, or it is empty.
    """
    count = int(dataset.cardinality())
    if count < 0:
        kind = "infinite" if count == tf.data.INFINITE_CARDINALITY else "unknown"
        raise ValueError(
            f"Argument `x`, a tf.data.Dataset, must have a known size. Received: one of {kind} "
            "size. Leave out `repeat`; where TensorFlow cannot know the size, say it: "
            "`dataset.apply(tf.data.experimental.assert_cardinality(n))`."
        )
    elements = list(dataset.as_numpy_iterator())
    if not elements:
        raise ValueError("Argument `x`, a tf.data.Dataset, must hold examples. Received: none.")
    # What has no axis at all is of one example.
    single = count == num_examples or any(not np.ndim(p) for p in tf.nest.flatten(elements[0]))
    join = np.stack if single else np.concatenate
    arrays = tf.nest.map_structure(lambda *parts: join([np.asarray(p) for p in parts]), *elements)
    leaves = tf.nest.flatten(arrays)
    megabytes = sum(leaf.nbytes for leaf in leaves) / 2**20
    print(
        f"plan.batches has read a tf.data.Dataset of {len(leaves[0]):,} examples into memory, "
        f"{megabytes:,.1f} MiB. For more than fits there: tfdpx.RandomAccess."
    )
    return keras.utils.unpack_x_y_sample_weight(arrays)
