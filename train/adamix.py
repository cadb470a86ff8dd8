r"""Compares AdaMix with its ablations and baselines, over budgets and numbers of public images.

    python -m tfdpx.train.adamix --workdir=/tmp/adamix
    python -m tfdpx.train.adamix --workdir=/tmp/adamix --shifts=rotated,inverted --epsilons=1,3
    python -m tfdpx.train.adamix --workdir=/tmp/adamix --shots=1,2,5,10,20,50 --epsilons=1

Of each class, --shots training images are public and all others private. Features are those of
`tfdpx.models.ScatterLinear`, which know no data, or of a public backbone, --init_from: one that
saw these images without an account is refused. Each private method takes the learning rate of the
least error on held-out private images of another draw, as in the paper. No epsilon covers that, nor
the errors of the table: the study as a whole is not private, and its record says so.

Every fit is a line of `results.jsonl` in the working directory; a run that was cut off goes on
after the last, and a further one with other flags adds to it. `table.md` and the pictures are of
all that is there: test error against epsilon (Figure 1, left and centre; with --shifts Figure 3,
right), attacks against test error (Figure 1, right), boost against the number of public images
(Figure 2), and individual epsilons (Figure 3). The last line of the standard output is a view of
`record.json`.
"""

import dataclasses
import json
import pathlib
import sys

import keras
import numpy as np
from absl import app, flags

import tfdpx
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import rounded_up
from tfdpx.train import features
from tfdpx.train.config import run_flags
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.data import identity, loading, public_split
from tfdpx.train.report import mixed_pictures
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import mixed_methods, provenance

_NOT_PRIVATE = ("only_public", "paragon")


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("dataset", "digits", "As for tfdpx.train.classify.", **common)
    flags.DEFINE_string("init_from", None, "Public backbone, a .keras file.", **common)
    flags.DEFINE_string(
        "init_data", None, "What --init_from was trained on, where the file does not say.", **common
    )
    flags.DEFINE_list("methods", list(mixed_methods.METHODS), "Methods to compare.", **common)
    flags.DEFINE_list("epsilons", ["1", "3"], "Budgets.", **common)
    flags.DEFINE_list("shots", ["2", "5"], "Public images of each class.", **common)
    flags.DEFINE_list("shifts", ["none"], "Domains of the public images.", **common)
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds of split and noise.", **common)
    flags.DEFINE_float("delta", 1e-5, "Delta.", **common)
    flags.DEFINE_float("noise_multiplier", 20.0, "Sigma; more takes more steps.", **common)
    flags.DEFINE_integer("num_private", None, "Private images to use at most.", **common)


def main(argv, values=flags.FLAGS):
    """Runs what the flags ask for; errors of the user become one line."""
    try:
        if len(argv) > 1:
            raise UserError(f"Only flags are understood. Received: {' '.join(argv[1:])}.")
        record = run(values)
    except UserError as error:
        sys.exit(f"tfdpx.train.adamix: {' '.join(str(error).split())}")
    print_table(record, title="adamix")
    print(to_json(record), flush=True)


def run(values):
    """Makes every fit that has no result yet, draws the pictures, and returns the report."""
    paths = [values.init_from] if values.init_from else []
    seen = provenance.seen_by(paths, values.init_data)
    before = provenance.on_same_data(seen, values.dataset)
    workdir = _workdir(values)
    for name, known in (("methods", mixed_methods.METHODS), ("shifts", public_split.SHIFTS)):
        for one in values[name].value:
            if one not in known:
                raise UserError(f"Flag --{name} takes {', '.join(known)}. Received: {one}.")
    study, path = load(values), workdir / "results.jsonl"
    results, sorted_epsilons = {}, {}
    for line in path.read_text().splitlines() if path.exists() else []:
        _add(results, json.loads(line))
    for job in _jobs(values):
        *setting, seed = job
        if seed in {result["seed"] for result in results.get(tuple(setting), ())}:
            continue
        method, shots, shift, epsilon = setting
        budget = (epsilon, values.delta, values.noise_multiplier)
        with checking_flags():
            known = [r["rate"] for r in results.get(tuple(setting), ())]
            rate = known[0] if known else mixed_methods.chosen_rate(
                study, method, shots, shift, budget
            )  # fmt: skip
            found, head = mixed_methods.measured(study, method, shots, shift, budget, rate, seed)
        line = dict(zip(("method", "shots", "shift", "epsilon", "seed"), job, strict=True))
        line |= {**found, "rate": rate, "spent": min(found["spent"], sys.float_info.max)}
        if shift == "none" and rate is not None and str(seed) == values.seeds[0]:
            _, private = study.sets(shots, seed)
            line["individual"] = np.quantile(
                head.individual_epsilons(*private), np.linspace(0, 1, 201)
            ).tolist()
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        _add(results, line)
        print(f"{method:18} {shots} public, {shift}, epsilon {epsilon}: {found['error']:.4f}")
    sorted_epsilons = _individuals(results)
    record = _record(values, study, results, seen, before)
    record.save(workdir / records.FILE)
    _draw(values, results, sorted_epsilons, workdir)
    return {**record.view(), "workdir": str(workdir)}


