"""A training ends with its plan in every kind of loop; epsilon is in logs and TensorBoard."""

import contextlib
import csv
import dataclasses
import io
import pathlib

import keras
import numpy as np
import pytest
import seeds
import small
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import tfdpx
from tfdpx import callbacks
from tfdpx.accounting import Ledger, PrivacyPlan
from tfdpx.accounting.ledger import Entry
from tfdpx.callbacks import BudgetExceeded, PrivacyBudget

ROWS = 64
X = np.random.default_rng(0).normal(size=[ROWS, 2]).astype("float32")
Y = X[:, :1].copy()


def make_plan(steps=7, **arguments):
    arguments = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"} | arguments
    return PrivacyPlan(ROWS, batch_size=8, steps=steps, **arguments)


def make_model(plan=None, optimizer=None, seed=None, **arguments):
    """Returns a compiled model of an optimizer with a plan, or with its noise and batch size."""
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    private = {"plan": plan} if plan else {"batch_size": 8, "noise_multiplier": 1.0}
    optimizer = optimizer or tfdpx.DPSGD(0.1, seed=seed, **private)
    model.compile(optimizer, "mse", **{"jit_compile": False, **arguments})
    return model


def fit(model, *fit_callbacks, plan=None, **arguments):
    """Fits on batches of a plan of many more steps than any budget here."""
    plan = plan or make_plan(1000)
    arguments = {"epochs": 1, "verbose": 0} | arguments
    return model.fit(plan.batches(X, Y), callbacks=list(fit_callbacks), **arguments)


def steps_run(model):
    return int(model.optimizer.iterations)


def test_training_stops_before_the_step_that_would_exceed():
    model = make_model()
    history = fit(model, PrivacyBudget(make_plan(70)), epochs=2, steps_per_epoch=5)
    assert steps_run(model) == 10  # A smaller number stays.
    assert len(history.history["epsilon"]) == 2
    for steps, arguments in ((17, {"epochs": 5}), (24, {"epochs": 5, "steps_per_epoch": 3})):
        budget = PrivacyBudget(make_plan(steps))
        fit(model, budget, **arguments)
        assert steps_run(model) == model.optimizer.ledger.steps == steps
    with pytest.raises(BudgetExceeded, match="used up: 24 of 24 steps .*epsilon="):
        fit(model, budget)
    assert steps_run(model) == 24
    assert issubclass(BudgetExceeded, RuntimeError)


