"""Callbacks that would act on training data without noise are refused, and writers warn."""

import collections
import functools
import json
import types

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx
from tfdpx.accounting import PrivacyPlan
from tfdpx.checks.callbacks import check_callbacks

keras_callbacks = keras.callbacks


def checkpoint(path, **arguments):
    return keras_callbacks.ModelCheckpoint(path, save_weights_only=True, **arguments)


class Acts(keras_callbacks.Callback):
    """A callback with the attributes of others, for example Optuna's pruning or `SaveBestEpoch`."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


def of_mlflow(**attributes):
    """Returns a callback like MLflow's, which is no dependency."""
    module = {"__module__": "mlflow.tensorflow.callback"}
    return type("MlflowCallback", (Acts,), module)(**attributes)


Objective = collections.namedtuple("Objective", "name direction")
PLAN = PrivacyPlan(num_examples=16, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-3)
# From the name of a metric to a callback that acts on it.
ACTING = {
    "EarlyStopping": keras_callbacks.EarlyStopping,
    "ReduceLROnPlateau": keras_callbacks.ReduceLROnPlateau,
    "ModelCheckpoint": lambda metric: checkpoint(
        "m.weights.h5", monitor=metric, save_best_only=True
    ),
    "a name of files": lambda metric: checkpoint(f"m-{{epoch}}-{{{metric}:.2f}}.weights.h5"),
    "a name of folders": lambda metric: Acts(backup_dir=f"m-{{{metric}}}"),
    "Optuna": lambda metric: Acts(_monitor=metric, _trial=None),
    "KerasTuner": lambda metric: Acts(objective=Objective(metric, "min")),
    "MLflow": lambda metric: of_mlflow(monitor=metric, save_best_only=True),
    "a nested list": lambda metric: [[keras_callbacks.History(), [Acts(monitor=metric)]]],
    "CallbackList": lambda metric: [keras_callbacks.CallbackList([Acts(monitor=metric)])],
}


def check(callbacks, noise_multiplier=1.0, public_validation=True):
    optimizer = types.SimpleNamespace(
        noise_multiplier=noise_multiplier, public_validation=public_validation
    )
    check_callbacks(callbacks, optimizer)


def make(**arguments):
    return small.model(tfdpx.DPSGD(0.1, plan=PLAN, **arguments))


@pytest.mark.parametrize("how", ACTING)
def test_acting_on_training_metrics_is_refused_and_on_validation_metrics_needs_a_word(how):
    acting = ACTING[how]
    autolog = r".*`mlflow.autolog\(checkpoint=False\)`" if how == "MLflow" else ""
    message = "act on the training data without noise.*'loss'|write the training metric 'loss'"
    with pytest.raises(ValueError, match=f"({message}){autolog}"):
        check(acting("loss"))
    message = f"validation .* does not cover.*`public_validation=True`{autolog}"
    with pytest.raises(ValueError, match=message):
        check(acting("val_loss"), public_validation=False)
    check(acting("val_loss"))
    check(acting("epsilon"))
    check(acting("loss"), noise_multiplier=0.0)


def test_ending_a_run_at_a_loss_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="TerminateOnNaN.*nonfinite_examples"):
        check(keras_callbacks.TerminateOnNaN())
    check(keras_callbacks.TerminateOnNaN(), noise_multiplier=0.0)


IMAGES, LABELS = small.data(16)
TENSOR, BATCHES = tf.constant(IMAGES), PLAN.batches(IMAGES, LABELS)
PARTS = {"a": IMAGES[:, :3], "b": IMAGES[:, 3:]}
# The training data and the validation data.
SHARED = {
    "a list": ((IMAGES, LABELS), [IMAGES, LABELS]),
    "every second": ((IMAGES, LABELS), (IMAGES[::2], LABELS[::2])),
    "a view": ((IMAGES, LABELS), (IMAGES.reshape(16, 6, 1)[..., 0], LABELS, np.ones(16))),
    "a tensor": ((TENSOR, LABELS), (TENSOR, LABELS)),
    "batches": ((BATCHES,), BATCHES),
    "one of several": ((PARTS, LABELS), ({"a": IMAGES[:, :3] + 1, "b": IMAGES[:4, 3:]}, LABELS)),
}


