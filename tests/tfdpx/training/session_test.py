"""Attacks by trainings with a common start: they share only their common updates."""

import itertools
import os
import shutil
import threading

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from scipy import stats

import tfdpx
from tfdpx.account import attach
from tfdpx.accounting import Ledger
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.callbacks import Checkpoint
from tfdpx.sampling import sampled_batches

N, STEPS, SIGMA, DELTA = 40, 12, 5.0, 1e-5
# Every update takes all examples, so two continuations differ only by their noise.
PLAN = tfdpx.PrivacyPlan(N, batch_size=N, steps=STEPS, noise_multiplier=SIGMA, delta=DELTA)
X, Y = small.data(N, features=20)


def two_layers():
    return [keras.layers.Dense(20, "relu"), keras.layers.Dense(3)]


def other_code():
    return [keras.layers.Dense(20, "relu"), keras.layers.Dense(3, activation=lambda x: 2 * x)]


def with_dropout():
    return [keras.layers.Dropout(0.5), *two_layers()]


def make(layers=two_layers, seed=None, **arguments):
    optimizer = tfdpx.DPSGD(1.0, plan=PLAN, l2_norm_clip=1e-3, seed=seed, **arguments)
    return small.model(optimizer, layers=layers)


def train(model, updates, callbacks=(), x=X, epochs=1):
    batches = PLAN.batches(x, Y, optimizer=model.optimizer)
    model.fit(batches, epochs=epochs, steps_per_epoch=updates, callbacks=list(callbacks), verbose=0)
    return small.weights(model)


def is_independent_noise(difference, updates=1):
    """Tests a difference of weights for the variance of two independent noises, at 1e-6."""
    deviation = SIGMA / N * np.sqrt(2 * updates)
    statistic = np.sum((difference / deviation) ** 2)
    count = len(difference)
    return min(stats.chi2.cdf(statistic, count), stats.chi2.sf(statistic, count)) > 5e-7


def views():
    return {"augment": keras.layers.GaussianNoise(0.1, seed=1), "augmult": 2}


