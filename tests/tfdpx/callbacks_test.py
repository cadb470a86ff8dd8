import csv
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

from tfdpx import callbacks
from tfdpx.accounting import PrivacyPlan


class FakeDPSGD(keras.optimizers.SGD):
    """SGD with what the callbacks look for in an optimizer of tfdpx."""

    def __init__(self, batch_size=8, noise_multiplier=1.0, **kwargs):
        super().__init__(**kwargs)
        self.batch_size = batch_size
        self.noise_multiplier = noise_multiplier
        self.l2_norm_clip = 1.0

    def private_train_step(self, model, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = model(x, training=True)
            square = tf.reduce_mean((y_pred - y) ** 2)
        gradients = tape.gradient(square, model.trainable_variables)
        self.apply(gradients, model.trainable_variables)
        model.compute_metrics(x, y, y_pred)
        return {"square": square, "absolute": tf.reduce_mean(tf.abs(y_pred - y))}


class FakeWithNorm(FakeDPSGD):
    privatized_gradient_norm = 0.75


class CountSteps(keras.layers.Layer):
    """Counts the steps that really run."""

    def build(self, input_shape):
        self.steps = self.add_weight(dtype="int64", initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.steps.assign_add(1)
        return inputs


def make_plan(steps=7, **arguments):
    arguments = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"} | arguments
    return PrivacyPlan(64, batch_size=8, steps=steps, **arguments)


def make_model(optimizer=None, **arguments):
    model = keras.Sequential([keras.Input([2]), CountSteps(), keras.layers.Dense(1)])
    optimizer = optimizer or FakeDPSGD(learning_rate=0.25)
    model.compile(optimizer, "mse", metrics=["mae"], **arguments)
    return model


def make_data(batches=50):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=[8 * batches, 2]), generator.normal(size=[8 * batches, 1])
    return tf.data.Dataset.from_tensor_slices((x.astype("f4"), y.astype("f4"))).batch(8)


def fit(model, *fit_callbacks, **arguments):
    arguments = {"epochs": 1, "verbose": 0} | arguments
    return model.fit(make_data(), callbacks=list(fit_callbacks), **arguments)


def steps_run(model):
    return int(model.layers[0].steps)


@pytest.mark.parametrize("arguments", [{}, {"epochs": 5, "steps_per_epoch": 3}])
@pytest.mark.parametrize("steps", [1, 6, 7])
def test_training_stops_before_the_step_that_would_exceed(steps, arguments):
    model = make_model()
    fit(model, callbacks.PrivacyBudget(make_plan(steps)), **arguments)
    assert steps_run(model) == model.optimizer.iterations == steps


@pytest.mark.parametrize("steps_per_execution, taken", [(1, 7), (2, 6), (3, 6), (4, 4), (7, 7)])
def test_executions_of_several_steps_never_overrun(steps_per_execution, taken):
    model = make_model(steps_per_execution=steps_per_execution)
    fit(model, callbacks.PrivacyBudget(make_plan(7)))
    assert steps_run(model) == model.optimizer.iterations == taken


def test_training_that_needs_less_is_left_alone():
    model = make_model()
    history = fit(model, callbacks.PrivacyBudget(make_plan(70)), epochs=2, steps_per_epoch=5)
    assert steps_run(model) == 10
    assert len(history.history["epsilon"]) == 2


def test_the_budget_holds_over_several_fits():
    model, budget = make_model(), callbacks.PrivacyBudget(make_plan(7))
    fit(model, budget, steps_per_epoch=4)
    fit(model, budget, steps_per_epoch=4)
    assert steps_run(model) == 7
    with pytest.raises(callbacks.BudgetExceeded, match="used up: 7 of 7 steps .*epsilon="):
        fit(model, budget)
    assert steps_run(model) == 7
    assert issubclass(callbacks.BudgetExceeded, RuntimeError)


def test_an_execution_that_cannot_fit_is_an_error():
    model = make_model(steps_per_execution=8)
    with pytest.raises(callbacks.BudgetExceeded, match="execution of 8 steps.*0 of 7 steps"):
        fit(model, callbacks.PrivacyBudget(make_plan(7)))
    assert steps_run(model) == 0


def test_an_optimizer_without_privacy_is_an_error():
    model = make_model(keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"of type SGD, without batch_size.*tfdpx\.DPSGD"):
        fit(model, callbacks.PrivacyBudget(make_plan()))
    wrapped = make_model(keras.optimizers.LossScaleOptimizer(FakeDPSGD()))
    with pytest.raises(TypeError, match="of type LossScaleOptimizer"):
        fit(wrapped, callbacks.PrivacyBudget(make_plan()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 16}, r"disagree on `batch_size`.*plan\.batch_size=8, optimizer.*=16"),
        ({"noise_multiplier": 0.99}, r"disagree on `noise_multiplier`.*=1\.0, optimizer.*=0\.99"),
    ],
)
def test_a_plan_for_another_optimizer_is_an_error(arguments, message):
    model = make_model(FakeDPSGD(**arguments))
    with pytest.raises(ValueError, match=message):
        fit(model, callbacks.PrivacyBudget(make_plan()))
    assert steps_run(model) == 0


def test_float32_noise_agrees():
    plan = make_plan(noise_multiplier=1.1)
    model = make_model(FakeDPSGD(noise_multiplier=np.float32(1.1)))
    fit(model, callbacks.PrivacyBudget(plan))
    assert steps_run(model) == 7


