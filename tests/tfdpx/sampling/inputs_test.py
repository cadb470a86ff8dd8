"""Data that cannot be split into examples is refused by name, before the first step."""

import keras
import numpy as np
import oracle
import pytest
import scipy.sparse
import seeds
import small
import tensorflow as tf

import tfdpx
from tfdpx.accounting import PrivacyPlan

ROWS = 16
PLAN = PrivacyPlan(ROWS, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-3)
RAGGED = tf.RaggedTensor.from_row_lengths(np.arange(62, dtype="float32"), [4] * 15 + [2])
UNFIT = {
    "sparse tensor": (lambda: tf.sparse.from_dense(small.data()[0]), "sparse.*to_dense"),
    "SciPy matrix": (lambda: scipy.sparse.csr_matrix(small.data()[0]), r"sparse.*\.toarray\(\)"),
    "ragged": (lambda: RAGGED, r"ragged.*\.to_tensor\(\)"),
}
DAYS = np.arange("2024-01-01", "2024-01-17", dtype="datetime64[D]")
TABLE = np.array([[1.5, day] for day in DAYS.tolist()], object)
OBJECTS = np.array([[1, 2], [3]] * 8, dtype=object)


@pytest.mark.parametrize("make, message", [*UNFIT.values(), (lambda: OBJECTS, "objects.*padded")])
def test_batches_of_arrays_that_are_not_dense_are_refused(make, message):
    x, y = small.data()
    with pytest.raises(ValueError, match=f"Argument `x` must hold dense.*{message}"):
        PLAN.batches({"a": make()}, y)
    with pytest.raises(ValueError, match=f"Argument `y` must hold dense.*{message}"):
        PLAN.batches(x, (make(), make()))
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN))
    with pytest.raises(ValueError, match="Argument `x` must hold dense"):
        tfdpx.distributed.fit(model, PLAN, make(), y)


@pytest.mark.parametrize(
    "x, message",
    [
        (TABLE, "Received: dates in column 1.*days since a public date"),
        (DAYS, "Received: dates,.*days since a public date"),
        (np.array([[1.5, "Oslo"], [2, None]] * 8, object), "Received: texts in column 1.*categ"),
        (np.array([[1.5, 2], [2, None]] * 8, object), r"Received: objects,.*\.astype"),
        ([[1.0, 2.0], [3.0]] * 8, "Argument `x` must hold rows of one length.*pad_seq"),
    ],
    ids=["dates", "only dates", "texts", "numbers", "lists"],
)
def test_columns_of_a_table_are_refused_by_their_kind(x, message):
    with pytest.raises(ValueError, match=message) as error:
        PLAN.batches(x, np.zeros(ROWS))
    assert "Oslo" not in str(error.value)


def share(y_true, y_pred):
    """A metric of the whole batch."""
    return keras.ops.mean(keras.ops.cast(keras.ops.argmax(y_pred, -1) > 0, "float32"))


X, Y = small.data()
NAMES = tf.constant(["a", "b"] * 8)
MISSING = "`y` is missing, but the loss.*compute_loss"
# Data for `fit`, arguments of `compile`, and the message.
REFUSED = {
    "single examples": (
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)), {}, r"Call `.batch\(...\)` on the dat"
    ),
    "a metric of the whole batch": (
        lambda: PLAN.batches(X, Y), {"metrics": [share]}, "Metric 'share' returns one.*axis=-1"
    ),
    "strings": (lambda: PLAN.batches(X, NAMES), {}, "`y` must hold numbers. Received: strings"),
    "no targets in a plan's batches": (lambda: PLAN.batches(X), {}, MISSING),
    "no targets": (lambda: X, {}, MISSING),
    "no targets in a data set": (lambda: tf.data.Dataset.from_tensors(X[:8]), {}, MISSING),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unfit_data_and_metrics_are_refused_before_the_first_update(name):
    make, arguments, message = REFUSED[name]
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN), compile_arguments=arguments)
    accepts = tfdpx.PrivacyBudget(PLAN, allow_approximate=True)
    with pytest.raises(ValueError, match=message):
        model.fit(make(), callbacks=[accepts], verbose=0)
    assert int(model.optimizer.iterations) == 0


class Autoencoder(keras.Sequential):
    """A model with a loss that needs no targets."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del training
        assert y is None
        losses = tf.reduce_mean((y_pred - x) ** 2, axis=-1)
        return tf.reduce_mean(losses if sample_weight is None else losses * sample_weight)


def autoencoder(**arguments):
    seeds.fix(3)
    model = Autoencoder([keras.layers.Dense(4, "tanh"), keras.layers.Dense(6)])
    arguments = {"optimizer": tfdpx.DPSGD(1.0, batch_size=ROWS, noise_multiplier=1e-8)} | arguments
    model.compile(**arguments)
    return model


def test_a_loss_without_targets_trains_and_clips_each_example():
    model = autoencoder()
    model.build(X.shape)
    wanted = oracle.batch_of_one_gradients(model, tf.constant(X), None, None, 1)
    norms = np.linalg.norm(wanted, axis=1)
    clip = float(np.median(norms))
    model.compile(tfdpx.DPSGD(1.0, batch_size=ROWS, noise_multiplier=1e-8, l2_norm_clip=clip))
    before = small.weights(model)
    model.train_on_batch(X)
    step = (wanted / np.maximum(norms, clip)[:, None]).sum(axis=0) / ROWS
    np.testing.assert_allclose(before - small.weights(model), step, atol=2e-6)


def test_a_target_that_metrics_need_is_named():
    model = autoencoder(optimizer=tfdpx.DPSGD(0.1, plan=PLAN), metrics=["mae"])
    with pytest.raises(ValueError, match="`y` is missing, but the metrics.*compute_metrics"):
        model.fit(PLAN.batches(X), verbose=0)


def test_a_step_on_a_batch_of_different_lengths_is_refused():
    model = small.model()
    for targets in (Y[:8], Y[:1]):
        with pytest.raises(ValueError, match="must have one length. Received: shapes"):
            model.train_on_batch(X, targets)
    signature = (tf.TensorSpec([None, 6], "float32"), tf.TensorSpec([None], "int64"))
    dataset = tf.data.Dataset.from_generator(lambda: iter([(X, Y[:1])]), output_signature=signature)
    model.build(X.shape)
    before = small.weights(model)
    # Known only when the step runs, but while it is traced from Keras 3.16 on.
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        model.fit(dataset, verbose=0)
    np.testing.assert_array_equal(small.weights(model), before)
