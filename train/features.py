r"""Extracts features of images by a trained backbone, and fits private heads to them.

    python -m tfdpx.train.features --init_from=model.keras --dataset=cifar10 --workdir=/tmp/features
    python -m tfdpx.train.features --workdir=/tmp/features --method=dp_fc --epsilon=1 --trials=20
    python -m tfdpx.train.features --preset=table10/vit_g14_jft/cifar10 --epsilon=1 --dry_run

The backbone is a model of `tfdpx.train.pretrain` or `classify`, which normalises its images
itself, or any other Keras image model (docs/fine_tuning.md), without its last layer. Features go
to the working directory in shards; an extraction that was cut off goes on after the last. With
--method a head is then fitted to those of the training images and measured on the test images; a
new folder `head-001`, `head-002` ... receives it, with `weights.npz`, `record.json` and
`privacy_statement.txt`. What the backbone's training has spent on the same images is added; a
backbone that saw them without an account is refused.

--trials=N searches the head's arguments by Optuna on a tenth of the training images. That search
is not covered by the guarantee, which is of the last fit alone. --private_tuning=M covers it: a
random number of runs, M on average, of which only the best is released, and all together keep to
epsilon (Papernot and Steinke 2021). How many images are held out for it is public: each is, or is
not, by a secret hash of itself. The last line of the standard output is one JSON object.
"""

import dataclasses
import hashlib
import math
import pathlib
import sys

import keras
import numpy as np
from absl import app, flags

from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.accounting.spent import Spent
from tfdpx.train.config import head_presets, run_flags
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.data import identity, loading
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import finetuning, head_methods, head_search, interruption, provenance
from tfdpx.train.run.keras_files import PIXELS, KerasFile

SHARD = 4096
HELD_OUT = 0.1


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string(
        "preset",
        None,
        "A column of Tables 7 to 10: method, delta, clip, steps, trials and their ranges.",
        **common,
    )
    flags.DEFINE_bool("dry_run", False, "Only say what a preset means and spends.", **common)
    flags.DEFINE_string("init_from", None, "Backbone: a .keras file or a run folder.", **common)
    flags.DEFINE_enum("pixels", None, PIXELS, "As for tfdpx.train.classify.", **common)
    flags.DEFINE_string(
        "init_data", None, "What --init_from was trained on, where the file does not say.", **common
    )
    flags.DEFINE_string("dataset", None, "As for tfdpx.train.classify.", **common)
    flags.DEFINE_integer("image_size", None, "As for tfdpx.train.classify.", **common)
    flags.DEFINE_bool("skip_broken", False, "As for tfdpx.train.classify.", **common)
    flags.DEFINE_enum("method", None, list(head_methods.METHODS), "Head to fit.", **common)
    flags.DEFINE_float("epsilon", None, "Privacy budget.", **common)
    flags.DEFINE_float("delta", None, "Delta; default: the preset's, or 1e-5.", **common)
    flags.DEFINE_integer("trials", None, "Trials of Optuna, which are not paid for.", **common)
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
    except KeyboardInterrupt:
        text = "interrupted; what was written is whole. Start it again with the same command."
        interruption.end("features", text)
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
        folder = extract(
            values.init_from,
            values.dataset,
            run_flags.WORKDIR.value,
            values.init_data,
            pixels=values.pixels,
            image_size=values.image_size,
            skip_broken=values.skip_broken,
        )
    else:
        folder = FeatureFolder(run_flags.WORKDIR.value)
    train, test = folder.arrays("train"), folder.arrays("test")
    found = {"dimension": train[0].shape[1]}
    if left_out := folder.record.settings.get("left_out"):
        found["left_out"] = left_out
    asked = _asked(values)
    if asked["method"] is None:
        return {"num_examples": len(train[0]), **found}
    if values.epsilon is None:
        raise UserError("Flag --method needs --epsilon; inf is without privacy.")
    budget = dict(num_classes=folder.num_classes, epsilon=values.epsilon, delta=asked["delta"])
    with checking_flags():
        head, spent, searched, more = _fit(values, asked, {**budget, **asked["fixed"]}, train)
    record = Record(
        program="features",
        data=dataclasses.replace(folder.record.data, num_examples=len(train[0])),
        spent=folder.before + spent,
        delta=asked["delta"],
        accountant="pld" if folder.before.steps else head.accountant,
        sampling="full_batch",
        seen=folder.record.seen,
        searched=searched,
        settings=folder.record.settings,
        results={
            **found,
            "method": asked["method"],
            "test_accuracy": head.evaluate(*test[:2])["accuracy"],
            "noise_multiplier": head.noise_multiplier,
            "releases": head.num_releases,
            **more,
        },
    )
    path = folder.new_head()
    record.save(path / records.FILE)  # First: there are no weights that no record tells of.
    files.write(path / "privacy_statement.txt", record.statement().encode(), mode=0o644)
    np.savez(path / "weights.npz", kernel=head.kernel, bias=head.bias)
    return {**record.view(), "workdir": str(path)}


