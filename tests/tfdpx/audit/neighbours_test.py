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
    candidates = 100.0 * np.sign(np.random.default_rng(1).normal(size=(64, 6)))
    logits = make()[0](candidates.astype("float32")).numpy()
    worst = np.argmax(np.ptp(logits, axis=1))
    other[3], labels[3] = candidates[worst], np.argmin(logits[worst])
    return (x, y), (other, labels)


def make(optimizer=None, **arguments):
    plan = tfdpx.PrivacyPlan(ROWS, batch_size=8, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
    compiled = {"jit_compile": False, **arguments}
    model = small.model(optimizer or tfdpx.DPSGD(0.5, plan=plan), compile_arguments=compiled)
    return model, plan


def honest(data):
    model, plan = make()
    model.fit(
        plan.batches(*data, optimizer=model.optimizer),
        callbacks=[
            tfdpx.callbacks.PrivacyBudget(plan),
            tfdpx.callbacks.TensorBoard("logs"),
            tfdpx.callbacks.Checkpoint("run"),
        ],
        verbose=0,
    )
    model.save("model.keras")
    pathlib.Path("report.json").write_text(json.dumps({"epsilon": plan.epsilon_at(STEPS)}))
    print("steps:", model.optimizer.ledger.steps)
    return model


@pytest.mark.slow
def test_an_honest_run_shows_the_same():
    report = audit.check_run(honest, *neighbours())
    assert report.passed, str(report)
    assert report.updates == STEPS and "report.json" in report.files
    assert any("tfevents" in name for name in report.files)
    assert any(name.startswith("run/") for name in report.files)


@pytest.mark.slow
def test_the_runs_are_handed_the_same_releases_and_their_own_data():
    ends, losses = [], []

    def train(data):
        model, _ = make(tfdpx.DPSGD(0.5, batch_size=8, noise_multiplier=1.0))
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


def has_outlier(data):
    return np.abs(data[0]).max() > 50.0


def steps_and_batch_size(data):
    x, y = data
    usual = np.abs(x).max(axis=1) < 50.0
    rows = 4 if has_outlier(data) else 8
    unplanned((x[usual], y[usual]), epochs=int(usual.sum()) // 4, batch_size=rows)


def shown_past_the_noise(data):
    print("mean input", data[0].mean())
    model, history = unplanned(data, [LogLoss()], verbose=2)
    calls = [lambda: model.save_weights("a.weights.h5"), lambda: model.predict(data[0], verbose=0)]
    for call in calls[:: 1 if has_outlier(data) else -1]:
        call()
    if has_outlier(data):
        pathlib.Path("outliers").touch()
    model.layers[-1].bias.assign(data[0][3, :3])
    return history, model


def raises(data):
    unplanned(data)
    if has_outlier(data):
        raise ArithmeticError("an outlier")


def stops(data):
    unplanned(data, [StopOnLoss()])


def follows(data):
    unplanned(data, [RateOfLoss()])


LEAKS = {
    shown_past_the_noise: [
        "the file 'log.txt', at place ",
        "the file 'outliers': only on neighbour",
        "what is printed, at place 1: mean input",
        "the calls, at place 2: predict(ndarray[16, 6], verbose=0) and save_weights(",
        "the result[0]['loss'][0]: ",
        "the result[1]['sequential/dense_1/bias']: ",
    ],
    steps_and_batch_size: ["number of private updates: 8 and 12", "batch_size=8", "[16, 6]"],
    stops: ["number of private updates"],
    follows: ["the learning rate, of", "0.1"],
    raises: ["an error, on neighbour alone: ArithmeticError"],
}


@pytest.mark.planted("a leak past the noise, in an audit")
@pytest.mark.parametrize("train", LEAKS)
def test_planted_leaks_are_named(train):
    report = audit.check_run(train, *neighbours())
    assert not report.passed and "FAILED" in str(report)
    for words in LEAKS[train]:
        assert words in str(report), str(report)


@pytest.mark.slow
def test_the_progress_bar_shows_the_loss_and_ignored_files_are_not_compared():
    def train(data):
        unplanned(data, [LogLoss()], verbose=1)

    report = audit.check_run(train, *neighbours(), ignore=["*.txt"])
    [found] = report.differences
    assert "what is printed" in found and "loss" in found


@pytest.mark.slow
def test_runs_that_show_nothing_are_refused():
    with pytest.raises(ValueError, match="no private update"):
        audit.check_run(lambda data: None, *neighbours())
    with pytest.raises(ValueError, match="`max_updates=8`"):
        audit.check_run(lambda data: unplanned(data) and None, *neighbours(), max_updates=3)
    with pytest.raises(ZeroDivisionError):
        audit.check_run(lambda data: 1 / 0, *neighbours())
