r"""Attacks thousands of small models, trained in one graph, and bounds their epsilon from below.

    python -m experiments.high_accuracy.audit --workdir=/tmp/audit
    python -m experiments.high_accuracy.audit --workdir=/tmp/audit --batch_size=0

Appendix A.2 of De et al. 2022, on LeNet and 100 images. Phase I, for each epsilon, trains a few
models with each target example, learning rate and clip, with the target in the data and without,
and takes what distinguishes them best: by the total variation distance of the target's scores.
Phase II trains --models of each kind with that, chooses thresholds on a fifth, and counts errors on
the others. By Clopper-Pearson, they give a lower bound on epsilon that holds for any mechanism, and
one for Gaussian DP, which training is with --batch_size=0, all examples in every update; with
sampled batches that is an estimate.

Scores are kept in --workdir in chunks: a run that was interrupted resumes after the last one, and
one with more --models adds to them. `table.md` is Table 8, `losses.png` the losses on D and D'. The
last line of the standard output is a view of `record.json`.
"""

import argparse
import pathlib
import sys

import keras
import numpy as np

import tfdpx
from experiments.high_accuracy.audits import canary_data, phases, pictures
from experiments.high_accuracy.audits.batched_models import BatchedModels
from experiments.high_accuracy.audits.store import Store
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.train.config.errors import UserError, checking_flags, in_one_line
from tfdpx.train.data import identity, loading
from tfdpx.train.report.record import to_json
from tfdpx.train.run import provenance


def main(arguments=None):
    """Runs the audit that the flags describe; errors of the user become one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, required=True, help="Folder for scores and pictures.")
    add("--dataset", default="digits", help="As for tfdpx.train.classify.")
    add("--data_dir", help="As for tfdpx.train.classify.")
    add("--download", action="store_true", help="As for tfdpx.train.classify.")
    add("--epsilons", default="1,2,4,8", help="Nominal epsilons.")
    add("--num_examples", type=int, default=100, help="Images of D; delta is one over it.")
    add("--batch_size", type=int, default=64, help="Expected images an update; 0: all.")
    add("--steps", type=int, default=50, help="Updates.")
    add("--models", type=int, default=1000, help="Models of each kind in phase II.")
    add("--sweep_models", type=int, default=50, help="Models of each kind in phase I.")
    add("--chunk", type=int, default=50, help="Models that train side by side.")
    add("--targets", default="blank,noise,7_as_8", help="Targets among which phase I chooses.")
    add("--learning_rates", default="0.01,0.1,1", help="Among which phase I chooses.")
    add("--l2_norm_clips", default="0.1,1", help="Among which phase I chooses.")
    add("--confidence", type=float, default=0.999, help="Of each lower bound.")
    add("--seed", type=int, default=0, help="Of weights, draws and noise.")
    values = parser.parse_args(arguments)
    with in_one_line("experiments.high_accuracy.audit"):
        record = run(values)
    print(to_json(record), flush=True)


def run(values):
    """Both phases for each epsilon; writes table and picture, and returns the report, a dict."""
    names = ("dataset", "num_examples", "batch_size", "steps", "seed")
    described = {name: getattr(values, name) for name in names}
    store = Store(values.workdir, described, _say)
    data = loading.load(values.dataset, values.data_dir, download=values.download)
    if data.train_y is None:
        raise UserError(f"The images must fit in memory. Received: --dataset={values.dataset}.")
    with checking_flags():
        rates, clips = (_floats(t) for t in (values.learning_rates, values.l2_norm_clips))
        grid = phases.attacks(values.targets.split(","), rates, clips)
        epsilons = _floats(values.epsilons)
    if min(values.models, values.sweep_models, values.chunk) < 2:
        raise UserError("Flags --models, --sweep_models and --chunk must be at least 2.")
    rows, scores = [], []
    for epsilon in epsilons:
        row, pair = _audited(values, store, data, grid, epsilon)
        rows.append(row)
        scores.append(pair)
        _say(to_json(row))
    pictures.write_table(rows, values.workdir / "table.md")
    pictures.draw_losses(scores, rows, values.workdir / "losses.png")
    passed = all(phases.passed(row) for row in rows)
    record = Record(
        program="audit",
        data=identity.of(values.dataset, values.num_examples),
        # Scores of an attack that knows the examples are not private.
        ledger=provenance.not_private(),
        delta=None,
        settings={name: described[name] for name in names[1:]},
        results={"passed": passed, "audited_delta": 1 / values.num_examples, "rows": rows},
    )
    record.save(values.workdir / records.FILE)
    return {**record.view(), "workdir": str(values.workdir)}


def _floats(text):
    return [float(each) for each in text.split(",")]


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
    x, y = canary_data.data_set(data, values.num_examples)
    keras.utils.set_random_seed(values.seed)
    model = tfdpx.models.LeNet(data.num_classes, x.shape[1:])
    sides = {}  # Traced when first used.

    def scores_of(phase, attack, models):
        target_x, target_y = canary_data.target(data, attack.target)
        examples = np.concatenate([x, target_x]), np.concatenate([y, target_y])
        size = min(models, values.chunk)
        many = sides.setdefault(size, BatchedModels(model, plan, size))
        pair = []
        for kind, present in (("with", True), ("without", False)):

            def made(seed, present=present):
                rates = attack.learning_rate, attack.l2_norm_clip
                logits = many.train(seed, examples, present, *rates).numpy()
                return phases.true_class_logits(logits, target_y[0])

            name = f"{phase}/eps{epsilon:g}-{attack}-{kind}"
            pair.append(store.scores(name, models, size, made)[:models])
        return pair

    distances = [phases.total_variation(*scores_of("sweep", a, values.sweep_models)) for a in grid]
    best = grid[int(np.argmax(distances))]
    pair = scores_of("final", best, values.models)
    measured = phases.measured(*pair, plan.delta, values.confidence, values.batch_size == 0)
    row = {
        "epsilon": epsilon,
        "noise_multiplier": plan.noise_multiplier,
        "target": best.target,
        "learning_rate": best.learning_rate,
        "l2_norm_clip": best.l2_norm_clip,
        "total_variation": max(distances),
        **measured,
        "advantage_upper_bound": phases.advantage_upper_bound(epsilon, plan.delta),
    }
    return row, pair


def _say(line):
    """Keeps the standard output for the result."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
