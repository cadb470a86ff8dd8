r"""Searches the arguments of a private head on features, by Optuna or by private tuning.

    python -m experiments.heads.search --dataset=digits --workdir=W --method=dp_fc --epsilon=1 \
        --trials=20
    python -m experiments.heads.search --preset=table10/vit_g14_jft/cifar10 --epsilon=1 \
        --dry_run

For --dataset and --init_from, features are computed as in `classify --head`. The head is written to
--workdir, as by that program. --preset names a column of Tables 7 to 10 of the paper on heads
(`_TABLES`), with its method, delta, clip, steps, trials and ranges.

--trials=N searches by Optuna (`pip install optuna`). A tenth of the training images is held out to
score the trials. The privacy guarantee is only for the last fit and does not cover the search.

--private_tuning=M makes a random number of runs, M on average, and releases only the best one.
Epsilon covers all of them (Papernot and Steinke 2021). A secret hash of each image decides if the
image is held out. The number of held-out images is public.

The last line of the standard output is one JSON object.
"""

import argparse
import hashlib
import math
import pathlib
import secrets

import numpy as np
from absl import flags

from experiments.heads import methods
from tfdpx.accounting import selection
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.report import measure
from tfdpx.train import heads, settings
from tfdpx.train.errors import UserError, checking_flags, in_one_line
from tfdpx.train.output import print_table, to_json
from tfdpx.train.start_from import not_private

# From a table to its method, number of trials, number of steps (the last one if the paper has
# several), and searched arguments.
_RATE, _ALPHA = ("learning_rate", "l2_regularization"), ("alpha", "l2_regularization")
_TABLES = {
    "table7": dict(method="dp_adam", trials=200, steps=100, searched=_RATE),
    "table8": dict(method="dp_ls", trials=200, steps=None, searched=_ALPHA),
    "table9": dict(method="dp_newton", trials=300, steps=10, searched=_RATE),
    "table10": dict(method="dp_fc", trials=200, steps=10, searched=_RATE),
}
_RANGE, _PAPER_HELD_OUT = (1e-8, 1e8), 0.05
_IMAGENET = dict(num_examples=1_281_167, num_classes=1000, delta=8e-7, dataset="imagenet2012")
_DATASETS = {
    "imagenet": _IMAGENET,
    "cifar10": dict(num_examples=50_000, num_classes=10, delta=1e-5, dataset="cifar10"),
    "cifar100": dict(num_examples=50_000, num_classes=100, delta=1e-5, dataset="cifar100"),
}
_BACKBONES = {"vit_g14_jft": 1664, "vit_b16_imagenet21k": 768, "vit_b16_imagenet1k": 768}


def preset_names():
    """Returns the names of all presets, such as "table10/vit_g14_jft/cifar10"."""
    return [
        f"{table}/{backbone}/{data}"
        for table in _TABLES
        for backbone in _BACKBONES
        for data in _DATASETS
        if (backbone, data) != ("vit_b16_imagenet1k", "imagenet")
    ]


def resolve_preset(name):
    """Returns the content of a preset, a dict.

    Returns:
        Dict: `method`, `trials`, `steps` (None for least squares), `num_examples`, `num_classes`,
        `delta`, `dataset`, `backbone`, `dimension`, `l2_norm_clip`, `held_out` (the share of the
        training images that score the trials), and `ranges` (a dict from each searched argument
        to its bounds, as for `by_optuna`).

    Raises:
        UserError: If no preset has this name.
    """
    if name not in preset_names():
        raise UserError(
            f"There is no preset {name!r}. Received: --preset={name}. Use "
            f"({'|'.join(_TABLES)})/({'|'.join(_BACKBONES)})/({'|'.join(_DATASETS)})."
        )
    table, backbone, data = name.split("/")
    large = backbone == "vit_g14_jft" and data == "imagenet"
    values = dict(_TABLES[table])
    ranges = dict.fromkeys(values.pop("searched"), _RANGE)
    return {
        **values,
        **_DATASETS[data],
        "backbone": backbone,
        "dimension": _BACKBONES[backbone],
        "l2_norm_clip": 1.0 if large else 0.005,
        "held_out": _PAPER_HELD_OUT,
        "ranges": ranges,
    }


# Bounds of each method's arguments. Clips go down to 0.005, as in the paper on heads. With this
# clip the covariance is small compared with the gradients, so the learning rates of dp_fc are
# small, too.
_RANGES = {
    "dp_ls": {"alpha": (0.01, 100.0)},
    "dp_newton": {"learning_rate": (0.01, 10.0)},
    "dp_fc": {"learning_rate": (0.001, 100.0)},
    "dp_adam": {"learning_rate": (0.01, 10.0)},
}
# The names of the methods in `classify`.
_HEADS = {
    "dp_ls": "least_squares", "dp_newton": "newton", "dp_fc": "feature_covariance",
    "dp_adam": "first_order",
}  # fmt: skip
_CLIPS = (0.005, 2.0)
_HELD_OUT = 0.1


