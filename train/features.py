r"""Extracts features of images by a trained backbone, and fits private heads to them.

    python -m tfdpx.train.features --init_from=model.keras --dataset=cifar10 --workdir=/tmp/features
    python -m tfdpx.train.features --workdir=/tmp/features --method=dp_fc --epsilon=1 --trials=20
    python -m tfdpx.train.features --preset=table10/vit_g14_jft/cifar10 --epsilon=1 --dry_run

The backbone is a model of `tfdpx.train.pretrain` or `classify` without its last layer; it
normalises its images itself. Features go to the working directory in shards; an extraction that
was cut off goes on after the last. With --method a head is then fitted to those of the training
images and measured on the test images; `head.weights.npz` and `head.json` receive it and its
ledger.

--trials=N searches the head's arguments by Optuna on a tenth of the training images. That search
is not covered by the guarantee, which is of the last fit alone. --private_tuning=M covers it: a
random number of runs, M on average, of which only the best is released, and all together keep to
epsilon (Papernot and Steinke 2021). The last line of the standard output is one JSON object.
"""

import math
import sys

import keras
import numpy as np
from absl import app, flags

from tfdpx.train.config import head_presets, run_flags
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.data import loading
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import finetuning, head_methods, head_search

SHARD = 4096
HELD_OUT = 0.1


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("preset", None, "A column of Tables 7 to 10, for --dry_run.", **common)
    flags.DEFINE_bool("dry_run", False, "Only say what a preset means and spends.", **common)
    flags.DEFINE_string("init_from", None, "Backbone, a .keras file.", **common)
    flags.DEFINE_string("dataset", None, "As for tfdpx.train.classify.", **common)
    flags.DEFINE_enum("method", None, list(head_methods.METHODS), "Head to fit.", **common)
    flags.DEFINE_float("epsilon", None, "Privacy budget.", **common)
    flags.DEFINE_float("delta", 1e-5, "Delta.", **common)
    flags.DEFINE_integer("trials", 0, "Trials of Optuna, which are not paid for.", **common)
    flags.DEFINE_float("private_tuning", None, "Mean number of runs, paid for.", **common)
    flags.DEFINE_integer("seed", None, "Seed of the noise; never for release.", **common)


def main(argv, values=flags.FLAGS):
    """Runs what the flags ask for; errors of the user become one line."""
    try:
        if len(argv) > 1:
            raise UserError(f"Only flags are understood. Received: {' '.join(argv[1:])}.")
        if values.dry_run:
            record = describe(values)
        else:
            record = run(values)
    except UserError as error:
        sys.exit(f"tfdpx.train.features: {' '.join(str(error).split())}")
    print_table(record, title="features")
    print(to_json(record), flush=True)


def describe(values):
    """What a preset means, and the noise that it needs: a dict."""
    if values.preset is None or values.epsilon is None:
        raise UserError("Flag --dry_run needs --preset and --epsilon.")
    preset = head_presets.resolve(values.preset)
    steps = {} if preset["steps"] is None else {"steps": preset["steps"]}
    head = head_methods.build(
        preset["method"],
        preset["num_classes"],
        values.epsilon,
        preset["delta"],
        l2_norm_clip=preset["l2_norm_clip"],
        **steps,
    )
    plan = head.plan(preset["num_examples"])
    return {
        **preset,
        "releases": head.num_releases,
        "noise_multiplier": head.noise_multiplier,
        "epsilon": plan.epsilon,
        "summary": plan.summary(),
    }


def run(values):
    """Extracts what is missing, fits a head if one is asked for, and returns the report."""
    if run_flags.WORKDIR.value is None:
        raise UserError("Flag --workdir names the folder of the features. It is not set.")
    if values.init_from:
        folder = extract(values.init_from, values.dataset, run_flags.WORKDIR.value)
    else:
        folder = FeatureFolder(run_flags.WORKDIR.value)
    train, test = folder.arrays("train"), folder.arrays("test")
    record = {"num_examples": len(train[0]), "dimension": train[0].shape[1]}
    if values.method is None:
        return record
    if values.epsilon is None:
        raise UserError("Flag --method needs --epsilon; inf is without privacy.")
    budget = dict(num_classes=folder.num_classes, epsilon=values.epsilon, delta=values.delta)
    with checking_flags():
        head, more = _fit(values, budget, train)
    record |= {
        "method": values.method,
        "test_accuracy": head.evaluate(*test)["accuracy"],
        "epsilon": head.epsilon_spent() if values.epsilon < math.inf else math.inf,
        "delta": values.delta,
        "noise_multiplier": head.noise_multiplier,
        "releases": head.num_releases,
        "accountant": head.accountant,
        **more,
    }
    np.savez(folder.path / "head.weights.npz", kernel=head.kernel, bias=head.bias)
    head.ledger.save(folder.path / "head.ledger.json")
    (folder.path / "head.json").write_text(to_json(record) + "\n")
    return record


def extract(path, dataset, workdir):
    """Writes the features of both splits of a data set, shard by shard; returns the folder."""
    if dataset is None:
        raise UserError("Flag --dataset says whose features to extract. It is not set.")
    finetuning.check(_Source(path))
    data = loading.load(dataset, run_flags.DATA_DIR.value, download=run_flags.DOWNLOAD.value)
    folder = FeatureFolder(
        workdir, dict(backbone=str(path), dataset=data.name, num_classes=data.num_classes)
    )
    model = backbone(keras.saving.load_model(path, compile=False))
    for split, x, y in (("train", data.train_x, data.train_y), ("test", data.eval_x, data.eval_y)):
        if y is None:
            raise UserError(f"The images must fit in memory. Received: --dataset={dataset}.")
        for index, start in enumerate(range(0, len(x), SHARD)):
            if folder.shard(split, index).exists():
                continue
            part = slice(start, start + SHARD)
            folder.write(split, index, model.predict(x[part], verbose=0), y[part])
            print(f"{split}: {min(start + SHARD, len(x))} of {len(x)}", flush=True)
    return folder


def backbone(model):
    """From images to the input of the last layer, at norm one.

    Args:
        model: A classifier of `classifiers.build`.
    """
    body, last = model.layers[-1], finetuning.last_layer(model)
    inner = keras.Model(body.inputs, last.input)
    features = inner(model.get_layer("normalise").output)
    return keras.Model(model.inputs, keras.layers.UnitNormalization()(features))


def _fit(values, budget, train):
    if values.private_tuning is not None:
        if values.trials:
            raise UserError("Flags --trials and --private_tuning exclude each other.")
        parts = head_search.split(*train, HELD_OUT)
        head, chosen, score, spent = head_search.privately(
            values.method, *parts, budget, values.private_tuning
        )
        more = {
            **chosen,
            "noisy_accuracy": score,
            "epsilon": spent,
            "epsilon_of_a_run": head.epsilon_spent(),
        }
        return head, more
    chosen, more = {}, {}
    if values.trials:
        parts = head_search.split(*train, HELD_OUT)
        chosen, found = head_search.by_optuna(values.method, *parts, budget, values.trials)
        more = {**chosen, "validation_accuracy": found, "search_is_private": False}
    head = head_methods.build(values.method, **budget, **chosen, seed=values.seed)
    return head.fit(*train), more


class _Source:
    """What `finetuning.check` reads of settings."""

    pretrained_on = None

    def __init__(self, path):
        self.init_from = path


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
