"""Measures the norms of examples' gradients during a training, at the current weights."""

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import model_internals
from tfdpx.training.step import class_factors
from tfdpx.training.views import Views

# A key is one of these numbers, for views or for random layers, and the number of the batch.
_VIEWS, _MASKS = 0, 1


class GradientNorms:
    """Measures the norms of examples' gradients before clipping, at the current weights.

    The norms are computed without noise, so they reveal private data. The graph that computes them
    is traced only once.

    Args:
        model: A compiled `keras.Model`.
        examples: `Examples` or `RandomAccess`.
        batch_size: Int, the number of examples that are in memory at once.
        make_engine: Function `make_engine(views, batch)` that returns the per-example engine.
            `views` is a `Views`, and `batch` an `(x, y, sample_weight)` with the shapes of later
            batches.
        finish: Optional function `finish(squared_norms, y, y_pred)` that computes the results for
            a batch, [n], from the squared norms. By default, the results are the norms.
    """

    def __init__(self, model, examples, batch_size, make_engine, finish=None):
        self._model, self._examples, self._batch_size = model, examples, batch_size
        self._finish = finish or (lambda squared_norms, y, y_pred: tf.sqrt(squared_norms))
        optimizer = model_internals.innermost(model.optimizer)
        augment, augmult = getattr(optimizer, "augment", None), getattr(optimizer, "augmult", 0)
        batch = self._batch(np.zeros([0], np.int64))
        targets = getattr(optimizer, "augment_targets", None)
        self._views = Views(augment, augmult, batch[0], moves_targets=targets)
        self._engine = make_engine(self._views, batch)
        self._measure = tf.function(self._norms, autograph=False)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Returns the norms, float32 [n], for the examples with the indices `rows`, int [n]."""
        norms, size = [np.zeros([0], np.float32)], self._batch_size
        for number, first in enumerate(range(0, len(rows), size)):
            part = rows[first : first + size]
            part_norms = self._measure(self._batch(part), tf.constant(number, tf.int64))
            norms.append(part_norms.numpy()[: len(part)])
        return np.concatenate(norms)

    def _batch(self, rows):
        """Returns `(x, y, sample_weight)`, tensors [batch_size, ...], padded with zeros."""
        x, y, weights = self._examples.batch(tf.constant(rows, tf.int64), self._batch_size)
        return x, y, weights if self._examples.is_weighted else None

    def _norms(self, data, number):
        x, y, weights = data
        choices = self._views.draw(self._batch_size, tf.stack([_VIEWS, number]))
        targets = self._views.targets(y, choices), self._views.repeat(weights)
        key = tf.stack([_MASKS, number])
        output = self._engine(self._views.rows(x, choices), *targets, key=key)
        return self._finish(output.squared_norms, y, output.y_pred)


class Refresh(keras.callbacks.Callback):
    """Measures the norms of all examples for the optimizer's clip policy, when a refresh is due.

    Each host measures all examples, on its first device.

    Args:
        examples: `Examples` or `RandomAccess`.
    """

    def __init__(self, examples):
        super().__init__()
        self._examples, self._norms = examples, None

    def on_train_batch_end(self, batch, logs=None):
        """Measures all norms, if a refresh is due."""
        optimizer = model_internals.innermost(self.model.optimizer)
        if not optimizer.clip_policy.refresh_is_due():
            return
        count = self._examples.count
        if self._norms is None:
            size, engine = min(optimizer.batch_size, count), optimizer.prepared[self.model].engine

            def finish(squared_norms, y, y_pred):
                _, factors = class_factors(optimizer, self.model, y, y_pred)
                if factors is not None:
                    squared_norms = optimizer.clip_policy.after_weights(squared_norms, factors)
                return tf.sqrt(squared_norms)

            self._norms = GradientNorms(self.model, self._examples, size, lambda *_: engine, finish)
        optimizer.clip_policy.refresh(self._norms(np.arange(count)))


def norm_refreshes(model, session):
    """Returns a list of callbacks: one `Refresh`, or none if the optimizer needs none.

    `Refresh` must come before all other callbacks.

    Args:
        model: The `keras.Model`.
        session: The `tfdpx.training.session.Session` of the `fit`.
    """
    individual = model_internals.innermost(model.optimizer).individual
    is_asked = individual is not None and individual.refreshes_per_epoch
    return [Refresh(session.draws.examples)] if is_asked else []