def test_batches_that_hold_an_example_more_often_than_the_plans_cost_more():
    plan = PrivacyPlan(6400, 8, 9, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    budget = PrivacyBudget(plan, allow_approximate=True)
    with pytest.raises(BudgetExceeded, match="0 of 9 steps"):
        make_model().fit(X, Y, batch_size=8, callbacks=[budget], verbose=0)


def test_an_optimizer_without_privacy_is_an_error():
    model = make_model(optimizer=keras.optimizers.SGD())
    with pytest.raises(TypeError, match=r"of type SGD, without batch_size.*tfdpx\.DPSGD"):
        fit(model, PrivacyBudget(make_plan()))


def test_plans_of_one_training_have_one_delta():
    plan = make_plan()
    loose = plan.from_config(plan.get_config() | {"delta": 0.3})
    exact, other = (PrivacyBudget(p, allow_approximate=True) for p in (plan, loose))
    model = make_model(plan)
    unplanned = make_model()  # The batches may know the plan.

    def by_hand():
        other.set_model(model)
        other.on_train_begin()

    message = "one delta.*delta=0.3 and delta=0.001.*PrivacyPlan"
    for call in (
        lambda: fit(model, other, plan=plan),
        lambda: fit(model, exact, other, plan=plan),
        lambda: fit(unplanned, other, plan=plan),
        lambda: unplanned.fit(X, Y, batch_size=8, callbacks=[exact, other], verbose=0),
        by_hand,
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="delta"):
        fit(model, plan=loose)
    assert steps_run(model) == steps_run(unplanned) == 0


def test_an_approximate_epsilon_is_called_so_where_data_are_shuffled(tmp_path):
    plan = make_plan(sampling="shuffle")
    budget, theirs = PrivacyBudget(plan), keras.callbacks.TensorBoard(tmp_path / "keras")
    ours = callbacks.TensorBoard(tmp_path / "ours", plan=plan)
    history = fit(make_model(metrics=["mae"]), budget, ours, theirs, plan=plan).history
    assert history["epsilon_approximate"] == [plan.epsilon]
    assert "epsilon" not in history
    for board in ("ours", "keras"):
        scalars = read_scalars(tmp_path / board)["train"]
        tag = "epsilon_approximate" if board == "ours" else "epoch_epsilon_approximate"
        assert scalars[tag][-1] == pytest.approx(plan.epsilon)
        assert ("epoch_mae" in scalars) == (board == "keras")


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
    model, norms = make_model(optimizer=optimizer, metrics=["mae"]), []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: norms.append(optimizer.privatized_gradient_norm)
    )
    with contextlib.redirect_stdout(output):
        history = fit(
            model,
            PrivacyBudget(plan),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            callbacks.TensorBoard(folder / "public", plan=plan),
            record,
            plan=plan,
            epochs=3,
            steps_per_epoch=3,
            verbose=2,
            validation_data=(X[:16] + 1, Y[:16]),
        ).history
    assert steps_run(model) == model.optimizer.ledger.steps == 7
    return Run(plan, history, norms, output.getvalue(), folder)


def test_epsilon_is_in_what_comes_after(run):
    expected = [run.plan.epsilon_at(steps) for steps in (3, 6, 7)]
    assert run.history["epsilon"] == pytest.approx(expected, rel=1e-6)
    assert 0 < expected[0] < expected[1] < expected[2] == run.plan.epsilon
    with open(run.folder / "log.csv", encoding="utf-8") as file:
        assert [float(row["epsilon"]) for row in csv.DictReader(file)] == run.history["epsilon"]
    assert f"epsilon: {expected[0]:.4f}" in run.output


def test_tensorboard_takes_no_metric_for_epsilon_by_its_name(tmp_path):
    secret = keras.metrics.MeanAbsoluteError(name="epsilon_of_labels")
    model = make_model(make_plan(), metrics=[secret])
    before = Ledger((Entry(2.0, 0.1, 5, run=1),))
    board = callbacks.TensorBoard(tmp_path, before=before)
    with pytest.warns(UserWarning, match="leaves the validation metrics out"):
        model.fit(X, Y, validation_data=(X + 1, Y), callbacks=[board], verbose=0)
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


def fit_approximately(model, plan, verbose=0):
    budget = PrivacyBudget(plan, allow_approximate=True)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model.fit(data, verbose=verbose, callbacks=[budget])


def test_fit_ends_with_the_plan(capsys):
    plan = make_plan(3)
    model = make_model(plan)
    model.fit(X, Y, batch_size=8, epochs=5, verbose=2)
    assert model.optimizer.ledger.steps == 3
    text = capsys.readouterr().out
    assert f"Privacy budget used up after 3 updates: epsilon={plan.epsilon:.4g} at" in text
    assert "Epoch 1/5" in text and "Epoch 2/5" not in text
    before = small.weights(model)
    with pytest.raises(BudgetExceeded, match="used up: 3 of 3 steps"):
        model.fit(plan.batches(X, Y), verbose=0)
    with pytest.raises(BudgetExceeded, match="used up: 3 of 3 steps"):
        model.train_on_batch(X[:8], Y[:8])
    assert model.optimizer.ledger.steps == 3
    np.testing.assert_array_equal(before, small.weights(model))


