r"""Attacks thousands of small models, trained in one graph, and bounds their epsilon from below.

    python -m tfdpx.train.audit --workdir=/tmp/audit
    python -m tfdpx.train.audit --workdir=/tmp/audit --batch_size=0 --learning_rates=0.01

Appendix A.2 of De et al. 2022, on LeNet and 100 images. Phase I, for each epsilon, trains a few
models with each target example, learning rate and clip, with the target in the data and without,
and takes what tells them apart best: by the total variation distance of the target's scores. Phase
II trains --models of each kind with that, chooses thresholds on a fifth, and counts errors on the
others. By Clopper-Pearson, they give a lower bound on epsilon that holds for any mechanism, and one
for Gaussian DP, which training is with --batch_size=0, all examples in every update; with sampled
batches that is an estimate.

Scores are kept in --workdir in chunks: a run that was cut off goes on after the last one, and one
with more --models adds to them. `table.md` is Table 8, `losses.png` the losses on D and D'. The
last line of the standard output is a view of `record.json`.
"""

import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.audit import membership
from tfdpx.train.audits import phases, problem
from tfdpx.train.audits.many import ManyModels
from tfdpx.train.audits.store import Store
from tfdpx.train.benchmarks.comparison import PROGRESS
from tfdpx.train.config import run_flags
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.data import identity, loading
from tfdpx.train.report import audit_pictures
from tfdpx.train.report.record import to_json
from tfdpx.train.run import origin


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("dataset", "digits", "As for tfdpx.train.classify.", **common)
    flags.DEFINE_list("epsilons", ["1", "2", "4", "8"], "Nominal epsilons.", **common)
    flags.DEFINE_integer("num_examples", 100, "Images of D; delta is one over it.", **common)
    flags.DEFINE_integer("batch_size", 64, "Expected images an update; 0: all.", **common)
    flags.DEFINE_integer("steps", 50, "Updates.", **common)
    flags.DEFINE_integer("models", 1000, "Models of each kind in phase II.", **common)
    flags.DEFINE_integer("sweep_models", 50, "Models of each kind in phase I.", **common)
    flags.DEFINE_integer("chunk", 50, "Models that train side by side.", **common)
    flags.DEFINE_list("targets", ["blank", "noise", "7_as_8"], "Targets to try.", **common)
    flags.DEFINE_list("learning_rates", ["0.01", "0.1", "1"], "To try.", **common)
    flags.DEFINE_list("l2_norm_clips", ["0.1", "1"], "To try.", **common)
    flags.DEFINE_float("confidence", 0.999, "Of each lower bound.", **common)
    flags.DEFINE_integer("seed", 0, "Of weights, draws and noise.", **common)


def main(argv, values=flags.FLAGS):
    """Runs the audit that the flags describe; errors of the user become one line."""
    try:
        if len(argv) > 1:
            raise UserError(f"Only flags are understood. Received: {' '.join(argv[1:])}.")
        record = run(values)
    except UserError as error:
        sys.exit(f"tfdpx.train.audit: {' '.join(str(error).split())}")
    print(to_json(record), flush=True)


def run(values):
    """Both phases for each epsilon; writes table and picture, and returns the report, a dict."""
    if run_flags.WORKDIR.value is None:
        raise UserError("Flag --workdir names the folder for scores and pictures. It is not set.")
    workdir = pathlib.Path(run_flags.WORKDIR.value)
    names = ("dataset", "num_examples", "batch_size", "steps", "seed")
    store = Store(workdir, {name: values[name].value for name in names}, PROGRESS.print)
    data = loading.load(values.dataset, run_flags.DATA_DIR.value, download=run_flags.DOWNLOAD.value)
    if data.train_y is None:
        raise UserError(f"The images must fit in memory. Received: --dataset={values.dataset}.")
    with checking_flags():
        grid = phases.attacks(
            values.targets, map(float, values.learning_rates), map(float, values.l2_norm_clips)
        )
        epsilons = [float(epsilon) for epsilon in values.epsilons]
    if min(values.models, values.sweep_models, values.chunk) < 2:
        raise UserError("Flags --models, --sweep_models and --chunk must be at least 2.")
    rows, scores = [], []
    for epsilon in epsilons:
        row, pair = _audited(values, store, data, grid, epsilon)
        rows.append(row)
        scores.append(pair)
        PROGRESS.print(to_json(row))
    audit_pictures.write_table(rows, workdir / "table.md")
    audit_pictures.draw_losses(scores, rows, workdir / "losses.png")
    passed = all(phases.passed(row) for row in rows)
    record = Record(
        program="audit",
        data=identity.of(values.dataset, values.num_examples),
        # Scores of an attack that knows the examples are not private.
        spent=origin.not_private(),
        delta=None,
        settings={name: values[name].value for name in names[1:]},
        results={"passed": passed, "audited_delta": 1 / values.num_examples, "rows": rows},
    )
    record.save(workdir / records.FILE)
    return {**record.view(), "workdir": str(workdir)}


def _audited(values, store, data, grid, epsilon):
    """The row of an epsilon, and scores of phase II with the target and without."""
    count = values.num_examples + 1  # The target has a row, also where it is absent.
    with checking_flags():
        plan = tfdpx.PrivacyPlan(
            count,
            batch_size=values.batch_size or count,
            steps=values.steps,
            epsilon=epsilon,
            delta=1 / values.num_examples,
        )
    x, y = problem.data_set(data, values.num_examples)
    keras.utils.set_random_seed(values.seed)
    model = tfdpx.models.LeNet(data.num_classes, x.shape[1:])
    sides = {}  # Traced when first used.

    def scores(phase, attack, models):
        target_x, target_y = problem.target(data, attack.target)
        examples = np.concatenate([x, target_x]), np.concatenate([y, target_y])
        size = min(models, values.chunk)
        many = sides.setdefault(size, ManyModels(model, plan, size))
        pair = []
        for kind, present in (("with", True), ("without", False)):

            def made(seed, present=present):
                rates = attack.learning_rate, attack.l2_norm_clip
                logits = many.train(seed, examples, present, *rates).numpy()
                return membership.true_class_logits(logits, np.full([size], target_y[0]))

            name = f"{phase}/eps{epsilon:g}-{attack}-{kind}"
            pair.append(store.scores(name, models, size, made)[:models])
        return pair

    distances = [phases.total_variation(*scores("sweep", a, values.sweep_models)) for a in grid]
    best = grid[int(np.argmax(distances))]
    pair = scores("final", best, values.models)
    measured = phases.measured(*pair, plan.delta, values.confidence, values.batch_size == 0)
    row = {
        "epsilon": epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "target": best.target,
        "learning_rate": best.learning_rate,
        "l2_norm_clip": best.l2_norm_clip,
        "total_variation": max(distances),
        **measured,
        "advantage_upper_bound": scores.advantage_upper_bound(epsilon, plan.delta),
    }
    return row, pair


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    tf.get_logger().setLevel("ERROR")
    app.run(main)
