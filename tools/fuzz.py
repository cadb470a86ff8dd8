r"""Trains random configurations for one update each, and checks the updates.

    python tools/fuzz.py --seconds=600

A configuration has a model, loss, optimizer, sizes, views, dtype, weights, compilation and
examples. One example may be hostile, for example with NaN values. A configuration passes if its
update equals an update computed from single examples, or if tfdpx refuses the configuration by an
error. An update that takes more than five minutes counts as a failure. The last line is a JSON
object. The exit status is 1 if anything failed.
"""

import argparse
import collections
import json
import os
import pathlib
import signal
import sys
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import fuzz_configurations  # noqa: E402
import hypothesis  # noqa: E402
import keras  # noqa: E402

HANG = 300  # Seconds


class _Over(BaseException):
    """Raised when the time for all configurations is over."""


def hung(*_):
    """Handles the alarm signal of a configuration that takes too long."""
    raise TimeoutError(f"No answer within {HANG} seconds.")


def is_ours(error):
    """Returns whether an error was raised in a file of tfdpx and has a type that tfdpx raises."""
    trace = traceback.extract_tb(error.__traceback__)[-1]
    path = pathlib.Path(trace.filename).resolve()
    inside = any((ROOT / part) in path.parents for part in ("tfdpx", "layers", "models"))
    return isinstance(error, (ValueError, TypeError, OSError)) and inside


def check(config):
    """Checks a configuration. Returns "trained", or "refused" if tfdpx raised an error."""
    try:
        fuzz_configurations.check(config)
        return "trained"
    except Exception as error:
        if not is_ours(error):
            raise
        return "refused"
    finally:
        keras.backend.clear_session()


def main():
    """Tries configurations for some seconds; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    seconds = parser.parse_args().seconds
    signal.signal(signal.SIGALRM, hung)
    answers, failures, end = collections.Counter(), [], time.monotonic() + seconds

    @hypothesis.settings(
        max_examples=10**6, deadline=None, database=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.seed(time.time_ns())
    @hypothesis.given(fuzz_configurations.CONFIGURATIONS)
    def attempt(config):
        if time.monotonic() > end:
            raise _Over
        signal.alarm(HANG)
        try:
            answers[check(config)] += 1
        except Exception as error:
            answers["failed"] += 1
            text = "".join(traceback.format_exception_only(error)).strip()
            failures.append(f"{config!r}: {text[-600:]}")
            print(failures[-1], file=sys.stderr, flush=True)
        finally:
            signal.alarm(0)

    try:
        attempt()
    except _Over:
        pass
    print(json.dumps({**answers, "failures": failures[:20]}))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