class SpendsMeanwhile(keras.callbacks.Callback):
    """Trains the same weights once with another optimizer, in the middle of a `fit`."""

    spent = False

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 4 and not self.spent:
            self.spent = True
            other = keras.Sequential(self.model.layers)
            other.compile(tfdpx.DPSGD(0.1, plan=make_plan(12)), "mse")
            for _ in range(6):
                other.train_on_batch(X[:8], Y[:8])


def test_a_budget_that_another_optimizer_spends_meanwhile_is_not_overrun():
    plan, spender = make_plan(12), SpendsMeanwhile()
    model = make_model(steps_per_execution=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="budget .* is used up"):
        model.fit(plan.batches(X, Y), verbose=0, callbacks=[PrivacyBudget(plan), spender])
    assert spender.spent and 12 <= model.optimizer.ledger.steps <= 13  # The attempt may count.


def test_executions_on_other_data_end_before_it(capsys):
    plan = make_plan(7)
    model = make_model(plan, steps_per_execution=3)
    fit_approximately(model, plan, verbose=2)
    assert model.optimizer.ledger.steps == 6
    text = capsys.readouterr().out
    assert "ended after 6 updates, 1 before the end of the plan" in text
    assert "`steps_per_execution=3` of them do not fit: epsilon_approximate=" in text
    with pytest.raises(BudgetExceeded, match="execution of 3 steps does not fit.*6 of 7"):
        fit_approximately(model, plan)
    model = make_model(plan, steps_per_execution=3)
    model.fit(plan.batches(X, Y), verbose=0)
    assert model.optimizer.ledger.steps == 7  # The plan's own batches end with it.


def test_a_loop_of_ones_own_gets_an_error():
    model = make_model(make_plan(2))
    step = tf.function(model.train_step, autograph=False)
    for _ in range(2):
        step((X[:8], Y[:8]))
    before = small.weights(model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="privacy budget of the optim"):
        step((X[:8], Y[:8]))
    np.testing.assert_array_equal(before, small.weights(model))
    assert model.optimizer.ledger.steps >= 2  # Maybe the attempt, never less than the updates.


@pytest.mark.slow
def test_under_xla_an_update_past_the_end_reads_no_data():
    # XLA drops assertions, so the step's result must not depend on the examples.
    ends = []
    for value in (1.0, -50.0):
        seeds.fix(1)
        plan = make_plan(1)
        model = make_model(plan, seed=3)
        step = tf.function(model.train_step, jit_compile=True, autograph=False)
        step((X[:8], Y[:8]))
        for _ in range(2):
            step((X[:8] * value, Y[:8] - value))
        ends.append(small.weights(model))
        assert model.optimizer.ledger.steps == 3  # It counts, although it is only noise.
    np.testing.assert_array_equal(*ends)
    assert np.isfinite(ends[0]).all()


def test_without_noise_there_is_no_budget_to_end():
    with pytest.warns(UserWarning):
        plan = make_plan(2, noise_multiplier=0.0)
        model = make_model(plan)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0)
    assert model.optimizer.ledger.steps == 8


def test_epochs_share_the_steps_and_keras_says_nothing_of_our_batches(capsys, recwarn):
    plan, taken = make_plan(8), []
    model = make_model(plan, run_eagerly=True)
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: taken.append(model.optimizer.ledger.steps)
    )
    model.fit(plan.batches(X, Y), epochs=3, verbose=2, callbacks=[count])
    assert taken == [3, 6, 8] and "Epoch 3/3" in capsys.readouterr().out
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("name", ["class_weight", "sample_weight", "y", "validation_split"])
def test_arguments_of_the_draws_are_refused_beside_them(name):
    plan = make_plan(9)
    value = {"class_weight": {0: 2.0}, "validation_split": 0.5}.get(name, np.ones(ROWS))
    there = r"\(x, y\)" if name == "y" else rf"\(x, y, {name}={name}\)"
    with pytest.raises(ValueError, match=rf"`{name}` of `fit` cannot.*plan\.batches{there}"):
        make_model(plan).fit(plan.batches(X, Y), verbose=0, **{name: value})
