"""Batches that no plan drew, from `fit` to the answer of `verify`: nothing promises a limit."""

import math
import re

import keras
import pytest
import small
import tensorflow as tf
from cases import slow_but
from scipy import stats

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.report import verify
from tfdpx.train import account
from tfdpx.training.callbacks import epsilon_spent

N, B, STEPS, NOISE, DELTA = 400, 20, 20, 4.0, 1e-3
X, Y = small.data(N)


def make_plan(sampling="poisson", **changed):
    arguments = dict(num_examples=N, batch_size=B, steps=STEPS, noise_multiplier=NOISE)
    return tfdpx.PrivacyPlan(**arguments | {"delta": DELTA, "sampling": sampling} | changed)


def make(plan):
    model = small.model(tfdpx.DPSGD(0.1, plan=plan), compile_arguments={"run_eagerly": True})
    model.build((None, 6))
    return model


def anything_goes(model):
    return tfdpx.PrivacyBudget(model.optimizer.plan, allow_approximate=True)


def one_batch(model):
    for _ in range(STEPS):
        model.train_on_batch(X[:B], Y[:B])


def one_example_in_every_batch(model):
    def batches():
        for i in range(STEPS):
            rows = [0, *range(1 + i * (B - 1), 1 + (i + 1) * (B - 1))]
            yield X[rows], Y[rows]

    spec = tf.TensorSpec((None, 6)), tf.TensorSpec((None,), "int64")
    data = tf.data.Dataset.from_generator(batches, output_signature=spec)
    model.fit(data, callbacks=[anything_goes(model)], verbose=0)


