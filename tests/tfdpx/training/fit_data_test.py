"""Attacks by batches that are not the plan's: refused, or labelled approximate."""

import collections

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow, slow_but

import tfdpx
from tfdpx.training import step as training_step

N, B, STEPS = 60, 10, 12


def make_plan(steps=STEPS, **arguments):
    defaults = {"num_examples": N, "batch_size": B, "noise_multiplier": 2.0, "delta": 1e-3}
    return tfdpx.PrivacyPlan(steps=steps, **{**defaults, **arguments})


PLAN = make_plan()
X, Y = small.data(N)


def make(plan=PLAN, **arguments):
    model = small.model(tfdpx.DPSGD(0.1, plan=plan), **arguments)
    model.build((None, 6))
    return model


def of_rows(batch_size, **arguments):
    """Returns a data set of batches that no plan draws."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size, **arguments)


def mixed_up(x, y, weights):
    return (x + tf.roll(x, 1, 0)) / 2, y, weights


CHANGED = {
    "take and cache": lambda batches: batches.take(5).cache(),
    "cache": lambda batches: batches.cache(),
    "mixup": lambda batches: batches.map(mixed_up),
    "first batch for ever": lambda batches: tf.data.Dataset.from_tensors(
        next(iter(batches))
    ).repeat(),
    "a fixed weighted data set": lambda _: of_rows(B).map(lambda x, y: (x, y, tf.ones(B))),
    "unweighted": lambda _: of_rows(B),
}


@pytest.mark.parametrize("how", CHANGED)
def test_other_batches_are_refused_under_a_plan(how):
    model, batches = make(), CHANGED[how](PLAN.batches(X, Y))
    before = small.weights(model)
    for callbacks in ([], [tfdpx.callbacks.PrivacyBudget(PLAN)]):
        with pytest.raises(ValueError, match="allow_approximate=True"):
            model.fit(batches, callbacks=callbacks, verbose=0)
    np.testing.assert_array_equal(small.weights(model), before)


@pytest.fixture(scope="module")
def approximate():
    """A model with a step that was traced for the plan's batches, and two updates on them."""
    model = make(make_plan(60))
    model.fit(model.optimizer.plan.batches(X, Y), steps_per_epoch=2, verbose=0)
    assert not model.optimizer.epsilon_is_approximate
    return model


def taken_steps(model):
    """Returns the steps of the ledger, by whether they were sampled as planned."""
    steps = collections.Counter()
    for entry in model.optimizer.ledger.entries:
        steps[entry.poisson_sampled] += entry.steps
    return steps


# The step was traced for unchanged batches, which must not vouch for similar ones.
@pytest.mark.parametrize("how", slow_but(CHANGED, "take and cache", "unweighted"))
def test_other_batches_are_approximate_on_an_explicit_word(approximate, how):
    model = approximate
    plan = model.optimizer.plan
    taken = taken_steps(model)
    budget = tfdpx.callbacks.PrivacyBudget(plan, allow_approximate=True)
    batches = CHANGED[how](plan.batches(X, Y))
    history = model.fit(batches, steps_per_epoch=4, callbacks=[budget], verbose=0).history
    steps = model.optimizer.ledger.steps
    assert history["epsilon_approximate"] == [plan.epsilon_at(steps)]
    assert "epsilon" not in history and model.optimizer.epsilon_is_approximate
    # The epsilon stays approximate, even if the same traced step gets the plan's batches next.
    batches = plan.batches(X, Y)
    history = model.fit(batches, steps_per_epoch=2, callbacks=[budget], verbose=0).history
    assert history["epsilon_approximate"] == [plan.epsilon_at(steps + 2)]
    assert taken_steps(model) == taken + collections.Counter({True: 2, False: 4})


def approximately(model, data):
    model.fit(
        data, callbacks=[tfdpx.callbacks.PrivacyBudget(PLAN, allow_approximate=True)], verbose=0
    )


