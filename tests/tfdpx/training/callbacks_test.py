import contextlib
import csv
import dataclasses
import io
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import tfdpx
from tfdpx import callbacks
from tfdpx.accounting import Ledger, PrivacyPlan
from tfdpx.accounting.ledger import Entry


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
    """Fits on batches of a plan of many more steps than any budget here."""
    plan = plan or make_plan(1000)
    arguments = {"epochs": 1, "verbose": 0} | arguments
    return model.fit(plan.batches(*make_data()), callbacks=list(fit_callbacks), **arguments)


def steps_run(model):
    return int(model.optimizer.iterations)


def test_training_stops_before_the_step_that_would_exceed():
    model = make_model()
    history = fit(model, callbacks.PrivacyBudget(make_plan(70)), epochs=2, steps_per_epoch=5)
    assert steps_run(model) == 10  # A smaller number stays.
    assert len(history.history["epsilon"]) == 2
    for steps, arguments in (
        (11, {}),
        (17, {"epochs": 5}),
        (24, {"epochs": 5, "steps_per_epoch": 3}),
    ):
        budget = callbacks.PrivacyBudget(make_plan(steps))
        fit(model, budget, **arguments)
        assert steps_run(model) == model.optimizer.ledger.steps == steps
    with pytest.raises(callbacks.BudgetExceeded, match="used up: 24 of 24 steps .*epsilon="):
        fit(model, budget)
    assert steps_run(model) == 24
    assert issubclass(callbacks.BudgetExceeded, RuntimeError)


def test_batches_that_hold_an_example_more_often_than_the_plans_cost_more():
    plan = PrivacyPlan(6400, 8, 9, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    budget = callbacks.PrivacyBudget(plan, allow_approximate=True)
    with pytest.raises(callbacks.BudgetExceeded, match="0 of 9 steps"):
        make_model().fit(*make_data(), batch_size=8, callbacks=[budget], verbose=0)


def test_an_optimizer_without_privacy_is_an_error():
    model = make_model(keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"of type SGD, without batch_size.*tfdpx\.DPSGD"):
        fit(model, callbacks.PrivacyBudget(make_plan()))


def test_a_plan_for_another_optimizer_is_an_error():
    for name, value, message in (
        ("batch_size", 16, r"disagree on `batch_size`.*plan\.batch_size=8, optimizer.*=16"),
        ("noise_multiplier", 0.99, r"disagree on `noise_multiplier`.*=1\.0, optimizer.*=0\.99"),
    ):
        arguments = {"batch_size": 8, "noise_multiplier": 1.0, name: value}
        budget = callbacks.PrivacyBudget(make_plan())
        budget.set_model(make_model(tfdpx.DPSGD(0.25, **arguments)))
        with pytest.raises(ValueError, match=message):
            budget.on_train_begin()


def test_plans_of_one_training_have_one_delta():
    plan = make_plan()
    loose = plan.from_config(plan.get_config() | {"delta": 0.3})
    message = "one delta.*delta=0.3 and delta=0.001.*PrivacyPlan"
    for optimizer in (plan, None):  # Or the batches know the plan.
        arguments = {"plan": plan} if optimizer else {"batch_size": 8, "noise_multiplier": 1.0}
        model = make_model(tfdpx.DPSGD(0.25, **arguments))
        for budgets in ([loose], [plan, loose]):
            budgets = [callbacks.PrivacyBudget(budget) for budget in budgets]
            with pytest.raises(ValueError, match=message):
                fit(model, *budgets, plan=plan)
        assert steps_run(model) == 0
    budgets = [callbacks.PrivacyBudget(p, allow_approximate=True) for p in (plan, loose)]
    with pytest.raises(ValueError, match=message):
        model.fit(*make_data(), batch_size=8, callbacks=budgets, verbose=0)
    model = make_model(tfdpx.DPSGD(0.25, plan=plan))
    with pytest.raises(ValueError, match="delta"):
        fit(model, plan=loose)
    budgets[1].set_model(model)  # In a loop of the user's.
    with pytest.raises(ValueError, match=message):
        budgets[1].on_train_begin()
    assert steps_run(model) == 0


def test_an_approximate_epsilon_is_called_so_where_data_are_shuffled(tmp_path):
    plan = make_plan(sampling="shuffle")
    budget, theirs = callbacks.PrivacyBudget(plan), keras.callbacks.TensorBoard(tmp_path / "keras")
    ours = callbacks.TensorBoard(tmp_path / "ours", plan=plan)
    history = fit(make_model(), budget, ours, theirs, plan=plan).history
    assert history["epsilon_approximate"] == [plan.epsilon]
    assert "epsilon" not in history
    for board in ("ours", "keras"):
        scalars = read_scalars(tmp_path / board)["train"]
        tag = "epsilon_approximate" if board == "ours" else "epoch_epsilon_approximate"
        assert scalars[tag][-1] == pytest.approx(plan.epsilon)
        assert ("epoch_mae" in scalars) == (board == "keras")


class RecordNorms(keras.callbacks.Callback):
    """Records the norm of the noisy gradient after every batch."""

    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.optimizer.privatized_gradient_norm)


