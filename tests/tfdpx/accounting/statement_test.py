"""The text to cite, from the ledgers of trainings."""

import importlib.metadata
import re

import keras
import numpy as np
import pytest
import small

import tfdpx
from tfdpx import account
from tfdpx.accounting import Ledger, statement
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record, UpstreamTraining
from tfdpx.report import words


def flat(text):
    return " ".join(text.split())


def claimed(text):
    """Reads the epsilon and delta of a statement's first sentence."""
    match = re.search(r"\(([\d.]+), ([\d.e-]+)\)-differential", flat(text))
    return tuple(map(float, match.groups()))


def plan_of(rows=60, **changed):
    defaults = {"batch_size": 20, "steps": 5, "noise_multiplier": 1.5, "delta": 1e-5}
    return tfdpx.PrivacyPlan(rows, **defaults | changed)


@pytest.mark.slow
def test_of_a_model_that_keras_trained():
    plan = plan_of()
    x, y = small.data(plan.num_examples)
    model = small.model(tfdpx.DPSGD(0.1, plan=plan))
    model.fit(plan.batches(x, y, optimizer=model.optimizer), verbose=0)
    text = model.optimizer.ledger.statement(dataset="our photos")
    assert max(map(len, text.splitlines())) <= 88 and text.endswith("\n")
    epsilon, delta = claimed(text)
    assert plan.epsilon <= epsilon == pytest.approx(plan.epsilon, rel=1e-3) and delta == 1e-5
    text = flat(text)
    assert f"dp-accounting {importlib.metadata.version('dp-accounting')}" in text
    for phrase in [
        "our photos (N = 60 examples)",
        "5 noisy updates",
        "PLD accountant",
        f"tfdpx {tfdpx.__version__}",
        "differ in one example, added or removed, at the same sampling probability",
        "5 at noise_multiplier = 1.5, sampling_probability = 0.33333333.",
        "Poisson sampling: every update draws",
        "Does not cover: loss and metrics on the training examples",
        "operating system, which were not kept",
        "Signature: none.",
    ]:
        assert phrase in text, phrase
    assert "approximation" not in text and "not releasable" not in text.lower()