OTHERS = {
    "rate": make_plan(9, num_examples=20),
    "noise": make_plan(9, noise_multiplier=0.6),
    "size": make_plan(9, batch_size=30),
    "sampling": make_plan(9, sampling="shuffle"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_batches_of_another_plan_than_the_optimizers_or_the_budgets_are_refused(name):
    other = OTHERS[name]
    data = other.batches(X[: other.num_examples], Y[: other.num_examples])
    by_budget = small.model(tfdpx.DPSGD(0.1, batch_size=other.batch_size, noise_multiplier=2.0))
    for model, message in (
        (make(), "batches are of a plan with"),
        (by_budget, "batches are of (a plan with|another plan than)|disagree on `batch_size`"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(data, callbacks=[tfdpx.callbacks.PrivacyBudget(PLAN)], verbose=0)
        assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize(
    "fit",
    [
        lambda model: model.fit(X, Y, batch_size=50),
        lambda model: model.fit(X, Y, batch_size=5),
        lambda model: approximately(model, of_rows(50)),
        lambda model: approximately(model, of_rows(B + 2)),  # Below the plan's capacity.
        lambda model: approximately(model, of_rows(50, drop_remainder=True)),
        lambda model: model.train_on_batch(X[:50], Y[:50]),
    ],
)
def test_batches_of_another_size_are_refused(fit):
    model = make()
    before = small.weights(model)
    with pytest.raises(
        Exception, match="batch_size=10|must be the plan's, 10|batches have 50|batch is too large"
    ) as error:
        fit(model)
    assert isinstance(error.value, (ValueError, tf.errors.InvalidArgumentError))
    np.testing.assert_array_equal(small.weights(model), before)


def test_batches_made_for_another_optimizer_are_refused():
    model, other = make(), make()
    with pytest.raises(ValueError, match="made for another optimizer"):
        model.fit(PLAN.batches(X, Y, optimizer=other.optimizer), verbose=0)


@pytest.fixture
def used(monkeypatch):
    """Returns the rows of each update, as a list of tuples of their numbers."""
    rows, step = [], training_step._step

    def spy(optimizer, model, data, ids):
        x, _, weights = data
        rows.append(tuple(x.numpy()[weights.numpy() > 0, 0].astype(int)))
        return step(optimizer, model, data, ids)

    monkeypatch.setattr(training_step, "_step", spy)
    return rows


NUMBERED = np.column_stack([np.arange(N, dtype="float32"), X[:, 1:]])


@pytest.mark.parametrize("kind", ["of the run", slow("fresh"), slow("seeded")])
def test_no_draw_feeds_two_updates(kind, used):
    """A dataset may be used in a loop, in epochs, or read before: every update has a new draw."""
    model = make(compile_arguments={"run_eagerly": True})
    arguments = {
        "fresh": {}, "seeded": {"seed": 5}, "of the run": {"optimizer": model.optimizer}
    }[kind]  # fmt: skip
    batches = PLAN.batches(NUMBERED, Y, **arguments)
    for _ in range(3):
        next(iter(batches))
        model.fit(batches, steps_per_epoch=1, verbose=0)
    model.fit(batches, epochs=3, steps_per_epoch=2, verbose=0)
    model.fit(PLAN.batches(NUMBERED, Y, **arguments), steps_per_epoch=2, verbose=0)
    assert len(used) == len(set(used)) == 11
    assert not model.optimizer.epsilon_is_approximate
    assert model.optimizer.ledger.steps == 11


@pytest.mark.planted("a draw feeds two updates")
def test_a_planted_replay_is_seen_by_this_test(used):
    model = make(compile_arguments={"run_eagerly": True})
    approximately(model, PLAN.batches(NUMBERED, Y).take(1).cache().repeat(3))
    assert len(set(used)) == 1 < len(used)


@pytest.mark.slow
def test_a_callback_that_trains_on_batches_of_its_own_is_seen(capsys):
    class Trains(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.train_on_batch(X[:B], Y[:B])

    model = make()
    model.fit(PLAN.batches(X, Y), steps_per_epoch=2, epochs=2, callbacks=[Trains()], verbose=0)
    steps = {entry.poisson_sampled: entry.steps for entry in model.optimizer.ledger.entries}
    assert steps == {True: 4, False: 2}
    model.fit(PLAN.batches(X, Y), verbose=2)
    assert f"{STEPS - 6}/{STEPS - 6}" in capsys.readouterr().out  # Keras knows the number of steps.


class Nested(keras.callbacks.Callback):
    def __init__(self, train):
        super().__init__()
        self.train = train

    def on_epoch_end(self, epoch, logs=None):
        self.train(self.model)


@pytest.mark.slow
def test_a_training_inside_of_another_is_refused():
    model, pupil = make(), make()
    batches = PLAN.batches(X, Y, seed=5)
    again = Nested(lambda m: m.fit(PLAN.batches(X, Y), steps_per_epoch=1, verbose=0))
    with pytest.raises(RuntimeError, match="training already"):
        model.fit(batches, steps_per_epoch=2, callbacks=[again], verbose=0)
    of_pupil = Nested(lambda _: pupil.fit(batches, steps_per_epoch=1, verbose=0))
    with pytest.raises(RuntimeError, match="trained on already"):
        model.fit(batches, steps_per_epoch=2, callbacks=[of_pupil], verbose=0)
    model.fit(batches, steps_per_epoch=2, verbose=0)  # The lock was released.


@pytest.mark.slow
def test_arrays_without_a_plan_count_with_their_own_probability():
    other = small.model(tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0))
    other.fit(X, Y, batch_size=16, validation_split=0.5, verbose=0)
    [entry] = other.optimizer.ledger.entries
    assert entry.sampling_probability == pytest.approx(16 / 30)


def test_a_layout_that_keras_ignores_with_tensorflow_is_refused():
    x, y = small.data()
    model = small.model()
    mesh = keras.distribution.DeviceMesh((1, 1), ["batch", "model"], devices=["cpu:0"])
    layout = keras.distribution.LayoutMap(mesh)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    try:
        with pytest.raises(ValueError, match="Received: ModelParallel.*set_distribution.None"):
            model.fit(x, y, batch_size=16, verbose=0)
    finally:
        keras.distribution.set_distribution(None)
