"""Seeds: 128 bits of the operating system, shown nowhere, shared with no other run or process."""

import contextlib
import io
import logging
import os
import secrets
import warnings

import keras
import pytest
import small

import tfdpx
from tfdpx import noise
from tfdpx.run.state import Run, fresh_state

PLAN = tfdpx.PrivacyPlan(60, batch_size=20, steps=6, noise_multiplier=1.0, delta=1e-3)


def test_seeds_have_128_bits_of_the_operating_system(monkeypatch):
    asked = []

    def given(count):
        asked.append(count)
        return bytes(range(count))

    monkeypatch.setattr(secrets, "token_bytes", given)
    assert noise.make_seed() == [0x0001020304050607, 0x08090A0B0C0D0E0F]
    fresh_state()
    assert asked == [16, 16, 16]  # Noise and draws have one each.


def test_no_two_runs_share_a_seed():
    states = [fresh_state() for _ in range(100)]
    seeds = {tuple(state[name]) for state in states for name in ("noise_seed", "draw_seed")}
    assert len(seeds) == 200
    same = [fresh_state(5) for _ in range(2)]
    assert same[0]["noise_seed"] == same[1]["noise_seed"]  # Where the user says so.
    assert same[0]["noise_seed"] != same[0]["draw_seed"]


def test_a_forked_process_leaves_the_run():
    """It would else add its parent's noise to other sums."""
    run = Run()
    assert not run.is_shared
    child = os.fork()
    if not child:
        os._exit(0 if run.is_shared else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not run.is_shared


def test_a_shared_run_is_left_before_it_trains(monkeypatch):
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN))
    x, y = small.data(60)
    before = model.optimizer.run.state()["noise_seed"]
    model.build((None, 6))
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)  # As in a fork.
    model.fit(PLAN.batches(x, y, optimizer=model.optimizer), steps_per_epoch=1, verbose=0)
    assert model.optimizer.run.state()["noise_seed"] != before


def test_a_clone_has_a_seed_of_its_own():
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN, seed=1))
    clone = keras.models.clone_model(model)
    config = keras.optimizers.serialize(model.optimizer)
    clone.compile(keras.optimizers.deserialize(config), loss=model.loss)
    assert "seed" not in config["config"]
    first, second = (m.optimizer.run.state()["noise_seed"] for m in (model, clone))
    assert first != second


def traces(run):
    """Every way to write the seeds down: as numbers, in hexadecimal, as bytes."""
    for value in (*run.state()["noise_seed"], *run.draw_seed):
        yield from (str(value), str(value & (2**64 - 1)), f"{value & (2**64 - 1):x}")
        for order in ("little", "big"):
            yield value.to_bytes(8, order, signed=True).decode("latin-1")


def said(model, folder):
    """All that a training prints, logs, warns of, raises, or writes to TensorBoard's files."""
    text, log = io.StringIO(), logging.StreamHandler(io.StringIO())
    x, y = small.data(60)
    root = logging.getLogger()
    level = root.level
    root.addHandler(log)
    root.setLevel(logging.DEBUG)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        with warnings.catch_warnings(record=True) as warned:
            batches = PLAN.batches(x, y, optimizer=model.optimizer)
            callbacks = [
                tfdpx.PrivacyBudget(PLAN),
                tfdpx.callbacks.TensorBoard(str(folder), plan=PLAN, log_private_metrics=True),
            ]
            model.fit(batches, callbacks=callbacks, verbose=2)
            print(model.optimizer, model.optimizer.run, vars(model), batches, PLAN, callbacks)
            print(model.optimizer.get_config(), model.optimizer.ledger, model.summary())
            for wrong in (lambda: model.fit(batches), lambda: model.fit(x, y, batch_size=50)):
                with pytest.raises(Exception) as raised:  # noqa: PT011
                    wrong()
                print(raised.value)
            print([str(w.message) for w in warned])
    root.removeHandler(log)
    root.setLevel(level)
    files = [path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file()]
    assert files
    return text.getvalue() + log.stream.getvalue() + "".join(files)


def test_nothing_that_a_training_says_tells_a_seed(tmp_path):
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN))
    found = said(model, tmp_path)
    assert "epsilon" in found
    assert not [trace for trace in traces(model.optimizer.run) if trace in found]
    found += str(model.optimizer.run.state())  # The search finds one that is there.
    assert [trace for trace in traces(model.optimizer.run) if trace in found]