def read_scalars(folder):
    """Reads dicts from run to tag to values, from all event files under `folder`."""
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


@dataclasses.dataclass
class Run:
    """A finished run: 3 + 3 + 1 updates, until a budget ended it."""

    plan: tfdpx.PrivacyPlan
    history: dict
    norms: list
    output: str
    folder: pathlib.Path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The optimizer has the plan's noise multiplier in float32."""
    folder, output = tmp_path_factory.mktemp("run"), io.StringIO()
    plan = make_plan(7, noise_multiplier=1.1)
    noise = float(np.float32(1.1))
    optimizer = tfdpx.DPSGD(0.25, batch_size=8, noise_multiplier=noise, public_validation=True)
    model, norms = make_model(optimizer), RecordNorms()
    x, y = make_data(16)
    with contextlib.redirect_stdout(output):
        history = fit(
            model,
            callbacks.PrivacyBudget(plan),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            callbacks.TensorBoard(folder / "public", plan=plan),
            norms,
            plan=plan,
            epochs=3,
            steps_per_epoch=3,
            verbose=2,
            validation_data=(x + 1, y),
        ).history
    assert steps_run(model) == model.optimizer.ledger.steps == 7
    return Run(plan, history, norms.seen, output.getvalue(), folder)


def test_epsilon_is_in_what_comes_after(run):
    expected = [run.plan.epsilon_at(steps) for steps in (3, 6, 7)]
    assert run.history["epsilon"] == pytest.approx(expected, rel=1e-6)
    assert 0 < expected[0] < expected[1] < expected[2] == run.plan.epsilon
    with open(run.folder / "log.csv", encoding="utf-8") as file:
        assert [float(row["epsilon"]) for row in csv.DictReader(file)] == run.history["epsilon"]
    assert f"epsilon: {expected[0]:.4f}" in run.output


def test_tensorboard_takes_no_metric_for_epsilon_by_its_name(tmp_path):
    secret = keras.metrics.MeanAbsoluteError(name="epsilon_of_labels")
    model, (x, y) = make_model(tfdpx.DPSGD(0.25, plan=make_plan())), make_data()
    model.compile(model.optimizer, "mse", metrics=[secret])
    before = Ledger((Entry(2.0, 0.1, 5, run=1),))
    board = callbacks.TensorBoard(tmp_path, before=before)
    with pytest.warns(UserWarning, match="leaves the validation metrics out"):
        model.fit(x, y, validation_data=(x + 1, y), callbacks=[board], verbose=0)
    scalars = read_scalars(tmp_path)
    assert not any("of_labels" in tag for tags in scalars.values() for tag in tags)
    assert "validation" not in scalars
    assert scalars["train"]["epsilon"][0] == pytest.approx(before.epsilon(1e-3, "rdp"))


def test_tensorboard_writes_only_what_the_guarantee_covers(run):
    scalars = read_scalars(run.folder / "public")
    assert scalars["train"] == {
        "epsilon": pytest.approx([0.0, *(run.plan.epsilon_at(n) for n in (3, 6, 7))]),
        "epoch_noise_multiplier": pytest.approx([1.1] * 3),
        "epoch_learning_rate": [0.25] * 3,
        "epoch_privatized_gradient_norm": pytest.approx([run.norms[n] for n in (2, 5, 6)]),
    }
    assert set(scalars["validation"]) == {"epoch_loss", "epoch_mae"}
    assert scalars["budget"] == {"epsilon": pytest.approx([run.plan.epsilon] * 4)}
    assert set(scalars) == {"budget", "train", "validation"}