class Steps(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.train_on_batch(X[:B], Y[:B])


def within_a_fit(model):
    model.fit(X, Y, epochs=1, steps_per_epoch=STEPS // 2, callbacks=[Steps()], verbose=0)


CASES = {
    "train_on_batch": ("poisson", one_batch),
    "one example in every batch": ("poisson", one_example_in_every_batch),
    "a shuffle plan": ("shuffle", one_batch),
    "within a shuffled fit": ("shuffle", within_a_fit),
}


def flat(text):
    return " ".join(text.split())


@pytest.mark.parametrize("case", slow_but(CASES, "train_on_batch"))
def test_nothing_promises_a_limit(case, run, tmp_path):
    sampling, train = CASES[case]
    model = make(make_plan(sampling))
    train(model)
    view = tfdpx.report(model, tmp_path, data="ward 7")
    # One example may be in every batch, as if all were full.
    true = exact_epsilon(math.sqrt(STEPS) / NOISE, DELTA)
    assert view["epsilon"] < true / 2 and view["steps"] == STEPS
    assert view["attack_bounds"] is None and view["releasable"] is False
    assert view["epsilon_is_approximate"] and view["sampling"] == "unknown"
    record = records.read(tmp_path / "record.json")
    no_plan = r"no plan drew the batches of \d+ of 20 updates"
    for name in ("privacy_statement.txt", "report.html", "model_card.md"):
        text = flat((tmp_path / name).read_text())
        assert re.search(f"no differential privacy can be stated: {no_plan}", text), name
        assert "if all batches were Poisson samples. This is no limit" in text
        assert "-differential privacy after" not in text and "is right at most" not in text
    assert "It is unknown how well anyone in ward 7 is protected." in text
    assert "No limit is known on how much anyone can find out" in text
    assert "differential-privacy" not in text.split("---")[1]
    answer, text = run(account, workdir=str(tmp_path))
    assert answer["releasable"] is False and answer["attack_bounds"] is None
    assert answer["epsilon"] < true and answer["epsilon_is_approximate"]
    assert re.search(f"No differential privacy can be stated. Of .*: {no_plan}", flat(text))
    assert "are (" not in text and "This is no limit" in flat(text)
    verdict = verify.check(tmp_path)
    assert re.match(rf"NO: a part of .* is unknown: {no_plan}\.", verdict.sentences()[0])
    with pytest.warns(UserWarning, match="This epsilon is no limit"):
        model.optimizer.ledger.epsilon(DELTA)
    with pytest.raises(ValueError, match="No bound on attacks is known.*no plan drew"):
        model.optimizer.ledger.attack_bounds()
    with pytest.raises(ValueError, match="No bound on attacks is known.*no plan drew"):
        make_plan(spent=record.ledger).attack_bounds()
    assert make_plan(spent=record.ledger).summary().startswith("no limit known, as if (")


def test_batches_that_a_plan_shuffled_are_bounded_without_amplification(run, tmp_path):
    model = make(make_plan("shuffle"))
    model.fit(X, Y, epochs=1, steps_per_epoch=STEPS, verbose=0)
    view = tfdpx.report(model, tmp_path, data="ward 7")
    # An epoch has 20 updates. The first update may be the last of another one.
    mu = math.sqrt(2) / NOISE
    right = view["attack_bounds"]["right_guesses"]
    assert right == pytest.approx(stats.norm.cdf(mu / 2), abs=1e-6) and view["releasable"]
    page = flat((tmp_path / "report.html").read_text())
    assert "Epsilon is an approximation, because batches were shuffled. The limit" in page
    assert not verify.check(tmp_path).problems
    answer, text = run(account, workdir=str(tmp_path))
    assert answer["epsilon"] == pytest.approx(exact_epsilon(mu, DELTA), rel=1e-3)
    assert answer["releasable"] and answer["neighbours"] == "zero_out"
    # The ledger tells it too, in a file that names no data.
    (tmp_path / "spent").mkdir()
    model.optimizer.ledger.save(tmp_path / "spent" / "ledger.json")
    again, _ = run(account, workdir=str(tmp_path / "spent"), delta=DELTA)
    assert again["epsilon"] == answer["epsilon"] and again["neighbours"] == "zero_out"


def test_a_shuffle_plan_needs_the_word_too():
    model = make(make_plan("shuffle"))
    with pytest.raises(ValueError, match="allow_approximate=True"):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(B).repeat(), verbose=0)


def test_a_rate_belongs_to_the_optimizer_that_took_the_updates(tmp_path):
    model = small.model(
        tfdpx.DPSGD(0.1, batch_size=20, noise_multiplier=NOISE),
        compile_arguments={"run_eagerly": True},
    )
    for _ in range(STEPS):
        model.train_on_batch(X[:20], Y[:20])
    plan = make_plan(num_examples=1_000_000, steps=5)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), model.loss, run_eagerly=True)
    true = exact_epsilon(math.sqrt(STEPS) / NOISE, DELTA)
    assert plan.epsilon < 1e-2 < true
    spent = epsilon_spent(model.optimizer, plan)
    assert spent == pytest.approx(true, rel=1e-3)
    assert model.optimizer.updates_left(plan) <= 0  # Its epsilon was spent by the others.
    view = tfdpx.report(model, tmp_path, data="ward 7")
    assert view["epsilon"] == pytest.approx(true, rel=1e-3)
    assert view["attack_bounds"] is None and not view["releasable"]
    # A rate that was declared for them counts.
    ledger = model.optimizer.ledger.assuming(0.05)
    longer = make_plan(num_examples=N, steps=5, spent=ledger)
    model.compile(tfdpx.DPSGD(0.1, plan=longer), model.loss, run_eagerly=True)
    assert model.optimizer.updates_left(longer) == 5
    assert epsilon_spent(model.optimizer, longer) == longer.epsilon_at(0)


def test_a_plan_tells_the_rate_of_the_updates_that_it_ends():
    data = tf.data.Dataset.from_generator(
        lambda: iter([(X[:B], Y[:B])]),
        output_signature=(tf.TensorSpec((None, 6)), tf.TensorSpec((None,), "int64")),
    )
    planned, without = (
        make(make_plan()),
        small.model(
            tfdpx.DPSGD(0.1, batch_size=B, noise_multiplier=NOISE),
            compile_arguments={"run_eagerly": True},
        ),
    )
    planned.train_on_batch(X[:B], Y[:B])
    for model in (planned, without):
        budget = tfdpx.PrivacyBudget(make_plan(), allow_approximate=True)
        model.fit(data, callbacks=[budget], verbose=0)
        rates = {entry.sampling_probability for entry in model.optimizer.ledger.entries}
        assert rates == {B / N}  # Also when another process goes on with these weights.
    without.train_on_batch(X[:B], Y[:B])
    assert without.optimizer.ledger.entries[-1].sampling_probability is None
    spent = epsilon_spent(without.optimizer, make_plan())
    assert spent == make_plan().epsilon_at(2)  # By the optimizer itself.
