"""Which datasets a head can be fitted to, told before the first pass."""

import tensorflow as tf

from tfdpx._keras import tensorflow_internals

# What may give an example twice in a pass.
_REPEATS = {"RepeatDataset"}


def feature_shape(dataset, labelled):
    """The shape of the features in a batch of `dataset`, a tuple of ints and Nones.

    Args:
        dataset: `tf.data.Dataset`.
        labelled: Bool, whether it must have labels.

    Raises:
        ValueError: If it does not end, repeats examples, or is none of dense batches of
            `(features, labels)`.
    """
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY or _REPEATS & (
        tensorflow_internals.sources_of(dataset)
    ):
        raise ValueError(
            "Argument `features` must be a dataset that ends and gives every example once: an "
            "example that comes twice in a pass is worth twice the noise. Received: an infinite "
            "dataset, or one with `repeat`. Leave out `repeat`; a head makes its own passes."
        )
    spec = dataset.element_spec
    parts = spec if isinstance(spec, tuple) else (spec,)
    dense = all(isinstance(part, tf.TensorSpec) for part in parts)
    if not dense or len(parts) > 2 or (labelled and len(parts) < 2):
        raise ValueError(
            "Argument `features` must be a dataset of batches (features, labels) of dense tensors. "
            f"Received: elements of {spec}. A head takes no sample weights."
        )
    shape = parts[0].shape
    if shape.rank is None:
        raise ValueError(
            "Argument `features` must be a dataset whose features have a known rank. Received: "
            f"elements of {spec}. Set it with `tf.ensure_shape`."
        )
    return tuple(shape)
