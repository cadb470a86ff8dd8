"""Callbacks that would act on training data without noise are refused, and writers warn."""

import collections
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


def orbax(monitor, save_best_only):
    # Its constructor needs a package that is not a dependency.
    callback = object.__new__(keras_callbacks.OrbaxCheckpoint)
    callback.monitor, callback.save_best_only = monitor, save_best_only
    return callback


class Patient(keras_callbacks.EarlyStopping):
    """A subclass, as users write them."""


class Monitors(keras_callbacks.Callback):
    """A callback that is not Keras's, with Keras's convention of a monitored name."""

    def __init__(self, monitor):
        super().__init__()
        self.monitor = monitor


class Acts(keras_callbacks.Callback):
    """A callback with the attributes of others, for example Optuna's pruning or `SaveBestEpoch`."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


MONITORING = [
    keras_callbacks.EarlyStopping, keras_callbacks.ReduceLROnPlateau, Patient, Monitors,
    lambda monitor: checkpoint("m.weights.h5", monitor=monitor, save_best_only=True),
]  # fmt: skip
if hasattr(keras_callbacks, "OrbaxCheckpoint"):
    MONITORING.append(lambda monitor: orbax(monitor, save_best_only=True))

WRAPS = {
    "alone": lambda c: c,
    "nested list": lambda c: [[keras_callbacks.History(), [c]]],
    "CallbackList": lambda c: [keras_callbacks.CallbackList([c])],
}


Objective = collections.namedtuple("Objective", "name direction")
PLAN = PrivacyPlan(num_examples=16, batch_size=8, steps=2, noise_multiplier=1.0, delta=1e-3)


def check(callbacks, noise_multiplier=1.0, public_validation=True):
    optimizer = types.SimpleNamespace(
        noise_multiplier=noise_multiplier, public_validation=public_validation
    )
    check_callbacks(callbacks, optimizer)


def make(**arguments):
    return small.model(tfdpx.DPSGD(0.1, plan=PLAN, **arguments))


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_callbacks_that_act_on_the_training_data_are_refused(wrap):
    for make in MONITORING:
        with pytest.raises(ValueError, match="monitor='loss'"):
            check(wrap(make("loss")))
        check(wrap(make("val_loss")))
        check(wrap(make("epsilon")))
        check(wrap(make("loss")), noise_multiplier=0.0)
    with pytest.raises(ValueError, match="TerminateOnNaN.*nonfinite_examples"):
        check(wrap(keras_callbacks.TerminateOnNaN()))
    check(wrap(keras_callbacks.TerminateOnNaN()), noise_multiplier=0.0)


ACTING = {
    "EarlyStopping": lambda folder: keras_callbacks.EarlyStopping("val_loss"),
    "ReduceLROnPlateau": lambda folder: keras_callbacks.ReduceLROnPlateau("val_loss"),
    "ModelCheckpoint": lambda folder: checkpoint(
        folder / "m.weights.h5", monitor="val_loss", save_best_only=True
    ),
    "in a name": lambda folder: checkpoint(folder / "m-{val_loss:.2f}.weights.h5"),
    "Optuna": lambda folder: Acts(_monitor="val_loss", _trial=None),
    "KerasTuner": lambda folder: Acts(objective=Objective("val_loss", "min")),
}


@pytest.mark.parametrize("how", ACTING)
def test_acting_on_validation_metrics_needs_the_declaration(how, tmp_path):
    callback = ACTING[how](tmp_path)
    with pytest.raises(ValueError, match="validation .* does not cover.*`public_validation=True`"):
        check(callback, public_validation=False)
    check(callback)
    check(callback, noise_multiplier=0.0, public_validation=False)


OF_OTHERS = {
    "arrays": lambda x, y: {"validation_data": (x + 1, y)},
    "a generator": lambda x, y: {
        "validation_data": (pair for pair in [(x + 1, y)] * 9), "validation_steps": 1
    },
    "the split of a plan": lambda x, y: {"x": PLAN.batches(x, y, validation_split=0.5), "y": None},
}  # fmt: skip


@pytest.mark.parametrize("how", OF_OTHERS)
def test_fit_takes_the_declaration_whatever_the_examples(how):
    x, y = small.data(32)
    count = 16 if how in ("arrays", "a generator") else 32
    x, y = x[:count], y[:count]
    arguments = {"x": x, "y": y, "verbose": 0, **OF_OTHERS[how](x, y)}
    stop = keras_callbacks.EarlyStopping("val_loss", patience=9)
    model = make()
    with pytest.raises(ValueError, match="EarlyStopping would act on validation metrics, which"):
        model.fit(callbacks=[stop], **arguments)
    assert model.optimizer.ledger.steps == 0
    make(public_validation=True).fit(callbacks=[stop], **arguments)
    assert np.isfinite(stop.best)


SHARED = {
    "a list": lambda x, y: [x, y],
    "every second": lambda x, y: (x[::2], y[::2]),
    "a view": lambda x, y: (x.reshape(16, 6, 1)[..., 0], y, np.ones(16)),
}


@pytest.mark.parametrize("how", SHARED)
def test_validation_data_in_the_memory_of_x_are_refused(how):
    x, y = small.data(16)
    data = SHARED[how](x, y)
    for declared in (False, True):
        model = make(public_validation=declared)
        with pytest.raises(ValueError, match="`validation_data` must hold other examples"):
            model.fit(x, y, validation_data=data, verbose=0)
        with pytest.raises(ValueError, match="`validation_data` must hold other examples"):
            tfdpx.distributed.fit(model, PLAN, x, y, validation_data=data, verbose=0)
        assert model.optimizer.ledger.steps == 0


def test_validation_data_that_are_the_object_x_are_refused():
    x, y = small.data(16)
    tensor, batches = tf.constant(x), PLAN.batches(x, y)
    for private, data in (
        ({"x": tensor, "y": y}, (tensor, y)),
        ({"x": batches}, batches),
        ({"x": {"a": x[:, :3], "b": x[:, 3:]}, "y": y}, ({"a": x[:, :3] + 1, "b": x[:4, 3:]}, y)),
    ):
        with pytest.raises(ValueError, match="`validation_data` must hold other examples"):
            make().fit(**private, validation_data=data, verbose=0)
    source = tfdpx.RandomAccess(list(zip(x, y, strict=True)))
    with pytest.raises(ValueError, match="`validation_data` must hold other examples"):
        tfdpx.distributed.fit(make(), PLAN, source, validation_data=(source,), verbose=0)


def test_the_declaration_is_the_optimizers_and_in_its_files(tmp_path):
    x, y = small.data(16)
    model = make(public_validation=True)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "m.keras")
    assert keras.saving.load_model(tmp_path / "m.keras").optimizer.public_validation is True
    config = tfdpx.DPAdam(0.1, plan=PLAN).get_config()
    assert json.loads(json.dumps(config))["public_validation"] is False
    with pytest.raises(ValueError, match="`public_validation` must be True or False"):
        tfdpx.DPSGD(0.1, plan=PLAN, public_validation=1)
    with pytest.raises(AttributeError, match="read-only"):
        model.optimizer.public_validation = False


REFUSED_NAMES = [
    "m-{accuracy:.2f}", "m-{epoch:02d}-{val_loss:.2f}-{loss!r}", "m-{loss.real}",
    "m-{history[loss]}", "m-{epoch:{loss}}",
]  # fmt: skip
ALLOWED_NAMES = [
    "m", "m-{epoch}-{batch}", "m-{epoch:02d}-{val_loss:.2f}-{val_accuracy}", "m-{{loss}}",
    "m-{epsilon:.3f}-{epsilon_approximate}-{learning_rate}",
]  # fmt: skip


def test_a_training_metric_in_a_path_is_refused_and_no_other_field(tmp_path):
    for name in REFUSED_NAMES:
        with pytest.raises(ValueError, match="ModelCheckpoint.*path.*Received: filepath="):
            check(checkpoint(f"{tmp_path}/{name}.weights.h5"))

        backup = keras_callbacks.BackupAndRestore(tmp_path)
        backup.backup_dir = name
        with pytest.raises(ValueError, match="BackupAndRestore.*Received: backup_dir="):
            check(backup)
    for name in ALLOWED_NAMES:
        check(checkpoint(f"{tmp_path}/{name}.weights.h5"))


def of_mlflow(**attributes):
    """Returns a callback like MLflow's, which is no dependency."""
    module = {"__module__": "mlflow.tensorflow.callback"}
    return type("MlflowCallback", (Acts,), module)(**attributes)


