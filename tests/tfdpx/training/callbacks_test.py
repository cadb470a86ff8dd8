import csv
import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import slow
from tensorboard.backend.event_processing import event_accumulator

import tfdpx
from tfdpx import callbacks, per_example
from tfdpx.accounting import PrivacyPlan


def make_plan(steps=7, **arguments):
    arguments = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"} | arguments
    return PrivacyPlan(64, batch_size=8, steps=steps, **arguments)


def make_model(optimizer=None, noise_multiplier=1.0, **arguments):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = optimizer or tfdpx.DPSGD(0.25, batch_size=8, noise_multiplier=noise_multiplier)
    model.compile(optimizer, "mse", metrics=["mae"], **arguments)
    return model


def make_data(rows=64):
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=[rows, 2]), generator.normal(size=[rows, 1])
    return x.astype("f4"), y.astype("f4")


def fit(model, *fit_callbacks, plan=None, **arguments):
    """On batches of a plan of many more steps than any budget here."""
    plan = plan or make_plan(1000)
    arguments = {"epochs": 1, "verbose": 0} | arguments
    return model.fit(plan.batches(*make_data()), callbacks=list(fit_callbacks), **arguments)


def steps_run(model):
    return int(model.optimizer.iterations)


@pytest.mark.parametrize(
    "steps, arguments",
    [(7, {}), (7, {"epochs": 5, "steps_per_epoch": 3}), slow(1, {}), slow(6, {"epochs": 5})],
)
def test_training_stops_before_the_step_that_would_exceed(steps, arguments):
    model = make_model()
    fit(model, callbacks.PrivacyBudget(make_plan(steps)), **arguments)
    assert steps_run(model) == model.optimizer.ledger.steps == steps


@pytest.mark.parametrize("steps_per_execution", [3, *map(slow, (2, 4, 7, 8))])
def test_executions_of_several_steps_never_overrun(steps_per_execution):
    model = make_model(steps_per_execution=steps_per_execution)
    fit(model, callbacks.PrivacyBudget(make_plan(7)))
    assert steps_run(model) == model.optimizer.ledger.steps == 7


def test_training_that_needs_less_is_left_alone():
    model = make_model()
    history = fit(model, callbacks.PrivacyBudget(make_plan(70)), epochs=2, steps_per_epoch=5)
    assert steps_run(model) == 10
    assert len(history.history["epsilon"]) == 2


@pytest.mark.slow
def test_the_budget_holds_over_several_fits():
    model, budget = make_model(), callbacks.PrivacyBudget(make_plan(7))
    fit(model, budget, steps_per_epoch=4)
    fit(model, budget, steps_per_epoch=4)
    assert steps_run(model) == 7
    with pytest.raises(callbacks.BudgetExceeded, match="used up: 7 of 7 steps .*epsilon="):
        fit(model, budget)
    assert steps_run(model) == 7
    assert issubclass(callbacks.BudgetExceeded, RuntimeError)


def test_an_optimizer_without_privacy_is_an_error():
    model = make_model(keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"of type SGD, without batch_size.*tfdpx\.DPSGD"):
        fit(model, callbacks.PrivacyBudget(make_plan()))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 16}, r"disagree on `batch_size`.*plan\.batch_size=8, optimizer.*=16"),
        ({"noise_multiplier": 0.99}, r"disagree on `noise_multiplier`.*=1\.0, optimizer.*=0\.99"),
    ],
)
def test_a_plan_for_another_optimizer_is_an_error(arguments, message):
    optimizer = tfdpx.DPSGD(0.25, **{"batch_size": 8, "noise_multiplier": 1.0, **arguments})
    model = make_model(optimizer)
    plan = PrivacyPlan(
        64, steps=9, delta=1e-3, **{"batch_size": 8, "noise_multiplier": 1.0} | arguments
    )
    with pytest.raises(ValueError, match=message):
        fit(model, callbacks.PrivacyBudget(make_plan()), plan=plan)
    assert steps_run(model) == 0


def test_float32_noise_agrees():
    plan = make_plan(noise_multiplier=1.1)
    model = make_model(noise_multiplier=float(np.float32(1.1)))
    fit(model, callbacks.PrivacyBudget(plan), plan=plan)
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
    with pytest.warns(UserWarning, match="epsilon is infinite"):
        model = make_model(noise_multiplier=0.0)
    plan = make_plan(noise_multiplier=0.0)
    history = fit(model, callbacks.PrivacyBudget(plan), plan=plan).history
    assert history["epsilon"] == [math.inf]


@pytest.mark.parametrize("by", ["plan", slow("data")])
def test_an_approximate_epsilon_is_called_so(by):
    plan = make_plan(sampling="shuffle" if by == "plan" else "poisson")
    model, budget = make_model(), callbacks.PrivacyBudget(plan, allow_approximate=by == "data")
    if by == "plan":
        history = fit(model, budget, plan=plan).history
    else:
        history = model.fit(*make_data(), batch_size=8, callbacks=[budget], verbose=0).history
    assert history["epsilon_approximate"] == [plan.epsilon]
    assert "epsilon" not in history


