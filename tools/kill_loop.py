r"""Kills trainings at random moments, resumes them, and compares them with unbroken ones.

    python tools/kill_loop.py --kills=50

One process imports TensorFlow and forks one child after another, so the children need not import
TensorFlow again. The children train with `tfdpx.callbacks.Checkpoint`, which saves after every
second update. After a random time each child gets SIGKILL, while it traces, trains or saves. When a
run has ended, another child repeats the whole run without a break or a checkpoint. Optimizers with
and without a `seed` get the same number of kills.

The last line is a JSON object. The exit status is 1 unless every resumed run has the updates and
the epsilon of the unbroken one. With a seed, weights, optimizer slots, averages and norms of
individual accounting must also be equal, bit by bit.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # A fork cannot share a GPU.

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdpx  # noqa: E402

EXAMPLES, BATCH, UPDATES, EPOCH, DELTA = 200, 40, 100, 10, 1e-5
KINDS = ("sgd", "individual", "adam")
SAVED = "tfdpx-checkpoint.zip"
# The moment of a kill: at any time, also before the first update; between two saves; or while a
# save is written.
MOMENTS = ("any", "training", "saving")


def make(kind, seed):
    """Returns a model, a plan, and an `IndividualAccountant` or None; the same in every process."""
    keras.utils.set_random_seed(1)
    plan = tfdpx.PrivacyPlan(EXAMPLES, BATCH, UPDATES, noise_multiplier=1.0, delta=DELTA)
    accountant = tfdpx.accounting.IndividualAccountant(plan) if kind == "individual" else None
    if kind == "adam":
        optimizer = tfdpx.DPAdam(0.01, plan=plan, use_ema=True, seed=seed)
    else:
        optimizer = tfdpx.DPSGD(0.1, plan=plan, momentum=0.9, individual=accountant, seed=seed)
    layers = [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, plan, accountant


def train(kind, seed, folder, unbroken):
    """Trains one part of a run in a child process, and writes the result if it reaches the end."""
    model, plan, accountant = make(kind, seed)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(EXAMPLES, 8)).astype("float32"), rng.integers(0, 4, EXAMPLES)
    callbacks = []
    if not unbroken:
        saved = tfdpx.callbacks.Checkpoint(folder / "checkpoint", save_freq=2)
        callbacks = [saved, tfdpx.callbacks.PrivacyBudget(plan)]
    batches = plan.batches(x, y, optimizer=model.optimizer)
    model.fit(
        batches, epochs=UPDATES // EPOCH, steps_per_epoch=EPOCH, callbacks=callbacks, verbose=0
    )
    arrays = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    if accountant is not None:
        arrays += [accountant.norms(), accountant.epsilon()]
    if seed is None:
        arrays = []
    result = folder / ("unbroken.npz" if unbroken else "resumed.npz")
    ledger = model.optimizer.ledger
    with open(folder / "fresh.npz", "wb") as file:
        np.savez(file, *arrays, updates=ledger.steps, epsilon=ledger.epsilon(DELTA))
    os.replace(folder / "fresh.npz", result)


def child(kind, seed, folder, unbroken=False):
    """Forks a child that trains, and returns its process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        warnings.simplefilter("ignore")
        train(kind, seed, folder, unbroken)
        status = 0
    finally:
        os._exit(status)


def wait(process):
    """Waits for a child; raises RuntimeError unless the child ends without an error."""
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status:
        raise RuntimeError(f"A training ended with status {status}, without a kill.")


def is_over(process):
    """Returns whether a child has ended; raises RuntimeError if it failed."""
    if not os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        return False
    wait(process)
    return True


def is_amid_a_save(saved):
    """Returns whether the folder of a checkpoint holds a save that is not finished yet."""
    return any(saved.glob(".*.new*"))


def kill(process, saved, moment, seconds):
    """Kills a child at a moment. Returns False if the child ended before, without an error.

    Args:
        process: Int, the id of the child.
        saved: Path of the child's checkpoint.
        moment: One of `MOMENTS`.
        seconds: Float, the delay after the start or, unless `moment` is "any", after a save. If
            `moment` is "saving", the kill then waits for the next save.
    """
    last = saved / SAVED
    before, begin = last.stat().st_mtime_ns if last.exists() else 0, None
    while True:
        if is_over(process):
            return False
        is_saved = last.exists() and last.stat().st_mtime_ns > before
        if begin is None and (moment == "any" or is_saved):
            begin = time.monotonic()
        if begin is not None and time.monotonic() - begin >= seconds:
            if moment != "saving" or is_amid_a_save(saved):
                break
        time.sleep(0.0005 if moment == "saving" else 0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True


def differences(first, second):
    """Returns the names of the arrays that differ in any bit between two files of results."""
    with np.load(first) as one, np.load(second) as other:
        if one.files != other.files:
            return ["the arrays that there are"]
        return [
            name
            for name in one.files
            if one[name].dtype != other[name].dtype or one[name].tobytes() != other[name].tobytes()
        ]


def one_run(kind, seed, folder, rng, longest):
    """Trains one run to its end, while killing and resuming it many times.

    Args:
        kind: One of `KINDS`.
        seed: Int or None, the optimizer's seed.
        folder: Path of an empty folder.
        rng: `random.Random`.
        longest: Float, the seconds of a run without kills.

    Returns:
        Counter of "kills", "kills_amid_a_save", and "resumes", which are starts from a save.
    """
    counts, saved = collections.Counter(), folder / "checkpoint"
    while True:
        counts["resumes"] += (saved / SAVED).exists()
        moment = rng.choice(MOMENTS)
        seconds = rng.uniform(0, longest if moment == "any" else longest / 10)
        if not kill(child(kind, seed, folder), saved, moment, seconds):
            return counts
        counts["kills"] += 1
        counts["kills_amid_a_save"] += moment == "saving"


def loop(seed, least, rng):
    """Trains run after run until there were enough kills; returns a dict of counts and differences.

    Args:
        seed: Int or None, the optimizers' seed.
        least: Int, the least number of kills.
        rng: `random.Random` that draws the moments.
    """
    counts, wrong, longest = collections.Counter(), [], {}
    while counts["kills"] < least:
        kind = KINDS[counts["runs"] % len(KINDS)]
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            if kind not in longest:
                (folder / "timed").mkdir()
                start = time.monotonic()
                wait(child(kind, seed, folder / "timed"))
                longest[kind] = time.monotonic() - start
            counts += one_run(kind, seed, folder, rng, longest[kind])
            wait(child(kind, seed, folder, unbroken=True))
            names = differences(folder / "resumed.npz", folder / "unbroken.npz")
            wrong += [f"{kind}: {name}" for name in names]
        counts["runs"] += 1
        print(kind, dict(counts), file=sys.stderr, flush=True)
    return {**counts, "differences": wrong}


def main():
    """Runs the loop; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="the least, with a seed and without")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    rng, results = random.Random(arguments.seed), {}
    for name, seed in (("seeded", 5), ("unseeded", None)):
        results[name] = loop(seed, arguments.kills, rng)
    print(json.dumps(results))
    sys.exit(any(result["differences"] for result in results.values()))


if __name__ == "__main__":
    main()