def main(arguments=None):
    """Runs the search that the flags describe. A `UserError` is printed as one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, help="Folder for the head.")
    add("--dataset", default="digits", help="As for tfdpx classify.")
    add("--init_from", help="As for tfdpx classify. Default: features that know no data.")
    add("--init_data", help="As for tfdpx classify.")
    add("--preset", help="A column of Tables 7 to 10.")
    add("--dry_run", action="store_true", help="Only print the content and cost of a preset.")
    add("--method", choices=methods.METHODS, help="Head to fit. Default: the preset's.")
    add("--epsilon", type=float, required=True, help="Privacy budget.")
    add("--delta", type=float, help="Delta; default: the preset's, or 1e-5.")
    add("--steps", type=int, help="Steps of the method; default: the preset's or the method's.")
    add("--trials", type=int, help="Trials of Optuna, which are not paid for.")
    add("--private_tuning", type=float, help="Mean number of runs, paid for.")
    add("--seed", type=int, help="Seed of the last fit's noise; never for release.")
    values = parser.parse_args(arguments)
    flags.FLAGS.mark_as_parsed()  # The flags of `classify` keep their defaults.
    flags.FLAGS(["experiments.heads"])  # The flags of the data keep their defaults.
    with in_one_line("experiments.heads.search"):
        record = describe(values) if values.dry_run else search(values)
    print_table(record, title="search")
    print(to_json(record), flush=True)


def describe(values):
    """Returns a dict of the content of a preset and the noise multiplier that it needs."""
    if values.preset is None:
        raise UserError("Flag --dry_run needs --preset.")
    preset = resolve_preset(values.preset)
    budget = dict(num_classes=preset["num_classes"], epsilon=values.epsilon, delta=preset["delta"])
    head = methods.build(preset["method"], **budget, **_fixed(preset, values.steps))
    plan = head.plan(preset["num_examples"])
    return {
        **preset,
        "releases": head.num_releases,
        "noise_multiplier": head.noise_multiplier,
        "epsilon": plan.epsilon,
        "summary": plan.summary(),
    }


def search(values):
    """Searches the arguments, saves the fitted head, and returns a dict of results."""
    preset = resolve_preset(values.preset) if values.preset else {}
    method, mean = values.method or preset.get("method"), values.private_tuning
    trials = values.trials or preset.get("trials")
    if preset and method != preset["method"]:
        raise UserError(
            f"The preset is for another method. Received: --preset={values.preset}, which is for "
            f"{preset['method']}, and --method={method}. Leave one of them out."
        )
    if method is None or values.workdir is None:
        raise UserError("Flags --workdir and --method, or --preset, are needed.")
    if (values.trials and mean) or not (trials or mean):
        raise UserError("Pass one of --trials and --private_tuning.")
    origin = {name: getattr(values, name) for name in ("dataset", "init_from", "init_data")}
    asked = settings.resolve(None, dict(origin, head=_HEADS[_base(method, _HEADS)]))
    features = heads.Features(asked)
    train, key = features.train, secrets.token_bytes(32)
    parts = split(*train, draws(key, train[0]), preset.get("held_out", _HELD_OUT))
    searched = preset.get("ranges", ranges(method))
    delta = values.delta or preset.get("delta", 1e-5)
    budget = dict(num_classes=features.data.num_classes, epsilon=values.epsilon, delta=delta)
    budget |= _fixed(preset, values.steps)
    with checking_flags():
        if mean:
            head, chosen, score, ledger = privately(method, *parts, budget, mean, searched)
            how = f"a random number of runs, {mean:g} on average, each with arguments at random"
            sizes = (len(labels) for _, labels in parts)
            results = dict(zip(("num_fitted", "num_held_out"), sizes, strict=True))
            results["noisy_accuracy"] = score
        else:
            chosen, best = by_optuna(method, *parts, budget, trials, searched)
            head = methods.build(method, **budget, **chosen, seed=values.seed)
            head.fit(*train)
            ledger = head.ledger if values.epsilon < math.inf else not_private()
            how = f"{trials} trials of Optuna, on a part of these examples, without noise"
            results = {"validation_accuracy": best}
    results = {"method": method, **chosen, **results}
    values.workdir.mkdir(parents=True, exist_ok=True)
    return heads.save(features, head, ledger, len(train[1]), values.workdir, results, how)


def _fixed(preset, steps):
    fixed = {"l2_norm_clip": preset.get("l2_norm_clip"), "steps": steps or preset.get("steps")}
    return {name: value for name, value in fixed.items() if value is not None}


def ranges(method):
    """Returns a dict from the searched arguments of a method to their bounds, without a preset."""
    return {**_RANGES[_base(method, _RANGES)], "l2_norm_clip": _CLIPS}


def _base(method, names):
    """Returns the name in `names` that `method` begins with."""
    return next(name for name in sorted(names, key=len) if method.startswith(name))


def draws(key, features):
    """Returns a keyed hash of each example's features, as a float array [n] in [0, 1).

    Without the key, no one can compute these hashes.

    Args:
        key: Bytes, secret.
        features: Float array [n, d].
    """
    digests = (
        hashlib.blake2b(np.ascontiguousarray(row), key=key, digest_size=6).digest()
        for row in features
    )
    return np.array([int.from_bytes(digest, "big") / 2**48 for digest in digests])


def split(features, labels, draws, share):
    """Returns a training part and a held-out part, each a pair of features and labels.

    An example's part depends only on its own draw, a hash of the example; other examples do not
    matter. An example is in only one part, so the privacy loss of a fit and a score is the larger
    of the two losses (parallel composition). The number of examples in each part is public.

    Args:
        features: Float array [n, d].
        labels: Int array [n].
        draws: Float array [n] in [0, 1), from `draws`.
        share: Float in (0, 1), the expected fraction of examples in the held-out part.
    """
    held_out = draws < share
    return (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])


def by_optuna(method, train, held_out, budget, trials, searched):
    """Returns the arguments with the best accuracy on held-out examples, by Optuna.

    Epsilon does not cover the trials. As in the paper, the guarantee is only for the final fit with
    the chosen arguments.

    Args:
        method: Name in `methods.METHODS`.
        train: Pair of features and labels.
        held_out: Pair of features and labels.
        budget: Dict of num_classes, epsilon, delta, and the arguments that are not searched.
        trials: Int, the number of trials.
        searched: Dict from arguments to their bounds, as from `ranges`.

    Returns:
        Dict of the best arguments, and the accuracy with these arguments.
    """
    import optuna  # No other search needs it.

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def accuracy(trial):
        chosen = {
            name: trial.suggest_float(name, low, high, log=True)
            for name, (low, high) in searched.items()
        }
        head = methods.build(method, **budget, **chosen)
        return head.fit(*train).evaluate(*held_out)["accuracy"]

    study = optuna.create_study(direction="maximize")
    study.optimize(accuracy, n_trials=trials)
    return study.best_params, study.best_value


def privately(method, train, held_out, budget, mean, searched, rng=None):
    """Returns the best head of a random number of runs; epsilon covers all of them.

    The number of runs has a geometric distribution. Each run draws its arguments at random,
    independently of the other runs.

    Guarantee: the head and its noisy score are (epsilon, delta)-differentially private under adding
    or removing one example (`tfdpx.accounting.selection`). An example is either trained on or held
    out. The score is the number of held-out examples that are classified correctly; one example
    changes this number by at most 1. The noise of the score has the standard deviation
    `noise_multiplier / sqrt(releases)`. With this noise, scoring has the same privacy loss as
    fitting, so a run has the privacy loss of its fit.

    Args:
        method: As for `by_optuna`.
        train: Pair of features and labels.
        held_out: Pair of features and labels.
        budget: As for `by_optuna`.
        mean: Float > 1, the mean number of runs.
        searched: As for `by_optuna`.
        rng: Optional `numpy.random.Generator` that draws the arguments.

    Returns:
        The head, the arguments, the noisy accuracy, and the `Ledger` of all runs.
    """
    rng = rng or np.random.default_rng()
    epsilon, delta = budget["epsilon"], budget["delta"]
    releases = methods.build(method, **budget).num_releases
    sigma = selection.selection_scale([Entry(1.0, 1.0, releases)], epsilon, delta, mean)
    best = None
    for _ in range(selection.draw_runs(mean)):
        chosen = {name: math.exp(rng.uniform(*np.log(of))) for name, of in searched.items()}
        unbudgeted = {**budget, "epsilon": None}
        head = methods.build(method, **unbudgeted, **chosen, noise_multiplier=sigma)
        head.fit(*train)
        right = head.evaluate(*held_out)["accuracy"] * len(held_out[1])
        count = max(1, len(held_out[1]))
        score = measure.noisy_count(right, sigma / math.sqrt(releases)) / count
        if best is None or score > best[2]:
            best = head, chosen, score
    return *best, Ledger.selected([Entry(sigma, 1.0, releases)], mean, delta)


if __name__ == "__main__":
    main()
