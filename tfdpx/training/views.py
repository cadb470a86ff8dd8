"""Makes the rows of a batch: the augmented views of its examples, with targets and weights."""

import tensorflow as tf

from tfdpx._keras import step_context
from tfdpx.augment.each_alone import CustomViews, is_built_in
from tfdpx.per_example.layout import probe_batch
from tfdpx.per_example.rows import Rows, merge_views, split_views


class Views:
    """Makes the K rows of each example of a batch, one for each view.

    Views come from an augmentation, or from data of shape [B, K, ...]. With neither, the only view
    is the example itself.

    If the plan's unit is "user", a batch consists of B people with k examples each. The shapes of
    the data then begin with [B, k] instead of [B], and each person has k * K rows.

    Args:
        augment: An augmentation, or None.
        augmult: Int K. 0 means that examples stay as they are.
        x: Nest of tensors [B, ...], or [B, k, ...] for people; only shapes are read.
        of_users: Bool, whether a batch consists of people.
        moves_targets: Bool, the argument `augment_targets` of the optimizer: whether to augment
            targets that have the size of the images. With None, such targets are refused.

    Attributes:
        augment: The augmentation, or None. A user's augmentation is wrapped, so it sees one example
            at a time.
        count: Int, the number of rows of an example or a person.
        per_user: Int k, the number of examples of a person; None if batches do not consist of
            people.

    Raises:
        ValueError: If `augment` or `augmult` needs another shape of `x`.
    """

    def __init__(self, augment, augmult, x, of_users=False, moves_targets=None):
        self._moves_targets = moves_targets
        self.per_user = tf.nest.flatten(x)[0].shape[1] if of_users else None
        self._row_axis = 1 if self.per_user is None else 2
        shape = tf.nest.flatten(x)[0].shape[self._row_axis :]
        self._size = list(shape[:2]) if len(shape) == 3 else None  # Height and width.
        self.augment = augment if augmult else None
        if self.augment is not None and not is_built_in(augment):
            self.augment = CustomViews(augment, augmult)
        self._augmult = augmult or 1
        self.count = self._augmult * (self.per_user or 1)
        self._has_views = bool(augmult) and augment is None
        if self.augment is not None and len(tf.nest.flatten(x)) != 1:
            raise ValueError(
                "`augment` works on models of a single input. Received inputs: "
                f"{tf.nest.map_structure(lambda t: t.shape, x)}. Put the views into the data, of "
                "shape [batch, augmult, ...], and leave `augment` out."
            )
        if self._has_views:
            view_axis = slice(2, 3) if of_users else slice(1, 2)
            shapes = [t.shape for t in tf.nest.flatten(x) if t.shape[view_axis] != [augmult]]
            if shapes:
                raise ValueError(
                    f"With `augmult={augmult}` and no `augment`, inputs must have shape "
                    f"[batch, {augmult}, ...]. Received: shape={shapes[0]}. Give the optimizer "
                    "an `augment`, such as tfdpx.augment.RandomCropFlip(), or `augmult=0`."
                )

    def draw(self, batch_size, seed):
        """Returns the random choices for the whole batch, or None without an augmentation."""
        if self.augment is None:
            return None
        k = self.per_user
        choices = self.augment.draw(batch_size * (k or 1), self._augmult, seed)
        if not k:
            return choices
        return tf.nest.map_structure(lambda t: split_views(t, k), choices)

    def rows(self, x, choices):
        """Returns the rows of `x`, one per view: [B * K, ...], or [B * k * K, ...] for people."""
        if self.per_user:
            x, choices = self.examples(x), self.examples(choices)
        if self.augment is not None:
            x = tf.nest.map_structure(lambda t: self.augment.apply(t, choices), x)
        elif not self._has_views:
            return x
        return tf.nest.map_structure(merge_views, x)

    def targets(self, y, choices):
        """Returns the rows of targets, [B * K, ...]; augments images if `moves_targets`."""
        choices = self.examples(choices)

        def rows(t):
            if not self._is_moved(t):
                return self.repeat(t)
            images = self.examples(t)
            has_channels = images.shape.rank == 4
            images = images if has_channels else images[..., tf.newaxis]
            views = merge_views(self.augment.apply(images, choices))
            views = views if has_channels else views[..., 0]
            is_rounded = t.dtype.is_integer and views.dtype.is_floating
            return tf.cast(tf.round(views) if is_rounded else views, t.dtype)

        return Rows(y).map(rows)

    def target_specs(self, x, y, sample_weight):
        """Returns two nests of `tf.TensorSpec`s [None, ...]: for rows of targets, and for weights.

        Raises:
            ValueError: If `augment_targets` is None although some targets are images, or True
                although none are.
        """
        axis, leaves = self._row_axis, [t for t in tf.nest.flatten(y) if t is not None]
        has_images = any(map(self._has_size, leaves))
        if has_images and self._moves_targets is None or self._moves_targets and not has_images:
            raise ValueError(
                "`augment` moves images, and targets may have to move with them. Received: targets "
                f"of shape {[tuple(t.shape) for t in leaves]} for images of size {self._size}. Let "
                "targets that are images of the same size move by the same draw: "
                "`augment_targets=True`. Leave them as they are, for example if only colours "
                "change: `augment_targets=False`."
            )

        def spec(t, size=()):
            shape = [*size, *t.shape[axis + len(size) :]]
            return tf.TensorSpec([None, *shape], t.dtype)

        def target_spec(t):
            [images, *_] = tf.nest.flatten(self.example_rows(x))
            return spec(t, images.shape[1:3] if self._is_moved(t) else ())

        both = (target_spec, y), (spec, sample_weight)
        return [
            tf.nest.map_structure(lambda t, make=make: None if t is None else make(t), nest)
            for make, nest in both
        ]

    def _has_size(self, t):
        axis = self._row_axis
        is_image = self.augment is not None and t.shape.rank in (axis + 2, axis + 3)
        return is_image and list(t.shape[axis : axis + 2]) == self._size

    def _is_moved(self, t):
        return bool(self._moves_targets) and self._has_size(t)

    def examples(self, nest):
        """Merges the first two axes of a batch of people: [B, k, ...] becomes [B * k, ...].

        If the batch does not consist of people, the nest is returned unchanged.
        """
        if not self.per_user:
            return nest
        return Rows(nest).map(merge_views)

    def example_rows(self, x):
        """Returns the rows of a made-up example like those of `x`. Reads only shapes and dtypes."""
        return step_context.eagerly(self._example_rows, x)

    def _example_rows(self, x):
        return self._rows_of_one(probe_batch(None, x, rows=1))

    def row_specs(self, x):
        """Returns the `tf.TensorSpec`s [None, ...] of the rows of `x`; other axes may be None."""
        if all(t.shape[1:].is_fully_defined() for t in tf.nest.flatten(x)):
            rows = self.example_rows(x)
        else:
            function = tf.function(self._rows_of_one, autograph=False)
            specs = [tf.TensorSpec([1, *t.shape[1:]], t.dtype) for t in tf.nest.flatten(x)]
            specs = tf.nest.pack_sequence_as(x, specs)
            rows = step_context.eagerly(function.get_concrete_function, specs).structured_outputs
        return tf.nest.map_structure(lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), rows)

    def _rows_of_one(self, x):
        return self.rows(x, self.draw(1, tf.zeros([2], tf.int64)))

    def repeat(self, nest):
        """Repeats each example for each of its views.

        A nest [B, ...] becomes [B * K, ...]. For people, [B, k, ...] becomes [B * k * K, ...].
        """
        nest = self.examples(nest)
        if self._augmult == 1:
            return nest
        return Rows(nest).map(lambda t: tf.repeat(t, self._augmult, axis=0))

    def row_weights(self, present):
        """Returns the weights of rows in the mean gradient of a person.

        Args:
            present: bool [B, k], whether each of the k examples of a person is present. None if the
                plan draws examples instead of people.

        Returns:
            float32 [B * k * K], where K is the number of views of an example. None if the plan
            draws examples: all views of an example then have the same weight.
        """
        if present is None:
            return None
        weights = tf.cast(present, "float32")
        weights /= self._augmult * tf.maximum(tf.reduce_sum(weights, axis=1, keepdims=True), 1.0)
        return self.repeat(weights)