def test_the_checkpoints_that_mlflow_adds_are_refused_with_the_way_to_leave_them_out():
    for monitor in ("val_loss", "loss"):
        with pytest.raises(ValueError, match=r"Mlflow.*`mlflow.autolog\(checkpoint=False\)`"):
            check(of_mlflow(monitor=monitor, save_best_only=True), public_validation=False)
    with pytest.warns(UserWarning, match="MlflowCallback writes the training loss"):
        check(of_mlflow(monitor="val_loss", save_best_only=False))


@pytest.mark.filterwarnings("error")
def test_callbacks_that_write_the_training_loss_warn_and_others_do_not(tmp_path):
    for writes in (
        keras_callbacks.CSVLogger(tmp_path / "log.csv"),
        keras_callbacks.RemoteMonitor(),
        keras_callbacks.TensorBoard(tmp_path),
        of_mlflow(),
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


def test_fit_refuses_before_the_first_step():
    x, y = small.data()
    model = make()
    callback = keras_callbacks.EarlyStopping("loss")
    with pytest.raises(ValueError, match="training data without noise"):
        model.fit(x, y, callbacks=[callback], verbose=0)
    with pytest.raises(ValueError, match="training data without noise"):
        tfdpx.distributed.fit(model, PLAN, x, y, callbacks=[callback])
    assert int(model.optimizer.iterations) == 0