def load(values):
    """The `mixed_methods.Study` of --dataset, on fixed features."""
    data = loading.load(values.dataset, run_flags.DATA_DIR.value, download=run_flags.DOWNLOAD.value)
    if data.train_y is None:
        raise UserError(f"The images must fit in memory. Received: --dataset={values.dataset}.")
    # What the file format makes the largest grey level: the images' own maximum is private.
    largest = 255 if isinstance(data.centre, tuple) else 2 * data.centre
    if values.init_from:
        model = features.backbone(keras.saving.load_model(values.init_from, compile=False))
        scale = 1
    else:
        whole = tfdpx.models.ScatterLinear(data.num_classes, data.image_shape)
        model, scale = keras.Model(whole.input, whole.layers[-1].input), largest

    def of(images):
        return model.predict(images / scale if scale != 1 else images, verbose=0)

    shifts = {"none", *values.shifts}
    shifted = {
        shift: public_split.shifted(data.train_x, shift, largest) for shift in sorted(shifts)
    }
    return mixed_methods.Study(
        {shift: of(images) for shift, images in shifted.items()},
        data.train_y,
        (of(data.eval_x), data.eval_y),
        data.num_classes,
        values.num_private,
    )


def _workdir(values):
    if run_flags.WORKDIR.value is None:
        raise UserError("Flag --workdir names the folder for results. It is not set.")
    workdir = pathlib.Path(run_flags.WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    about, path = _about(values), workdir / "study.json"
    if path.exists() and json.loads(path.read_text()) != about:
        raise UserError(
            f"The folder {workdir} holds results of {path.read_text()}. Received: "
            f"{json.dumps(about)}. Choose another --workdir."
        )
    path.write_text(json.dumps(about))
    return workdir


def _about(values):
    names = ("delta", "noise_multiplier", "num_private")
    told = {name: values[name].value for name in names}
    dataset = dataclasses.asdict(identity.of(values.dataset))
    return {"dataset": dataset, "init_from": provenance.without_paths(values.init_from), **told}


def _jobs(values):
    for shots in map(int, values.shots):
        for shift in values.shifts:
            for method in values.methods:
                free = method in _NOT_PRIVATE
                # All examples together are the same ones however they were split.
                seeds = values.seeds[:1] if method == "paragon" else values.seeds
                for epsilon in [None] if free else map(float, values.epsilons):
                    for seed in map(int, seeds):
                        yield method, shots, shift, epsilon, seed


def _add(results, line):
    key = tuple(line[name] for name in ("method", "shots", "shift", "epsilon"))
    results.setdefault(key, []).append(line)


def _individuals(results):
    """Dict from shots and epsilon to a dict from method to sorted epsilons of the first seed."""
    found = {}
    for (method, shots, shift, epsilon), lines in results.items():
        if shift == "none" and "individual" in lines[0]:
            found.setdefault((shots, epsilon), {})[method] = lines[0]["individual"]
    return found


def _draw(values, results, individuals, workdir):
    mixed_pictures.write_table(results, workdir / "table.md")
    for shots, shift in sorted({key[1:3] for key in results}):
        mixed_pictures.draw_errors(results, shots, shift, workdir / f"errors_{shots}_{shift}.png")
        if shift == "none":
            mixed_pictures.draw_membership(results, shots, workdir / f"membership_{shots}.png")
    for (shots, epsilon), found in individuals.items():
        path = workdir / f"individual_{shots}_{epsilon:g}.png"
        spent = tfdpx.AdaMix(2, epsilon, values.delta, values.noise_multiplier).plan(1).epsilon
        mixed_pictures.draw_individuals(found, spent, path)
    shots = {key[1] for key in results if key[0] == "only_public" and key[2] == "none"}
    has_paragon = any(key[0] == "paragon" for key in results)
    comparable = {
        key: found
        for key, found in results.items()
        if has_paragon and key[1] in shots and key[2] == "none"
    }
    for epsilon in sorted({key[3] for key in comparable} - {None}):
        mixed_pictures.draw_boost(comparable, epsilon, workdir / f"boost_{epsilon:g}.png")


def _record(values, study, results, seen, before):
    """What the study was: errors on private images and rates chosen on them have no noise."""
    dimension = next(iter(study.features.values())).shape[1]
    found = {**_about(values), "dimension": dimension}
    for (method, shots, shift, epsilon), lines in results.items():
        at = "" if epsilon is None else f"_eps{epsilon:g}"
        name = f"{method}_{shots}{'' if shift == 'none' else '_' + shift}{at}"
        found[f"{name}_error"] = float(np.mean([line["error"] for line in lines]))
    public = min(map(int, values.shots)) * study.num_classes
    head = tfdpx.AdaMix(
        study.num_classes, float(values.epsilons[0]), values.delta, values.noise_multiplier
    )
    count = min(len(study.labels) - public, values.num_private or len(study.labels))
    found["privacy"] = (
        "This study is not private: learning rates were chosen on private images, and its numbers "
        "are computed from them without noise. Of a single fit whose learning rate was known "
        f"before, AdaMix says: {head.statement(count, public)}"
    )
    if before.steps:
        found["privacy"] += (
            " The backbone had spent epsilon "
            f"{rounded_up(before.epsilon(values.delta))} at delta "
            f"{before.total_delta(values.delta):.6g} on these images before, which comes on top."
        )
    return Record(
        program="adamix",
        data=identity.of(values.dataset, len(study.labels)),
        spent=provenance.not_private(),
        delta=None,
        sampling="full_batch",
        seen=seen,
        searched="learning rates of the least error on held-out private images",
        results=found,
    )


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