@pytest.mark.parametrize("how", SHARED)
def test_validation_data_that_are_trained_on_are_refused(how):
    private, data = SHARED[how]
    model = make(public_validation=True)
    fits = [model.fit, functools.partial(tfdpx.distributed.fit, model, PLAN)]
    for fit in fits[:1] if how == "batches" else fits:
        with pytest.raises(ValueError, match="`validation_data` must hold other examples"):
            fit(*private, validation_data=data, verbose=0)
    assert model.optimizer.ledger.steps == 0


@pytest.mark.parametrize(
    "name", ["m-{epoch:02d}-{val_loss:.2f}-{loss!r}", "m-{loss.real}", "m-{history[loss]}",
             "m-{epoch:{loss}}"]
)  # fmt: skip
def test_a_training_metric_anywhere_in_a_path_is_refused(name):
    with pytest.raises(ValueError, match="ModelCheckpoint.*path.*Received: filepath="):
        check(checkpoint(f"{name}.weights.h5"))


def test_other_fields_of_a_path_are_allowed():
    for name in ("m-{epoch}-{batch}", "m-{epoch:02d}-{val_loss:.2f}-{val_accuracy}", "m-{{loss}}",
                 "m-{epsilon:.3f}-{epsilon_approximate}-{learning_rate}"):  # fmt: skip
        check(checkpoint(f"{name}.weights.h5"))


@pytest.mark.filterwarnings("error")
def test_callbacks_that_write_the_training_loss_warn_and_others_do_not(tmp_path):
    for writes in (
        keras_callbacks.CSVLogger(tmp_path / "log.csv"),
        keras_callbacks.RemoteMonitor(),
        keras_callbacks.TensorBoard(tmp_path),
        of_mlflow(monitor="val_loss", save_best_only=False),
    ):
        with pytest.warns(UserWarning, match="writes the training loss .*not cover"):
            check([writes])
        check([writes], noise_multiplier=0.0)
    check(None)
    check([
        tfdpx.callbacks.PrivacyBudget(
            PrivacyPlan(64, batch_size=8, steps=7, noise_multiplier=1.0, delta=1e-3)
        ),
        tfdpx.callbacks.TensorBoard(tmp_path),
        keras_callbacks.LearningRateScheduler(lambda epoch, rate: rate),
        keras_callbacks.SwapEMAWeights(),
        keras_callbacks.BackupAndRestore(tmp_path),
        keras_callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
        checkpoint(f"{tmp_path}/m.weights.h5", monitor="loss"),
    ])  # fmt: skip


def test_fit_refuses_before_the_first_step_unless_the_examples_are_declared_public(tmp_path):
    model, held_out = make(), (IMAGES + 1, LABELS)
    for monitor, message in (("loss", "training data without"), ("val_loss", "validation metrics")):
        arguments = {
            "validation_data": held_out,
            "callbacks": [keras_callbacks.EarlyStopping(monitor)],
            "verbose": 0,
        }
        with pytest.raises(ValueError, match=f"EarlyStopping would act on .*{message}"):
            model.fit(IMAGES, LABELS, **arguments)
        with pytest.raises(ValueError, match=f"EarlyStopping would act on .*{message}"):
            tfdpx.distributed.fit(model, PLAN, IMAGES, LABELS, **arguments)
    assert int(model.optimizer.iterations) == 0
    declared = make(public_validation=True)
    declared.fit(IMAGES, LABELS, **arguments)
    declared.save(tmp_path / "m.keras")
    assert keras.saving.load_model(tmp_path / "m.keras").optimizer.public_validation is True
    config = model.optimizer.get_config()
    assert json.loads(json.dumps(config))["public_validation"] is False
    with pytest.raises(ValueError, match="`public_validation` must be True or False"):
        make(public_validation=1)
