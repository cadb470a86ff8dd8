"""An optimizer with a plan stops at its end, in every kind of loop."""

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf

import tfdpx
from tfdpx.callbacks import BudgetExceeded, PrivacyBudget

ROWS = 64
X = np.random.default_rng(0).normal(size=[ROWS, 2]).astype("float32")
Y = X[:, :1].copy()


def make_plan(steps, **arguments):
    arguments = {"noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"} | arguments
    return tfdpx.PrivacyPlan(ROWS, batch_size=8, steps=steps, **arguments)


def make_model(plan, **arguments):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    arguments = {"jit_compile": False} | arguments
    model.compile(tfdpx.DPSGD(0.1, plan=plan), "mse", **arguments)
    return model


def fit_approximately(model, plan, verbose=0):
    budget = PrivacyBudget(plan, allow_approximate=True)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    model.fit(data, verbose=verbose, callbacks=[budget])


@pytest.fixture(scope="module")
def trained():
    """Returns a model that has spent a plan of two updates, and the plan."""
    plan = make_plan(2)
    model = make_model(plan, run_eagerly=True)
    model.fit(plan.batches(X, Y), verbose=0)
    return model, plan


def test_fit_ends_with_the_plan(capsys):
    plan = make_plan(3)
    model = make_model(plan)
    model.fit(X, Y, batch_size=8, epochs=5, verbose=2)
    assert model.optimizer.ledger.steps == 3
    text = capsys.readouterr().out
    assert f"Privacy budget used up after 3 updates: epsilon={plan.epsilon:.4g} at" in text
    assert "Epoch 1/5" in text and "Epoch 2/5" not in text
    before = model.get_weights()
    with pytest.raises(BudgetExceeded, match="used up: 3 of 3 steps"):
        model.fit(plan.batches(X, Y), verbose=0)
    with pytest.raises(BudgetExceeded, match="used up: 3 of 3 steps"):
        model.train_on_batch(X[:8], Y[:8])
    assert model.optimizer.ledger.steps == 3
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


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
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = tfdpx.DPSGD(0.1, batch_size=8, noise_multiplier=1.0)
    model.compile(optimizer, "mse", steps_per_execution=4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="budget .* is used up"):
        model.fit(plan.batches(X, Y), verbose=0, callbacks=[PrivacyBudget(plan), spender])
    assert spender.spent and 12 <= optimizer.ledger.steps <= 13  # The attempt may count.


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
    before = model.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError, match="privacy budget of the optim"):
        step((X[:8], Y[:8]))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.optimizer.ledger.steps >= 2  # Maybe the attempt, never less than the updates.


@pytest.mark.slow
def test_under_xla_an_update_past_the_end_reads_no_data():
    # XLA drops assertions, so the step's result must not depend on the examples.
    ends = []
    for value in (1.0, -50.0):
        seeds.fix(1)
        plan = make_plan(1)
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
        model.compile(tfdpx.DPSGD(0.1, plan=plan, seed=3), "mse")
        step = tf.function(model.train_step, jit_compile=True, autograph=False)
        step((X[:8], Y[:8]))
        for _ in range(2):
            step((X[:8] * value, Y[:8] - value))
        ends.append(model.get_weights())
        assert model.optimizer.ledger.steps == 3  # It counts, although it is only noise.
    for one, other in zip(*ends, strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.isfinite(one).all()


def test_without_noise_there_is_no_budget_to_end():
    with pytest.warns(UserWarning):
        plan = make_plan(2, noise_multiplier=0.0)
        model = make_model(plan)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), verbose=0)
    assert model.optimizer.ledger.steps == 8


def test_epochs_share_the_steps(capsys):
    epochs, steps, lengths = 3, 8, [3, 3, 2]
    plan = make_plan(steps)
    model = make_model(plan, run_eagerly=True)
    taken = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: taken.append(model.optimizer.ledger.steps)
    )
    model.fit(plan.batches(X, Y), epochs=epochs, verbose=2, callbacks=[count])
    assert np.diff([0, *taken]).tolist() == lengths
    text = capsys.readouterr().out
    assert f"Epoch {epochs}/{epochs}" in text


def test_keras_says_nothing_of_our_batches(recwarn):
    plan = make_plan(4)
    make_model(plan, run_eagerly=True).fit(plan.batches(X, Y), epochs=2, verbose=0)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("name", ["class_weight", "sample_weight", "y", "validation_split"])
def test_arguments_of_the_draws_are_refused_beside_them(trained, name):
    model, _ = trained
    plan = make_plan(9)
    value = {"class_weight": {0: 2.0}, "validation_split": 0.5}.get(name, np.ones(ROWS))
    model.compile(tfdpx.DPSGD(0.1, plan=plan), "mse", run_eagerly=True)
    there = r"\(x, y\)" if name == "y" else rf"\(x, y, {name}={name}\)"
    with pytest.raises(ValueError, match=rf"`{name}` of `fit` cannot.*plan\.batches{there}"):
        model.fit(plan.batches(X, Y), verbose=0, **{name: value})
