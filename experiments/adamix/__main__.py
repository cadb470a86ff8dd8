r"""Compares AdaMix with its ablations and baselines. See README.md in this folder.

    python -m experiments.adamix --workdir=W
    python -m experiments.adamix --workdir=W --shifts=rotated,inverted --epsilons=1
    python -m experiments.adamix --workdir=W --shots=1,2,5,10,50 --epsilons=1
    python -m experiments.adamix --workdir=W --shots=2 --epsilons=1 --sigma=40
    python -m experiments.adamix --workdir=W --init_from=resnet50.keras --dataset=folder:photos

Every fit writes a line to `results.jsonl` in the working directory. An interrupted run continues
after the last line, and a later run with other flags adds more lines. `table.md` and the pictures
show all results in the folder. The results are not private.
"""

import pathlib

import numpy as np
from absl import app, flags

from experiments.adamix import methods, pictures
from tfdpx import _resumable as resumable
from tfdpx.train import settings
from tfdpx.train.data import images
from tfdpx.train.start_from import Start

# From the name of a domain to a function that moves public images into this domain. Its arguments
# are the images and the largest grey level of their format.
SHIFTS = {
    "none": lambda images, largest: images,
    "rotated": lambda images, largest: np.rot90(images, axes=(1, 2)),
    "inverted": lambda images, largest: (largest - images).astype(images.dtype),
}
_KEY = ("method", "shots", "shift", "epsilon")


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    # `settings` defines some of these flags, too, for the programs that users run.
    common = {"flag_values": values, "allow_override": True}
    flags.DEFINE_string("dataset", "digits", "As for tfdpx.train.classify.", **common)
    text = "Pre-trained network of the features, a .keras file. Default: features without data."
    flags.DEFINE_string("init_from", None, text, **common)
    flags.DEFINE_list("methods", list(methods.METHODS), "Methods to compare.", **common)
    flags.DEFINE_list("epsilons", ["1", "3"], "Budgets.", **common)
    flags.DEFINE_list("shots", ["2", "5"], "Public images of each class.", **common)
    flags.DEFINE_list("shifts", ["none"], f"Domains of public images: {list(SHIFTS)}.", **common)
    flags.DEFINE_list("seeds", ["0", "1", "2", "3", "4"], "Seeds of split and noise.", **common)
    flags.DEFINE_float("sigma", 20.0, "Noise multiplier; epsilon sets the steps.", **common)
    text = "File .npy of tfdpx.models.zero_shot_head: methods names_start and names_and_images."
    flags.DEFINE_string("initial_weights", None, text, **common)
    flags.DEFINE_integer("num_private", None, "Private images to use at most.", **common)


def load(values):
    """Returns the `methods.Study` of the images of --dataset, with the features of --init_from."""
    asked = dict(head="adamix:shots=1", dataset=values.dataset, init_from=values.init_from)
    start = Start(settings.resolve(None, asked))
    data = images.load(
        values.dataset,
        settings.DATA_DIR.value,
        download=settings.DOWNLOAD.value,
        takes=start.image_shape,
    )
    features = start.extractor(data.image_shape, data.largest_grey)

    def extract(x):
        return features.predict(x, verbose=0)

    domains = {
        shift: extract(SHIFTS[shift](data.train_x, data.largest_grey))
        for shift in sorted({"none", *values.shifts})
    }
    test = extract(data.eval_x), data.eval_y
    weights = values.initial_weights and np.load(values.initial_weights)
    about = values.num_private, values.sigma, weights
    return methods.Study(domains, data.train_y, test, data.num_classes, *about)


def run(values, workdir):
    """Makes every fit that has no result yet. Then writes the table and the pictures.

    Args:
        values: The flags.
        workdir: `pathlib.Path`.

    Returns:
        Dict of results, as for `pictures`.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path, study = workdir / "results.jsonl", load(values)
    about = {name: values[name].value for name in ("dataset", "num_private", "init_from", "sigma")}
    results, by_sigma = {}, {}
    for line in resumable.lines(path):
        if {name: line[name] for name in about} == about:
            results.setdefault(tuple(line[name] for name in _KEY), []).append(line)
    for *key, seed in _jobs(values):
        lines = results.setdefault(tuple(key), [])
        if seed in {line["seed"] for line in lines}:
            continue
        rate = lines[0]["rate"] if lines else study.chosen_rate(*key)
        line = {**about, **dict(zip(_KEY, key, strict=True)), "seed": seed, "rate": rate}
        line |= study.measured(*key, rate, seed)
        resumable.add_line(path, line)
        lines.append(line)
        print(f"{key}, seed {seed}: error {line['error']:.4f}", flush=True)
    for line in resumable.lines(path):
        if all(line[name] == about[name] for name in about if name != "sigma") and line["epsilon"]:
            key = tuple(line[name] for name in _KEY)
            by_sigma.setdefault(key, {}).setdefault(line["sigma"], []).append(line["error"])
    pictures.write_table(results, workdir / "table.md")
    pictures.draw(results, workdir)
    pictures.draw_sigmas(by_sigma, workdir)
    return results


def _jobs(values):
    names = [*values.methods, *(methods.FROM_WEIGHTS if values.initial_weights else ())]
    for shots in map(int, values.shots):
        for shift in values.shifts:
            for method in names:
                # The paragon is fitted on all examples together, so the split, and thus the seed,
                # is irrelevant.
                seeds = values.seeds[:1] if method == "paragon" else values.seeds
                free = method in methods.FREE
                for epsilon in [None] if free else map(float, values.epsilons):
                    for seed in map(int, seeds):
                        yield method, shots, shift, epsilon, seed


def main(argv, values=flags.FLAGS):
    """Runs the study."""
    workdir = pathlib.Path(settings.WORKDIR.value or "runs/adamix")
    run(values, workdir)
    print((workdir / "table.md").read_text())


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
