"""The rows of each example as the private step feeds them to the model: one for each view.

Where a plan is of people, an "example" of the step is a person with k examples of K views each.
"""

import tensorflow as tf

from tfdpx._keras import model_internals, step_context
from tfdpx.augment.each_alone import CustomViews, is_built_in
from tfdpx.per_example.layout import probe_batch
from tfdpx.per_example.rows import Rows, merge_views, split_views


class Views:
    """Makes the K rows of each example: by augmentation, from data [B, K, ...], or one as it is.

    Args:
        augment: An augmentation, or None.
        augmult: Int. 0: the examples as they are.
        x: Nest of tensors [B, ...], of people [B, k, ...]; only shapes are read.
        of_users: Whether each of B is a person.

    Attributes:
        augment: The augmentation, None if there is none to do. That of a user's makes the views
            of each example by themselves.
        count: Int, rows an example.
        per_user: Int k, examples of a person; None where there are no people.

    Raises:
        ValueError: If `x` has not the shape that the first two need.
    """

    def __init__(self, augment, augmult, x, of_users=False):
        self.per_user = tf.nest.flatten(x)[0].shape[1] if of_users else None
        self.augment = augment if augmult else None
        if self.augment is not None and not is_built_in(augment):
            self.augment = CustomViews(augment, augmult)
        self._augmult = augmult or 1
        self.count = self._augmult * (self.per_user or 1)
        self._given = bool(augmult) and augment is None
        if self.augment is not None and len(tf.nest.flatten(x)) != 1:
            raise ValueError(
                "`augment` works on models of a single input. Received inputs: "
                f"{tf.nest.map_structure(lambda t: t.shape, x)}. Put the views into the data, of "
                "shape [batch, augmult, ...], and leave `augment` out."
            )
        if self._given:
            behind = slice(2, 3) if of_users else slice(1, 2)
            wrong = [t.shape for t in tf.nest.flatten(x) if t.shape[behind] != [augmult]]
            if wrong:
                raise ValueError(
                    f"With `augmult={augmult}` and no `augment`, inputs must have shape "
                    f"[batch, {augmult}, ...]. Received: shape={wrong[0]}. Give the optimizer "
                    "an `augment`, such as tfdpx.augment.RandomCropFlip(), or `augmult=0`."
                )

    def draw(self, batch_size, seed):
        """The random choices for the whole batch, or None."""
        if self.augment is None:
            return None
        k = self.per_user
        choices = self.augment.draw(batch_size * (k or 1), self._augmult, seed)
        if not k:
            return choices
        return tf.nest.map_structure(lambda t: split_views(t, k), choices)

    def rows(self, x, choices):
        """`x` [B, ...] or [B, K, ...] as rows [B * K, ...]; of people, all of theirs."""
        if self.per_user:
            x, choices = self.examples(x), self.examples(choices)
        if self.augment is not None:
            x = tf.nest.map_structure(lambda t: self.augment.apply(t, choices), x)
        elif not self._given:
            return x
        return tf.nest.map_structure(merge_views, x)

    def examples(self, nest):
        """`nest` [B, ...] as it is, of people [B, k, ...] as [B * k, ...]."""
        if not self.per_user:
            return nest
        return Rows(nest).map(merge_views)

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
        """`nest` [B, ...], of people [B, k, ...], repeated for each view: a row each."""
        nest = self.examples(nest)
        if self._augmult == 1:
            return nest
        return Rows(nest).map(lambda t: tf.repeat(t, self._augmult, axis=0))

    def shares(self, given):
        """What each row weighs in the mean gradient of its person: float32 [B * k * K].

        Args:
            given: bool [B, k], which examples of each person are there; None where there are no
                people, and each row weighs 1 / K.

        Returns:
            The weights, None without people.
        """
        if given is None:
            return None
        each = tf.cast(given, "float32")
        each /= self._augmult * tf.maximum(tf.reduce_sum(each, axis=1, keepdims=True), 1.0)
        return self.repeat(each)


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
    views = Views(optimizer.augment, optimizer.augmult, x, optimizer.of_users)
    targets = views.examples((y, sample_weight))
    model_internals.build(model, (views.example_rows(x), *targets))
    return views
