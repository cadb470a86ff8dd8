"""Losses on all rows at once against losses mapped over rows, and the losses that are mapped."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdpx._keras import layer_internals
from tfdpx.per_example import loss as losses
from tfdpx.per_example.loss import row_losses

L = keras.losses


class Own(L.MeanSquaredError):
    """Compares rows."""

    def call(self, y_true, y_pred):
        return super().call(y_true, y_pred) / keras.ops.max(y_true)


def model_of(loss, **arguments):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", loss, **arguments)
    return model


def inputs(y, shape):
    """Returns x, labels or targets of shape `y` or from 0 to `y`, and predictions, for 5 rows."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, y, (5, *shape[:-1])) if isinstance(y, int) else rng.uniform(size=y)
    predictions = rng.uniform(0.1, 0.9, (5, *shape))
    return tf.zeros([5, 4]), tf.constant(targets), tf.constant(predictions, tf.float32)


def tensors_of(loss, y, shape, sample_weight=None, **arguments):
    """Returns the arguments of `row_losses` for a model whose loss is built."""
    model, (x, targets, predictions) = model_of(loss, **arguments), inputs(y, shape)
    model.compute_loss(x, targets, predictions)
    return model, x, targets, predictions, sample_weight


REDUCTIONS = "sum_over_batch_size", "sum", "none", "mean_with_sample_weight"
KNOWN = [
    (L.SparseCategoricalCrossentropy, {"from_logits": True}, 3, (3,)),
    (L.SparseCategoricalCrossentropy, {}, 3, (3,)),
    (L.CategoricalCrossentropy, {"label_smoothing": 0.1}, (5, 3), (3,)),
    (L.MeanSquaredError, {}, (5, 1), (2, 1)),
    (L.BinaryCrossentropy, {}, (5, 3), (3,)),
    (L.BinaryCrossentropy, {"from_logits": True}, 2, (1,)),
    (L.MeanSquaredError, {}, (5, 2, 3), (2, 3)),
    (L.MeanSquaredError, {}, (5, 2), (2, 1)),
    (L.MeanAbsoluteError, {}, (5, 1), (3,)),
    (L.Huber, {"delta": 0.1}, (5, 3), (3,)),
]


@pytest.mark.parametrize("kind, arguments, y, shape", KNOWN)
def test_rows_at_once_are_as_mapped(kind, arguments, y, shape, monkeypatch):
    for reduction in REDUCTIONS:
        tensors = tensors_of(kind(reduction=reduction, **arguments), y, shape)
        together, mapped = row_losses(*tensors, is_rowwise=True), row_losses(*tensors)
        np.testing.assert_allclose(together.losses, mapped.losses, rtol=1e-5)
        for gradient, expected in zip(together.cotangents, mapped.cotangents, strict=True):
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    monkeypatch.setattr(losses, "vectorized_map", None)  # It is not called.
    row_losses(*tensors_of(kind(**arguments), y, shape), is_rowwise=True)


def test_a_name_and_a_function_are_known_too(monkeypatch):
    monkeypatch.setattr(losses, "vectorized_map", None)
    for loss in ("mse", keras.losses.mean_squared_error):
        row_losses(*tensors_of(loss, (5, 3), (3,)), is_rowwise=True)


def test_an_invalid_label_spoils_its_row_alone():
    model, (x, _, predictions) = model_of(L.SparseCategoricalCrossentropy()), inputs(3, (3,))
    labels = tf.constant([0, 1, 7, 2, -1])
    model.compute_loss(x, tf.zeros([5]), predictions)
    result = row_losses(model, x, labels, predictions, None, is_rowwise=True)
    for tensor in (result.losses, result.cotangents[0][:, 0]):
        np.testing.assert_array_equal(np.isnan(tensor), [0, 0, 1, 0, 1])


def replaced(loss):
    loss.call = lambda y_true, y_pred: keras.ops.mean(y_true - y_pred, axis=0)
    return loss


def with_an_array(loss):
    loss._fn_kwargs["delta"] = np.full((5, 3), 0.1)  # Keras 3.16's constructor refuses it.
    return loss


PLAIN = (5, 3), (3,)
MAPPED = {
    "a subclass": (Own(), *PLAIN, {}),
    "a replaced method": (replaced(L.MeanSquaredError()), *PLAIN, {}),
    "another function": (lambda y, p: keras.ops.mean(y - p, axis=-1), *PLAIN, {}),
    "a weighted loss": (L.MeanSquaredError(), *PLAIN, {"loss_weights": 2.0}),
    "an axis": (L.CategoricalCrossentropy(axis=0), *PLAIN, {}),
    "an array": (with_an_array(L.Huber()), *PLAIN, {}),
    "sample weights": (L.MeanSquaredError(), *PLAIN, {"sample_weight": tf.ones([5])}),
    "targets of a lower rank": (L.MeanSquaredError(), (5, 3), (5, 3), {}),
    "targets of a higher rank": (L.MeanSquaredError(), (5, 3, 1), (3,), {}),
    "labels of positions": (L.SparseCategoricalCrossentropy(), 3, (6, 3), {}),
    "a class to ignore": (L.SparseCategoricalCrossentropy(ignore_class=0), 3, (3,), {}),
}


class Stop(Exception):
    """Ends a test where a loss is mapped."""


@pytest.fixture
def stops(monkeypatch):
    def stop(*arguments, **others):
        raise Stop

    monkeypatch.setattr(losses, "vectorized_map", stop)


@pytest.mark.parametrize("name", MAPPED)
def test_other_losses_are_mapped(name, stops):
    loss, y, shape, arguments = MAPPED[name]
    with pytest.raises(Stop):
        row_losses(*tensors_of(loss, y, shape, **arguments), is_rowwise=True)


def test_masked_losses_are_mapped(stops):
    masked = tensors_of(L.MeanSquaredError(), (5, 2, 3), (2, 3))
    layer_internals.set_side_channels(masked[3], tf.ones([5, 2], tf.bool), None)
    with pytest.raises(Stop):
        row_losses(*masked, is_rowwise=True)