CONTINUATIONS = {  # Common arguments, and the changes of each.
    "of one run": (
        dict,
        [
            {},
            {},
            {"x": np.concatenate([X[:1] + 9, X[1:]])},
            {"layers": other_code},
        ],
    ),
    "a Keras augmentation": (views, [{}, {}]),
    "Dropout, other microbatches": (
        lambda: {"layers": with_dropout},
        [{}, {"microbatch_size": 7}],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTINUATIONS)
def test_two_continuations_have_independent_noise(name, tmp_path):
    """An attack: with the same noise, the difference was between the sums, without noise."""
    common, changes = CONTINUATIONS[name]
    start = train(make(**common()), 2, [Checkpoint(tmp_path / "first")])
    ends, ledgers = [], []
    for number, change in enumerate(changes):
        shutil.copytree(tmp_path / "first", tmp_path / str(number))
        arguments = {**common(), **change}
        x = arguments.pop("x", X)
        model = make(**arguments)
        ends.append(train(model, 1, [Checkpoint(tmp_path / str(number))], x=x, epochs=2))
        ledgers.append(model.optimizer.ledger)
    assert is_independent_noise((ends[0] - start) * np.sqrt(2))
    # A planted bug: the same noise twice.
    assert not is_independent_noise(ends[0] - ends[0])
    wanted = tfdpx.accounting.epsilon(SIGMA, 1.0, 4, DELTA, accountant="gdp")
    for first, second in itertools.combinations(range(len(ends)), 2):
        assert is_independent_noise(ends[first] - ends[second])
        # The two compose exactly: their common part counts once.
        both = ledgers[first] + ledgers[second]
        assert [ledgers[first].steps, ledgers[second].steps, both.steps] == [3, 3, 4]
        assert both.epsilon(DELTA, "gdp") == pytest.approx(wanted, rel=1e-9)


def test_a_forked_process_is_a_run_of_its_own():
    """Both ledgers continue and compose, although they began as one."""
    account = make().optimizer.account
    reading, writing = os.pipe()
    if not os.fork():
        os.write(writing, str(account.run).encode())
        os._exit(0)
    os.wait()
    assert int(os.read(reading, 100)) != account.run


@pytest.mark.slow
def test_a_given_seed_is_remembered_everywhere(tmp_path):
    with pytest.warns(UserWarning, match="must not be released") as caught:
        model = make(seed=5)
    assert sum("must not be released" in str(w.message) for w in caught) == 1
    train(model, 1)
    fresh = make()
    fresh.build((None, 20))
    assert not fresh.optimizer.ledger.is_seeded
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    fresh.load_weights(tmp_path / "m.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    for other in (model, loaded, fresh):
        assert other.optimizer.ledger.is_seeded
    assert Ledger.from_json(model.optimizer.ledger.to_json()).is_seeded
    by_draws = make()
    by_draws.fit(PLAN.batches(X, Y, seed=3), steps_per_epoch=1, verbose=0)
    assert by_draws.optimizer.ledger.is_seeded
    transformed = make()
    budget = tfdpx.callbacks.PrivacyBudget(PLAN, allow_approximate=True)
    changed = PLAN.batches(X, Y, seed=3).prefetch(2)
    transformed.fit(changed, steps_per_epoch=1, callbacks=[budget], verbose=0)
    assert transformed.optimizer.ledger.is_seeded


@pytest.mark.slow
def test_a_second_training_on_a_folder_is_refused(tmp_path):
    class Second(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with pytest.raises(RuntimeError, match="Another training uses the checkpoint folder"):
                train(make(), 1, [Checkpoint(tmp_path)])

    train(make(), 1, [Checkpoint(tmp_path), Second()])


@pytest.mark.slow
def test_threads_and_a_callback_that_train_by_hand_repeat_no_noise():
    model = make()
    zeros = np.zeros(N, "float32")
    model.train_on_batch(X, Y, sample_weight=zeros)
    norms = []
    step = model.optimizer.record

    def recorded(norm, nonfinite):
        step(norm, nonfinite)
        tf.numpy_function(lambda n: norms.append(float(n)), [norm], [])

    model.optimizer.record = recorded
    model.train_function = None

    def by_hand(batch=0, logs=None):
        model.train_on_batch(X, Y, sample_weight=zeros)

    threads = [threading.Thread(target=lambda: [by_hand() for _ in range(3)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    train(model, 2, [keras.callbacks.LambdaCallback(on_train_batch_end=by_hand)])
    assert len(norms) == len(set(norms)) == model.optimizer.ledger.steps - 1 == 10


@pytest.mark.parametrize("fits, before", [((1,) * 4, 0), ((4,), 2)])
def test_shuffled_batches_count_as_often_as_an_example_is_in_one(fits, before, monkeypatch):
    """Each `fit` draws new permutations, and may begin within an epoch of 4 updates."""
    drawn, rows_of = [], sampled_batches._Shuffle.rows

    def rows(shuffle, key, step):
        drawn.append(rows_of(shuffle, key, step))
        return drawn[-1]

    monkeypatch.setattr(sampled_batches._Shuffle, "rows", rows)
    plan = tfdpx.PrivacyPlan(
        N, N // 4, STEPS, noise_multiplier=2.0, delta=DELTA, sampling="shuffle"
    )
    model, uses = small.model(tfdpx.DPSGD(0.1, plan=plan)), np.zeros(N, int)
    model.build((None, 20))
    if before:
        attach(Ledger((Entry(50.0, 1.0, before, run=1),)), model.variables)
    for steps in fits:
        drawn.clear()
        model.fit(X, Y, steps_per_epoch=steps, verbose=0)
        np.add.at(uses, np.concatenate(drawn[:steps]), 1)
    record = Record("x", DatasetId("d", N), model.optimizer.ledger, DELTA, sampling="shuffle")
    claimed = record.ledger_as_drawn().steps - before
    assert uses.max() <= claimed <= 4 and len(model.optimizer.ledger.of(plan).entries) == len(fits)