def extract(
    path, dataset, workdir, init_data=None, *, pixels=None, image_size=None, skip_broken=False
):
    """Writes the features of both splits of a data set, shard by shard; returns the folder.

    Args:
        path: String, the `.keras` file of the backbone, or a run folder.
        dataset: String as of `--dataset`.
        workdir: String.
        init_data: Optional string as of `--dataset`, of a backbone that does not say what it saw.
        pixels: As of `keras_files.KerasFile`.
        image_size: As of `loading.load`.
        skip_broken: As of `loading.load`.

    Raises:
        UserError: If the backbone saw these data without an account, or a file does not fit.
    """
    if dataset is None:
        raise UserError("Flag --dataset says whose features to extract. It is not set.")
    path = finetuning.model_file(path)
    seen = provenance.seen_by([path], init_data)
    provenance.on_same_data(seen, dataset)
    model = finetuning.read(path)
    source = None if finetuning.is_ours(model) else KerasFile(model, path, pixels)
    data = loading.load(
        dataset,
        run_flags.DATA_DIR.value,
        download=run_flags.DOWNLOAD.value,
        image_size=image_size,
        skip_broken=skip_broken,
        takes=source.image_shape if source else model.input_shape[1:],
    )
    for note in (*data.notes, *([source.about] if source else [])):
        print(note)
    folder = FeatureFolder(workdir, _extraction(path, dataset, data, seen, pixels))
    model = _at_norm_one(source.classifier(data.image_shape, None)) if source else backbone(model)
    for split, x, y in (("train", data.train_x, data.train_y), ("test", data.eval_x, data.eval_y)):
        if y is None:
            raise UserError(f"The images must fit in memory. Received: --dataset={dataset}.")
        for index, start in enumerate(range(0, len(x), SHARD)):
            if folder.shard(split, index).exists():
                continue
            part = slice(start, start + SHARD)
            folder.write(split, index, model.predict(x[part], verbose=0), y[part], x[part])
            print(f"{split}: {min(start + SHARD, len(x))} of {len(x)}", flush=True)
    return folder


def _extraction(path, dataset, data, seen, pixels):
    """The `Record` of features, which are not private; `seen` on the same data is marked so."""
    mine = identity.of(dataset)
    seen = tuple(
        dataclasses.replace(each, data=mine) if identity.overlap(each.data, dataset) else each
        for each in seen
    )
    digest = hashlib.blake2b(pathlib.Path(path).read_bytes(), digest_size=8).hexdigest()
    return Record(
        program="features",
        data=mine,
        spent=provenance.not_private(),
        delta=None,
        seen=seen,
        settings={
            "backbone": provenance.without_paths(str(path)),
            "backbone_digest": digest,
            "num_classes": data.num_classes,
            **({"pixels": pixels} if pixels else {}),
            **({"left_out": data.left_out} if data.left_out else {}),
        },
    )


def backbone(model):
    """From images to the input of the last layer, at norm one.

    Args:
        model: A classifier of `classifiers.build`.
    """
    return _at_norm_one(finetuning.features(model))


def _at_norm_one(features):
    return keras.Model(features.inputs, keras.layers.UnitNormalization()(features.output))


def _asked(values):
    """What flags and preset ask for, a dict; flags win."""
    preset = head_presets.resolve(values.preset) if values.preset else {}
    if preset and values.method not in (None, preset["method"]):
        raise UserError(
            f"The preset is of another method. Received: --preset={values.preset}, which is of "
            f"{preset['method']}, and --method={values.method}. Leave one of them out."
        )
    trials = 0 if values.private_tuning is not None else preset.get("trials", 0)
    fixed = {name: preset.get(name) for name in ("l2_norm_clip", "steps")}
    return {
        "method": values.method or preset.get("method"),
        "delta": values.delta or preset.get("delta", 1e-5),
        "trials": trials if values.trials is None else values.trials,
        "held_out": preset.get("held_out", HELD_OUT),
        "searched": preset.get("ranges"),
        "fixed": {name: value for name, value in fixed.items() if value is not None},
    }


def _fit(values, asked, budget, train):
    """The head, what it spent, how its arguments were searched, and what else is to be said."""
    method, ranges = asked["method"], {"searched": asked["searched"]}
    chosen, more, searched = {}, {}, None
    if values.private_tuning is not None:
        if asked["trials"]:
            raise UserError("Flags --trials and --private_tuning exclude each other.")
        mean, parts = values.private_tuning, head_search.split(*train, asked["held_out"])
        head, chosen, score, selected = head_search.privately(
            method, *parts, budget, mean, **ranges
        )
        more = {**chosen, "noisy_accuracy": score}
        more |= {"num_fitted": len(parts[0][1]), "num_held_out": len(parts[1][1])}
        searched = (
            f"a random number of runs, {mean:g} on average, each with arguments drawn at random"
        )
        return head, Spent(selected=(selected,)), searched, more
    if trials := asked["trials"]:
        parts = head_search.split(*train, asked["held_out"])
        chosen, found = head_search.by_optuna(method, *parts, budget, trials, **ranges)
        more = {**chosen, "validation_accuracy": found}
        searched = f"{trials} trials of Optuna, on a part of these examples, without noise"
    head = head_methods.build(method, **budget, **chosen, seed=values.seed)
    head.fit(*train[:2])
    spent = Spent(head.ledger) if values.epsilon < math.inf else provenance.not_private()
    return head, spent, searched, more


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