def test_epsilon_is_in_what_comes_after(tmp_path, capsys):
    plan, path = make_plan(7), tmp_path / "log.csv"
    history = fit(
        make_model(),
        callbacks.PrivacyBudget(plan),
        keras.callbacks.CSVLogger(path),
        epochs=3,
        steps_per_epoch=3,
        verbose=2,
    )
    expected = [plan.epsilon_at(steps) for steps in (3, 6, 7)]
    assert history.history["epsilon"] == expected
    assert 0 < expected[0] < expected[1] < expected[2] == plan.epsilon
    with open(path, encoding="utf-8") as file:
        assert [float(row["epsilon"]) for row in csv.DictReader(file)] == expected
    assert f"epsilon: {expected[0]:.4f}" in capsys.readouterr().out


def test_epsilon_is_in_the_progress_bar(capsys):
    plan = make_plan(7)
    fit(make_model(), callbacks.PrivacyBudget(plan), steps_per_epoch=3, verbose=1)
    assert f"epsilon: {plan.epsilon_at(3):.4f}" in capsys.readouterr().out


def test_epsilon_without_noise_is_infinite():
    model = make_model(FakeDPSGD(noise_multiplier=0.0))
    budget = callbacks.PrivacyBudget(make_plan(noise_multiplier=0.0))
    assert fit(model, budget).history["epsilon"] == [math.inf]


@pytest.mark.parametrize("by", ["plan", "optimizer"])
def test_an_approximate_epsilon_is_called_so(by):
    plan = make_plan(sampling="shuffle" if by == "plan" else "poisson")
    model = make_model()
    # What an optimizer says of itself that was given other batches than the plan's.
    model.optimizer.epsilon_is_approximate = by == "optimizer"
    history = fit(model, callbacks.PrivacyBudget(plan)).history
    assert history["epsilon_approximate"] == [plan.epsilon]
    assert "epsilon" not in history


def read_scalars(folder):
    """Dict from run to dict from tag to values, of all event files under `folder`."""
    runs = {}
    for run in {path.parent for path in pathlib.Path(folder).rglob("*.tfevents.*")}:
        events = event_accumulator.EventAccumulator(str(run), size_guidance={"tensors": 0})
        events.Reload()
        runs[run.name] = {
            tag: [float(tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
            for tag in events.Tags()["tensors"]
            if events.SummaryMetadata(tag).plugin_data.plugin_name == "scalars"
        }
    return {run: scalars for run, scalars in runs.items() if scalars}


def test_keras_tensorboard_after_the_budget_shows_epsilon(tmp_path):
    plan = make_plan(7)
    fit(make_model(), callbacks.PrivacyBudget(plan), keras.callbacks.TensorBoard(tmp_path))
    scalars = read_scalars(tmp_path)["train"]
    assert scalars["epoch_epsilon"] == pytest.approx([plan.epsilon])
    assert "epoch_square" in scalars  # What tfdpx's own does not write.


@pytest.mark.parametrize("with_budget", [True, False])
def test_tensorboard_writes_only_what_the_guarantee_covers(tmp_path, with_budget):
    plan = make_plan(7)
    board = callbacks.TensorBoard(tmp_path, plan=None if with_budget else plan, histogram_freq=1)
    before = [callbacks.PrivacyBudget(plan)] if with_budget else []
    model = make_model(FakeWithNorm(learning_rate=0.25))
    fit(model, *before, board, epochs=2, steps_per_epoch=3, validation_data=make_data(2))
    scalars = read_scalars(tmp_path)
    assert scalars["train"] == {
        "epoch_epsilon": pytest.approx([plan.epsilon_at(3), plan.epsilon_at(6)]),
        "epoch_noise_multiplier": [1.0, 1.0],
        "epoch_learning_rate": [0.25, 0.25],
        "epoch_privatized_gradient_norm": [0.75, 0.75],
    }
    assert {"epoch_loss", "epoch_mae"} <= set(scalars["validation"])
    assert set(scalars) == {"train", "validation"}


def test_tensorboard_without_a_plan_writes_no_epsilon(tmp_path):
    fit(make_model(), callbacks.TensorBoard(tmp_path))
    assert set(read_scalars(tmp_path)["train"]) == {
        "epoch_noise_multiplier",
        "epoch_learning_rate",
    }


def test_tensorboard_names_an_approximate_epsilon(tmp_path):
    plan = make_plan(sampling="shuffle")
    fit(make_model(), callbacks.TensorBoard(tmp_path, plan=plan), steps_per_epoch=7)
    assert read_scalars(tmp_path)["train"]["epoch_epsilon_approximate"] == pytest.approx(
        [plan.epsilon]
    )


@pytest.mark.parametrize("log_private_metrics", [False, True])
def test_tensorboard_by_batch(tmp_path, log_private_metrics):
    board = callbacks.TensorBoard(tmp_path, update_freq=2, log_private_metrics=log_private_metrics)
    fit(make_model(FakeWithNorm()), board, steps_per_epoch=6)
    scalars = read_scalars(tmp_path)
    assert scalars["train"]["batch_privatized_gradient_norm"] == [0.75] * 3
    assert "batch_square" not in scalars["train"]
    if log_private_metrics:
        assert len(scalars["not_private"]["not_private/batch_square"]) == 3
    assert ("not_private" in scalars) == log_private_metrics


def test_private_metrics_are_labelled(tmp_path):
    board = callbacks.TensorBoard(tmp_path, log_private_metrics=True)
    budget = callbacks.PrivacyBudget(make_plan(7))
    history = fit(make_model(), budget, board, epochs=2, steps_per_epoch=3).history
    scalars = read_scalars(tmp_path)
    assert scalars["not_private"] == {
        "not_private/epoch_square": pytest.approx(history["square"]),
        "not_private/epoch_absolute": pytest.approx(history["absolute"]),
    }
    assert not {"epoch_square", "epoch_absolute"} & set(scalars["train"])
    assert "epoch_epsilon" in scalars["train"]
