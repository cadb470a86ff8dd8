r"""Tries random configurations, plans, flags, ledgers and damaged checkpoints, and counts.

    python tools/fuzz.py --seconds=600

Configurations (model, loss, optimizer, sizes, views, passes, dtype, weights, compilation, hostile
rows) train one update each, which is compared with batches of one. All other inputs must be
accepted, or refused by an error of tfdpx. A try of more than five minutes counts as a hang. The
last line is a JSON object; the exit status is 1 if anything failed.
"""

import argparse
import collections
import json
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import fuzz_configurations  # noqa: E402
import fuzz_inputs  # noqa: E402
import hypothesis  # noqa: E402
import keras  # noqa: E402

import tfdpx  # noqa: E402

HANG = 300  # Seconds


def hung(*_):
    """Handles the alarm."""
    raise TimeoutError(f"No answer within {HANG} seconds.")


def a_checkpoint(folder):
    """Trains a little, with individual accounting and a checkpoint in `folder`."""
    plan = tfdpx.PrivacyPlan(12, batch_size=4, steps=3, noise_multiplier=1.0, delta=1e-3)
    accountant = tfdpx.accounting.IndividualAccountant(plan)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(tfdpx.DPSGD(0.1, plan=plan, individual=accountant), loss="mse")
    x = keras.random.normal((12, 2), seed=0)
    batches = plan.batches(x, x, optimizer=model.optimizer)
    model.fit(batches, callbacks=[tfdpx.callbacks.Checkpoint(folder)], verbose=0)


def check_configuration(config):
    """Runs `fuzz_configurations.check`, or accepts a refusal of tfdpx."""
    try:
        fuzz_configurations.check(config)
        return "trained"
    except Exception as error:
        if not fuzz_inputs.is_ours(error):
            raise
        return "refused"
    finally:
        keras.backend.clear_session()


def kinds(folder):
    """Returns a dict from names to a strategy, a check, and its share of the time."""
    a_checkpoint(folder / "whole")
    (folder / "damaged").mkdir()
    size = (folder / "whole" / fuzz_inputs.CHECKPOINT).stat().st_size
    return {
        "configurations": (fuzz_configurations.CONFIGURATIONS, check_configuration, 0.8),
        "plans": (fuzz_inputs.PLANS, fuzz_inputs.check_plan, 0.04),
        "sensible_plans": (fuzz_inputs.SENSIBLE_PLANS, fuzz_inputs.check_plan, 0.04),
        "flags": (fuzz_inputs.flags(), fuzz_inputs.check_flags, 0.06),
        "ledgers": (
            fuzz_inputs.damage(len(fuzz_inputs.SAVED_LEDGER)), fuzz_inputs.check_ledger, 0.02,
        ),
        "checkpoint_files": (
            fuzz_inputs.damage(size),
            lambda how: fuzz_inputs.check_checkpoint(folder / "whole", folder / "damaged", how),
            0.04,
        ),
    }  # fmt: skip


def try_for(seconds, strategy, check):
    """Tries examples for so long; returns the number of each answer, and a list of failures."""
    answers, failures, end = collections.Counter(), [], time.monotonic() + seconds

    @hypothesis.settings(
        max_examples=10**6, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.seed(time.time_ns())
    @hypothesis.given(strategy)
    def attempt(example):
        if time.monotonic() > end:
            raise _Over
        signal.alarm(HANG)
        try:
            answers[check(example) or "answered"] += 1
        except Exception as error:
            answers["failed"] += 1
            text = "".join(traceback.format_exception_only(error)).strip()
            failures.append(f"{example!r}: {text[-600:]}")
            print(failures[-1], file=sys.stderr, flush=True)
        finally:
            signal.alarm(0)

    try:
        attempt()
    except _Over:
        pass
    return answers, failures


class _Over(BaseException):
    """The time is over."""


def main():
    """Runs all kinds one after another; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", help="one kind alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGALRM, hung)
    result, failed = {}, []
    with tempfile.TemporaryDirectory() as name:
        for kind, (strategy, check, share) in kinds(pathlib.Path(name)).items():
            if arguments.only not in (None, kind):
                continue
            seconds = arguments.seconds * (1.0 if arguments.only else share)
            answers, failures = try_for(seconds, strategy, check)
            print(f"{kind}: {dict(answers)}", file=sys.stderr, flush=True)
            result[kind] = dict(answers)
            failed += [f"{kind}: {failure}" for failure in failures[:20]]
    print(json.dumps({**result, "failures": failed}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