def test_of_a_plan_before_and_within_the_training():
    plan = plan_of(steps=40)
    whole = flat(plan.statement(dataset="our photos"))
    assert "our photos (N = 60 examples) will have" in whole and "40 noisy updates" in whole
    assert "only if draws and noise get no seed" in whole
    assert plan.epsilon <= claimed(whole)[0] < plan.epsilon * 1.001
    part = plan.statement(steps=np.int64(7))
    assert plan.epsilon_at(7) <= claimed(part)[0] < plan.epsilon_at(7) * 1.001
    assert "Nothing was spent on the training data" in flat(plan.statement(steps=0))
    assert "not Poisson samples" in flat(plan_of(sampling="shuffle").statement())
    ledger = Ledger((Entry(3.0, 0.1, 9, seeded=True),))
    assert "NOT RELEASABLE. The draws or" in flat(ledger.statement(1e-5))
    for call, message in [
        (lambda: plan.statement(steps=-1), "`steps`"),
        (lambda: ledger.statement(1.0), "`delta`"),
        (lambda: ledger.statement(1e-5, num_examples=0), "`num_examples`"),
        (lambda: ledger.statement(1e-5, accountant="moments"), "`accountant`"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_each_entry_is_listed():
    ledger = Ledger((Entry(1.0, 0.0064, 782), Entry(5.0, 1.0, 3)))
    text = flat(ledger.statement(1e-6, accountant="rdp"))
    assert (
        "Updates: 782 at noise_multiplier = 1, sampling_probability = 0.0064. 3 at "
        "noise_multiplier = 5, full batches." in text
    )
    assert "RDP accountant" in text and "N =" not in text and "785 noisy updates" in text
    assert claimed(text)[0] >= ledger.epsilon(1e-6, "rdp")
    full = flat(Ledger((Entry(5.0, 1.0, 3),)).statement(1e-6, accountant="gdp"))
    assert "Sampling: full batches: every update takes all examples." in full


def test_where_there_is_nothing_to_guarantee():
    assert flat(Ledger().statement(1e-5)).startswith("Nothing was spent on the training data")
    unprotected = Ledger((Entry(0.0, 0.1, 4), Entry(2.0, 0.1, 4)))
    text = flat(unprotected.statement(1e-5))
    assert text.startswith("There is no differential privacy")
    assert "4 updates had no noise" in text
    for entries in [(), (Entry(2.0, 0.1, 4),), (Entry(0.0, 0.1, 4),)]:
        text = flat(Ledger(entries, is_complete=False).statement(1e-5))
        assert "no differential privacy" in text and ")-differential" not in text
    with pytest.raises(ValueError, match="sampling probability is unknown"):
        Ledger((Entry(2.0, None, 4),)).statement(1e-5)


def test_epsilon_is_never_rounded_down():
    rng = np.random.default_rng(0)
    numbers = [*10 ** rng.uniform(-9, 9, 2000), 1.0, 2.0, 4.377, 9.9999999, 1 + 2e-16, 0.0, 1e-12]
    for number in map(float, numbers):
        for digits in (4, 6):
            rounded = float(statement.rounded_up(number, digits))
            assert number <= rounded <= number * (1 + 10.0 ** (1 - digits))
    assert statement.rounded_up(4.37720144) == "4.378" and statement.rounded_up(0.1) == "0.1"
    assert claimed(Ledger((Entry(3.0, 0.1, 9),)).statement(1.23456789e-5))[1] >= 1.23456789e-5


def test_facts_of_a_record():
    ledger = Ledger((Entry(3.0, 0.1, 9),)) + Ledger.selected([Entry(30.0, 1.0, 2)], 8.0, 1e-5)
    digits = UpstreamTraining(DatasetId("digits"), Ledger((Entry(0.0, 1.0, 5),)))
    record = Record(
        *("classify", DatasetId("photos"), ledger, 1e-5),
        seen=(digits,),
        independence="mapped",
        results={"l2_norm_clip": 0.02, "individual_mean": 0.1, "num_public": 3},
    )
    text = flat(words.statement(record))
    for phrase in [
        "2e-05)-differential",
        "one image, added or removed",
        "clipped to an L2 norm of 0.02",
        "The best of a random number of runs, 8 on average, each of 2 at noise_multiplier = 30, "
        "full batches: epsilon",
        "at delta 1e-05 for all of them.",
        "Assumes: The initial weights or features were trained on digits (epsilon infinite). These "
        "are other data, as far as names",
        "Independence: no example influences another's gradient. Examples are mapped.",
        "the folder individual_PRIVATE, which must not be published; 3 public images: the weights",
    ]:
        assert phrase in text, phrase
    assert claimed(text)[0] >= ledger.epsilon(1e-5)


def test_releases_are_called_so():
    releases = Ledger((Entry(5.0, 1.0, 3, kind="release"),))
    text = flat(releases.statement(1e-5))
    assert "after 3 noisy releases" in text and "Releases: 3 at noise_multiplier = 5" in text
    assert "every release takes all examples" in text and "DP-SGD" not in text
    both = flat((releases + Ledger((Entry(3.0, 0.1, 9),))).statement(1e-5))
    assert "after 12 noisy updates" in both
    assert "Mechanism: DP-SGD" in both and "Gaussian releases of sums" in both


def test_only_weights_that_were_seen_being_initialized_know_no_data():
    def assumed(**facts):
        return flat(
            words.statement(Record("x", None, Ledger((Entry(3.0, 0.1, 9),)), 1e-5, **facts))
        )

    assert "Assumes: No data went into the initial weights and fixed features." in assumed(
        initialized=True
    )
    assert "came with a ledger, or were declared to be public" in assumed()
    new, declared, copied = (
        keras.Sequential([keras.Input([6]), keras.layers.Dense(3)]) for _ in range(3)
    )
    declared.set_weights(new.get_weights())
    tfdpx.checks.mark_public(declared)
    tfdpx.checks.mark_public(new)  # Of known weights it says nothing new.
    tfdpx.copy_weights(declared, copied)
    are = [account.are_initialized(model.weights) for model in (new, declared, copied)]
    assert are == [True, False, False]


def test_the_right_guesses_of_a_run_are_told_with_the_limit_that_binds():
    plan = plan_of(noise_multiplier=None, right_guesses=0.6)
    record = Record(
        "classify", DatasetId("digits", 60), plan.ledger_at(5), 1e-5, settings={"right_guesses": 60}
    )
    text = flat(words.statement(record))
    assert (
        "Planned for at most 60 right guesses out of 100, but epsilon is the stricter limit: "
        "at most 2.02" in text
    )
    assert "they recognise at most" in text  # The rate at 1% false alarms is next to it.


def test_the_number_of_examples_is_of_the_last_plan_if_earlier_updates_had_another():
    first, last = Entry(1.5, 0.2, 20, run=1), Entry(1.5, 0.25, 4, run=2)
    text = flat(Ledger((first, last)).statement(1e-5, num_examples=400))
    assert "(N = 400 examples in the last plan)" in text
    assert "Earlier updates were drawn by another plan, perhaps from other data." in text
    alone = Ledger((last, Entry(1.5, 0.25, 4, run=3))).statement(1e-5, num_examples=400)
    assert "(N = 400 examples)" in flat(alone) and "another plan" not in flat(alone)
