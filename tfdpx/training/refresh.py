"""Measures the norms of all examples between two updates, for individual accounting."""

import keras
import tensorflow as tf

from tfdpx import noise
from tfdpx._keras import model_internals
from tfdpx.per_example.rows import Rows
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.inputs import present_rows
from tfdpx.training.views import Views

# Sets the views of a refresh apart from those of the update that has the same seed.
_VIEWS = int.from_bytes(b"refresh", "big")


def callbacks_of(model, session):
    """List of a `Refresh` for a `fit` whose optimizer asks for it, before all other callbacks.

    Args:
        model: The `keras.Model`.
        session: The `tfdpx.training.session.Session` of the `fit`.
    """
    policy = model_internals.innermost(model.optimizer).clip_policy
    return [Refresh(session.draws.examples)] if policy.refreshes_per_epoch else []


class Refresh(keras.callbacks.Callback):
    """Gives the optimizer's clip policy the norms of all examples, whenever they are due.

    Each host measures all examples, on its first device.

    Args:
        examples: `Examples` or `RandomAccess`.
        batch_size: Int, examples that are measured at a time; the optimizer's if left out.
    """

    def __init__(self, examples, batch_size=None):
        super().__init__()
        self._examples, self._batch_size = examples, batch_size
        self._measure = self._batches = None

    def on_train_batch_end(self, batch, logs=None):
        """Measures, if it is time."""
        policy = model_internals.innermost(self.model.optimizer).clip_policy
        if policy.refresh_is_due():
            for ids, present, norms in self.measured():
                policy.refresh(ids, present, norms)

    def measured(self):
        """The norms of all examples at the weights as they are, in parts.

        The model must have made an update.

        Yields:
            `(ids, present, norms)`: int32, bool and float32 tensors [n]; norms are over the clip,
            and at most 1. Examples of weight zero, which are never drawn, are not present.
        """
        optimizer = model_internals.innermost(self.model.optimizer)
        if self._measure is None:
            size = min(self._batch_size or optimizer.batch_size, self._examples.count)
            self._measure = tf.function(self._norms, autograph=False)
            self._batches = sampled_batches.in_order(self._examples, size)
        first = 0
        for x, y, sample_weight in self._batches:
            seed = noise.fold_in(optimizer.step_key(), _VIEWS, first)
            present = present_rows(sample_weight, Rows(x).count)
            sample_weight = sample_weight if self._examples.is_weighted else None
            norms = self._measure(x, y, sample_weight, seed)
            yield tf.range(first, first + len(norms)), present, norms
            first += len(norms)

    def _norms(self, x, y, sample_weight, seed):
        """float32 [n]: norms over the clip, at most 1."""
        model = self.model
        optimizer = model_internals.innermost(model.optimizer)
        views = Views(optimizer.augment, optimizer.augmult, x)
        choices = views.draw(Rows(x).count, seed)
        y, sample_weight = views.repeat((y, sample_weight))
        rows, key = views.rows(x, choices), noise.fold_in(seed, _VIEWS)
        result = optimizer.prepared[model].engine(rows, y, sample_weight, key=key)
        return optimizer.clip_policy.over_clip(result.squared_norms)
