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
        (TABLE, "dates in column 1.*days since a public date"),
        (DAYS, "dates,.*days since a public date"),
        (np.array([[1.5, "Oslo"], [2, None]] * 8, object), "texts in column 1.*categories"),
        (np.array([[1.5, 2], [2, None]] * 8, object), r"objects,.*\.astype"),
    ],
    ids=["dates", "only dates", "texts", "numbers"],
)
def test_columns_of_a_table_are_refused_by_their_kind(x, message):
    with pytest.raises(ValueError, match=f"Received: {message}") as error:
        PLAN.batches(x, np.zeros(ROWS))
    assert "Oslo" not in str(error.value)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="Argument `x` must hold rows of one length.*pad_seq"):
        PLAN.batches([[1.0, 2.0], [3.0]] * 8, np.zeros(ROWS))


def test_a_data_set_of_single_examples_is_told_to_make_batches():
    x, y = small.data()
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN))
    accepts = tfdpx.PrivacyBudget(PLAN, allow_approximate=True)
    with pytest.raises(ValueError, match=r"Call `.batch\(...\)` on the dataset"):
        model.fit(tf.data.Dataset.from_tensor_slices((x, y)), callbacks=[accepts], verbose=0)


def test_a_metric_of_the_whole_batch_is_refused_by_name():
    def share(y_true, y_pred):
        return keras.ops.mean(keras.ops.cast(keras.ops.argmax(y_pred, -1) > 0, "float32"))

    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN), compile_arguments={"metrics": [share]})
    with pytest.raises(ValueError, match="Metric 'share' returns one number.*axis=-1"):
        model.fit(*small.data(), verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_targets_that_are_strings_are_refused():
    x, _ = small.data()
    names = tf.constant(["a", "b"] * 8)
    model = small.model()
    with pytest.raises(ValueError, match="`y` must hold numbers. Received: strings"):
        model.fit(tf.data.Dataset.from_tensors((x, names)), verbose=0)
    with pytest.raises(ValueError, match="`y` must hold numbers"):
        small.model(tfdpx.DPSGD(0.1, plan=PLAN)).fit(PLAN.batches(x, names), verbose=0)
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
    x, _ = small.data()
    model = autoencoder()
    model.build(x.shape)
    wanted = oracle.batch_of_one_gradients(model, tf.constant(x), None, None, 1)
    norms = np.linalg.norm(wanted, axis=1)
    clip = float(np.median(norms))
    model.compile(tfdpx.DPSGD(1.0, batch_size=ROWS, noise_multiplier=1e-8, l2_norm_clip=clip))
    before = small.weights(model)
    model.train_on_batch(x)
    step = (wanted / np.maximum(norms, clip)[:, None]).sum(axis=0) / ROWS
    np.testing.assert_allclose(before - small.weights(model), step, atol=2e-6)


def test_a_missing_target_is_named():
    x, _ = small.data()
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN))
    callbacks = [tfdpx.callbacks.PrivacyBudget(PLAN, allow_approximate=True)]
    for data in (PLAN.batches(x), x, tf.data.Dataset.from_tensors(x[:8])):
        with pytest.raises(ValueError, match="`y` is missing, but the loss.*compute_loss"):
            model.fit(data, callbacks=callbacks, verbose=0)
    with pytest.raises(ValueError, match="`y` is missing, but the loss"):
        model.train_on_batch(x[:8])
    model = autoencoder(optimizer=tfdpx.DPSGD(0.1, plan=PLAN), metrics=["mae"])
    with pytest.raises(ValueError, match="`y` is missing, but the metrics.*compute_metrics"):
        model.fit(PLAN.batches(x), verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_a_step_on_a_batch_of_different_lengths_is_refused():
    x, y = small.data()
    model = small.model()
    for targets in (y[:8], y[:1]):
        with pytest.raises(ValueError, match="must have one length. Received: shapes"):
            model.train_on_batch(x, targets)
    signature = (tf.TensorSpec([None, 6], "float32"), tf.TensorSpec([None], "int64"))
    dataset = tf.data.Dataset.from_generator(lambda: iter([(x, y[:1])]), output_signature=signature)
    model.build(x.shape)
    before = small.weights(model)
    # Known only when the step runs, but while it is traced from Keras 3.16 on.
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)):
        model.fit(dataset, verbose=0)
    np.testing.assert_array_equal(small.weights(model), before)
