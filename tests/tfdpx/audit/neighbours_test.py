"""`check_run`: honest runs show the same on neighbouring data; each planted leak is named."""

import json
import pathlib

import keras
import numpy as np
import pytest
import small

import tfdpx
from tfdpx import audit

STEPS, ROWS = 4, 16


def neighbours():
    """Data of 16 examples, and the same with one that is far from all others, and hard."""
    x, y = small.data()
    other, labels = x.copy(), y.copy()
    other[3] = 100.0
    labels[3] = np.argmin(make()[0](other[3:4])[0])
    return (x, y), (other, labels)


def make(optimizer=None, **arguments):
    plan = tfdpx.PrivacyPlan(ROWS, batch_size=8, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
    compiled = {"jit_compile": False, **arguments}
    model = small.model(optimizer or tfdpx.DPSGD(0.5, plan=plan), compile_arguments=compiled)
    return model, plan


def honest(data, jit_compile):
    model, plan = make(jit_compile=jit_compile)
    model.fit(
        plan.batches(*data, optimizer=model.optimizer),
        callbacks=[
            tfdpx.PrivacyBudget(plan),
            tfdpx.callbacks.TensorBoard("logs"),
            tfdpx.callbacks.Checkpoint("run"),
        ],
        verbose=0,
    )
    model.save("model.keras")
    pathlib.Path("report.json").write_text(json.dumps({"epsilon": plan.epsilon_at(STEPS)}))
    print("steps:", model.optimizer.ledger.steps)
    return model


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_honest_run_shows_the_same(jit_compile):
    def train(data):
        return honest(data, jit_compile)

    report = audit.check_run(train, *neighbours())
    assert report.passed, str(report)
    assert report.updates == STEPS and "report.json" in report.files
    assert any("tfevents" in name for name in report.files)
    assert any(name.startswith("run/") for name in report.files)


def test_the_runs_are_handed_the_same_releases_and_their_own_data():
    ends, losses = [], []

    def train(data):
        model, plan = make()
        losses.append(model.fit(*data, batch_size=8, verbose=0, shuffle=False).history["loss"])
        ends.append(small.weights(model))

    assert audit.check_run(train, *neighbours()).passed
    np.testing.assert_array_equal(*ends)
    assert losses[0] != losses[1]


class LogLoss(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        with open("log.txt", "a") as file:
            file.write(f"{batch} {logs['loss']}\n")


class StopOnLoss(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if logs["loss"] > 10.0:
            self.model.stop_training = True


class RateOfLoss(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 if logs["loss"] > 10.0 else 0.2


def unplanned(data, callbacks=(), **arguments):
    model, _ = make(tfdpx.DPSGD(0.5, batch_size=8, noise_multiplier=1.0))
    history = model.fit(
        *data, **{"batch_size": 8, "epochs": 4, "verbose": 0, "callbacks": callbacks, **arguments}
    )
    return model, history


def steps_of_the_data(data):
    x, y = data
    usual = np.abs(x).max(axis=1) < 50.0
    unplanned((x[usual], y[usual]), epochs=int(usual.sum()) // 4)


def batch_of_the_data(data):
    rows = 8 if np.abs(data[0]).max() < 50.0 else 4
    unplanned(data, batch_size=rows)


def printed_loss(data):
    print("mean input", data[0].mean())
    unplanned(data)


def file_of_the_data(data):
    unplanned(data)
    if np.abs(data[0]).max() > 50.0:
        pathlib.Path("outliers").touch()


def order_of_calls(data):
    model, _ = unplanned(data)
    calls = [lambda: model.save_weights("a.weights.h5"), lambda: model.predict(data[0], verbose=0)]
    for call in calls[:: 1 if np.abs(data[0]).max() > 50.0 else -1]:
        call()


def error_of_the_data(data):
    unplanned(data)
    if np.abs(data[0]).max() > 50.0:
        raise ArithmeticError("an outlier")


def weights_of_the_data(data):
    model, _ = unplanned(data)
    model.layers[-1].bias.assign(data[0][3, :3])
    return model


LEAKS = {
    "a loss in a file": (lambda data: unplanned(data, [LogLoss()]) and None, "file 'log.txt'"),
    "a stop": (
        lambda data: unplanned(data, [StopOnLoss()]) and None,
        "number of private updates",
    ),
    "a rate": (lambda data: unplanned(data, [RateOfLoss()]) and None, "learning rate, of"),
    "steps": (steps_of_the_data, "number of private updates: 8 and 6"),
    "a batch size": (batch_of_the_data, "batch_size=8"),
    "a print": (printed_loss, "what is printed, at place 1: mean input"),
    "the bar": (lambda data: unplanned(data, verbose=2) and None, "what is printed"),
    "a file": (file_of_the_data, "file 'outliers': only on neighbour"),
    "the order": (order_of_calls, "the calls"),
    "an error": (error_of_the_data, "an error, on neighbour alone: ArithmeticError"),
    "the result": (lambda data: unplanned(data)[1], "the result['loss']"),
    "the weights": (weights_of_the_data, "the result['sequential"),
}


@pytest.mark.parametrize("name", LEAKS)
def test_planted_leaks_are_named(name):
    train, words = LEAKS[name]
    report = audit.check_run(train, *neighbours())
    assert not report.passed and words in str(report), str(report)
    assert "FAILED" in str(report)


def test_ignored_files_are_not_compared():
    train, _ = LEAKS["a loss in a file"]
    assert audit.check_run(train, *neighbours(), ignore=["*.txt"]).passed


def test_runs_that_show_nothing_are_refused():
    with pytest.raises(ValueError, match="no private update"):
        audit.check_run(lambda data: None, *neighbours())
    with pytest.raises(ValueError, match="`max_updates=8`"):
        audit.check_run(lambda data: unplanned(data) and None, *neighbours(), max_updates=3)
    with pytest.raises(ZeroDivisionError):
        audit.check_run(lambda data: 1 / 0, *neighbours())
