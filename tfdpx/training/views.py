"""The K rows of each example, one for each view, as the private step feeds them to the model."""

import tensorflow as tf

from tfdpx._keras import model_internals, step_context
from tfdpx.augment.each_alone import CustomViews, is_built_in
from tfdpx.per_example.probe_batches import probe_batch
from tfdpx.per_example.rows import Rows, merge_views


class Views:
    """Makes the K rows of each example: by augmentation, from data [B, K, ...], or one as it is.

    Args:
        augment: An augmentation, or None.
        augmult: Int. 0: the examples as they are.
        x: Nest of tensors [B, ...]; only shapes are read.

    Attributes:
        augment: The augmentation, None if there is none to do. That of a user's makes the views
            of each example by themselves.
        count: Int, rows an example.

    Raises:
        ValueError: If `x` has not the shape that the first two need.
    """

    def __init__(self, augment, augmult, x):
        self.augment = augment if augmult else None
        if self.augment is not None and not is_built_in(augment):
            self.augment = CustomViews(augment, augmult)
        self.count = augmult or 1
        self._given = bool(augmult) and augment is None
        if self.augment is not None and len(tf.nest.flatten(x)) != 1:
            raise ValueError(
                "`augment` works on models of a single input. Received inputs: "
                f"{tf.nest.map_structure(lambda t: t.shape, x)}. Put the views into the data, of "
                "shape [batch, augmult, ...], and leave `augment` out."
            )
        if self._given:
            wrong = [t.shape for t in tf.nest.flatten(x) if t.shape[1:2] != [self.count]]
            if wrong:
                raise ValueError(
                    f"With `augmult={self.count}` and no `augment`, inputs must have shape "
                    f"[batch, {self.count}, ...]. Received: shape={wrong[0]}. Give the optimizer "
                    "an `augment`, such as tfdpx.augment.RandomCropFlip(), or `augmult=0`."
                )

    def draw(self, batch_size, seed):
        """The random choices for the whole batch, or None."""
        if self.augment is None:
            return None
        return self.augment.draw(batch_size, self.count, seed)

    def rows(self, x, choices):
        """`x` [B, ...] or [B, K, ...] as rows [B * K, ...]."""
        if self.augment is not None:
            x = tf.nest.map_structure(lambda t: self.augment.apply(t, choices), x)
        elif not self._given:
            return x
        return tf.nest.map_structure(merge_views, x)

    def example_rows(self, x):
        """Made-up rows with the shapes and dtypes that the model will see; no data is read."""
        return step_context.eagerly(self._example_rows, x)

    def _example_rows(self, x):
        return self._rows_of_one(probe_batch(None, x, rows=1))

    def row_specs(self, x):
        """`tf.TensorSpec`s [None, ...] of the rows; an axis whose length is unknown stays so."""
        if all(t.shape[1:].is_fully_defined() for t in tf.nest.flatten(x)):
            rows = self.example_rows(x)
        else:
            traced = tf.function(self._rows_of_one, autograph=False)
            specs = [tf.TensorSpec([1, *t.shape[1:]], t.dtype) for t in tf.nest.flatten(x)]
            specs = tf.nest.pack_sequence_as(x, specs)
            rows = step_context.eagerly(traced.get_concrete_function, specs).structured_outputs
        return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), rows)

    def _rows_of_one(self, x):
        return self.rows(x, self.draw(1, tf.zeros([2], tf.int64)))

    def repeat(self, nest):
        """`nest` [B, ...] repeated for each view, [B * K, ...]."""
        if self.count == 1:
            return nest
        return Rows(nest).map(lambda t: tf.repeat(t, self.count, axis=0))


def build(model, x, y, sample_weight):
    """Builds a model compiled with a tfdpx optimizer for batches like these.

    Args:
        model: A compiled `keras.Model`.
        x: Nest of tensors [B, ...]; only shapes and dtypes are read.
        y: As `x`, or None.
        sample_weight: As `x`, or None.

    Returns:
        The `Views` of such batches.
    """
    optimizer = model_internals.innermost(model.optimizer)
    views = Views(optimizer.augment, optimizer.augmult, x)
    model_internals.build(model, (views.example_rows(x), y, sample_weight))
    return views