class RecordNorms(keras.callbacks.Callback):
    """The norm of the noisy gradient after every batch."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.optimizer.privatized_gradient_norm)


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
    assert "epoch_mae" in scalars  # What tfdpx's own does not write.


@pytest.mark.parametrize("with_budget", [True, False])
def test_tensorboard_writes_only_what_the_guarantee_covers(tmp_path, with_budget):
    plan = make_plan(7)
    board = callbacks.TensorBoard(tmp_path, plan=None if with_budget else plan, histogram_freq=1)
    before = [callbacks.PrivacyBudget(plan)] if with_budget else []
    model, norms = make_model(), RecordNorms()
    x, y = make_data(16)
    public = {"validation_data": (x + 1, y)}
    fit(model, *before, board, norms, epochs=2, steps_per_epoch=3, **public)
    scalars = read_scalars(tmp_path)
    of_plan = {} if with_budget else {"epsilon": [plan.epsilon_at(n) for n in (0, 3, 6)]}
    assert scalars["train"] == {
        **{name: pytest.approx(values) for name, values in of_plan.items()},
        "epoch_epsilon": pytest.approx([plan.epsilon_at(3), plan.epsilon_at(6)]),
        "epoch_noise_multiplier": [1.0, 1.0],
        "epoch_learning_rate": [0.25, 0.25],
        "epoch_privatized_gradient_norm": pytest.approx(norms.seen[2::3]),
    }
    assert {"epoch_loss", "epoch_mae"} <= set(scalars["validation"])
    assert set(scalars) == {"train", "validation"} | ({"budget"} if of_plan else set())
    if of_plan:
        assert scalars["budget"] == {"epsilon": pytest.approx([plan.epsilon] * 3)}


@pytest.mark.slow
def test_tensorboard_without_a_plan_writes_no_epsilon(tmp_path):
    fit(make_model(), callbacks.TensorBoard(tmp_path))
    assert set(read_scalars(tmp_path)["train"]) == {
        "epoch_noise_multiplier",
        "epoch_learning_rate",
        "epoch_privatized_gradient_norm",
    }


def test_tensorboard_names_an_approximate_epsilon(tmp_path):
    plan = make_plan(sampling="shuffle")
    fit(make_model(), callbacks.TensorBoard(tmp_path, plan=plan), plan=plan)
    assert read_scalars(tmp_path)["train"]["epoch_epsilon_approximate"] == pytest.approx(
        [plan.epsilon]
    )


@pytest.mark.parametrize("log_private_metrics", [False, True])
def test_tensorboard_by_batch(tmp_path, log_private_metrics):
    board = callbacks.TensorBoard(tmp_path, update_freq=2, log_private_metrics=log_private_metrics)
    norms = RecordNorms()
    fit(make_model(), board, norms, steps_per_epoch=6)
    scalars = read_scalars(tmp_path)
    written = scalars["train"]["batch_privatized_gradient_norm"]
    assert len(written) == 3 and set(written) <= set(norms.seen)
    assert "batch_mae" not in scalars["train"]
    if log_private_metrics:
        assert len(scalars["not_private"]["not_private/batch_mae"]) == 3
    assert ("not_private" in scalars) == log_private_metrics


def test_private_metrics_are_labelled(tmp_path):
    board = callbacks.TensorBoard(tmp_path, log_private_metrics=True)
    budget = callbacks.PrivacyBudget(make_plan(7))
    history = fit(make_model(), budget, board, epochs=2, steps_per_epoch=3).history
    scalars = read_scalars(tmp_path)
    assert scalars["not_private"] == {
        "not_private/epoch_loss": pytest.approx(history["loss"]),
        "not_private/epoch_mae": pytest.approx(history["mae"]),
    }
    assert not {"epoch_loss", "epoch_mae"} & set(scalars["train"])
    assert "epoch_epsilon" in scalars["train"]


@pytest.mark.slow
def test_gradient_norms_before_clipping_are_in_the_private_section_alone(tmp_path):
    plan = make_plan(6)
    model = make_model(tfdpx.DPSGD(0.25, plan=plan, l2_norm_clip=1e-3))
    x, y = make_data()
    board = callbacks.TensorBoard(tmp_path, log_private_metrics=True)
    model.fit(x, y, epochs=2, steps_per_epoch=3, callbacks=[board], verbose=0)
    logs = event_accumulator.EventAccumulator(str(tmp_path / "not_private"))
    logs.Reload()
    first, last = logs.Tensors("not_private/gradient_norms")
    assert (first.step, last.step) == (3, 6)
    buckets = tf.make_ndarray(last.tensor_proto)
    norms = per_example.gradient_norms(model, x, y)
    assert buckets[:, 2].sum() == len(x)
    np.testing.assert_allclose([buckets[0, 0], buckets[-1, 1]], [norms.min(), norms.max()], 1e-4)
    for path in tmp_path.rglob("events*"):
        assert (path.parent.name == "not_private") == (b"gradient_norms" in path.read_bytes())


def test_tensorboard_counts_updates_and_says_what_is_guaranteed(tmp_path):
    plan = make_plan(6)
    model = make_model(tfdpx.DPSGD(0.25, plan=plan, l2_norm_clip=0.5))
    fit(model, callbacks.TensorBoard(tmp_path), epochs=2, steps_per_epoch=3, plan=plan)
    events = event_accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [event.step for event in events.Tensors("epoch_noise_multiplier")] == [3, 6]
    texts = [
        tf.make_ndarray(event.tensor_proto).item().decode()
        for event in events.Tensors("privacy_statement")
    ]
    assert texts[0] == f"The plan: {plan.summary()}."
    assert texts[-1].startswith(f"Spent: epsilon={plan.epsilon:.4g} at delta=0.001, in 6 updates")
    [tag] = [t for t in events.Tags()["tensors"] if t.startswith("_hparams_/session_start")]
    content = events.SummaryMetadata(tag).plugin_data.content
    for name in (b"l2_norm_clip", b"learning_rate", b"plan_epsilon", b"plan_delta"):
        assert name in content
    assert b"seed" not in content
