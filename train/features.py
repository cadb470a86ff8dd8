r"""Extracts features of images by a trained backbone, and fits private heads to them.

    python -m tfdpx.train.features --init_from=model.keras --dataset=cifar10 --workdir=/tmp/features
    python -m tfdpx.train.features --workdir=/tmp/features --method=dp_fc --epsilon=1

The backbone is a model of `tfdpx.train.pretrain` or `classify`, which normalises its images
itself, or any other Keras image model (docs/fine_tuning.md), without its last layer. Features go
to the working directory in shards; an extraction that was interrupted resumes after the last. With
--method a head is then fitted to those of the training images and measured on the test images; a
new folder `head-001`, `head-002` ... receives it, with `weights.npz`, `record.json`,
`privacy_statement.txt`, `report.html` (all of these on a page) and, where --init_from is given,
`model.keras` (backbone and head, for `tfdpx.train.predict`): publish these alone.
The shards are private data. They are used again only for the same backbone and the same images, by
their contents. What the backbone's training has spent on the same images is added; a backbone that
saw them without an account is refused.

The last line of the standard output is one JSON object. To search a head's arguments, with or
without an account of the search, see experiments/heads in the repository.
"""

import dataclasses
import hashlib
import math
import pathlib

import keras
import numpy as np
from absl import app, flags

from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.models.transfer import PIXELS
from tfdpx.train.config import run_flags
from tfdpx.train.data import identity, images
from tfdpx.train.errors import UserError, checking_flags, in_one_line
from tfdpx.train.features_on_disk import FeatureFolder
from tfdpx.train.report import page, pictures
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import (
    finetuning,
    head_methods,
    image_input,
    interruption,
    provenance,
    results,
)
from tfdpx.train.run.keras_files import KerasFile

SHARD = 4096


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
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
    flags.DEFINE_float("delta", 1e-5, "Delta.", **common)
    flags.DEFINE_integer("seed", None, "Seed of the noise; never for release.", **common)


def main(argv, values=flags.FLAGS):
    """Runs what the flags ask for; errors of the user become one line."""
    try:
        with in_one_line("tfdpx.train.features", argv):
            record = run(values)
    except KeyboardInterrupt:
        text = "interrupted; what was written is whole. Start it again with the same command."
        interruption.end("features", text)
    print_table(record, title="features")
    print(to_json(record), flush=True)


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
    train, test = folder.arrays("train")[:2], folder.arrays("test")[:2]
    if values.method is None:
        return {"num_examples": len(train[1]), **_about(folder, test)}
    if values.epsilon is None:
        raise UserError("Flag --method needs --epsilon; inf is without privacy.")
    with checking_flags():
        head = head_methods.build(
            values.method, folder.num_classes, values.epsilon, values.delta, seed=values.seed
        )
        head.fit(*train)
    ledger = head.ledger if values.epsilon < math.inf else provenance.not_private()
    return save(folder, head, ledger, len(train[1]), test, {"method": values.method})


def opened(path, pixels=None):
    """A backbone's file: what it takes, words about it, and how to build the extractor.

    Args:
        path: String, of a `.keras` file.
        pixels: As of `keras_files.KerasFile`.

    Returns:
        `(height, width, channels)`, None where any; a list of lines; and a function of the shape of
        the images to a `keras.Model` from uint8 images to features at norm one.
    """
    model = finetuning.read(path)
    if finetuning.is_ours(model):
        return model.input_shape[1:], [], lambda shape: backbone(model)
    source = KerasFile(model, path, pixels)
    build = source.classifier
    return source.image_shape, [source.about], lambda shape: _at_norm_one(build(shape, None))


def _about(folder, test):
    found = {"dimension": test[0].shape[1]}
    if left_out := folder.record.settings.get("left_out"):
        found["left_out"] = left_out
    return found


def save(folder, head, ledger, num_examples, test, chosen, searched=None):
    """Measures a head, writes it with its record into a new folder, and returns the report.

    Args:
        folder: `FeatureFolder`.
        head: The fitted head.
        ledger: `Ledger` of the head and of all that was fitted to choose it.
        num_examples: Int, examples that `ledger` is of.
        test: Pair of features and labels.
        chosen: Dict, the method and what else the report says of the choice of arguments.
        searched: Optional string, how arguments were chosen on these examples.
    """
    predictions = head.predict(test[0]).argmax(axis=1)
    record = Record(
        program="features",
        data=dataclasses.replace(folder.record.data, num_examples=num_examples),
        ledger=folder.before + ledger,
        delta=head.delta,
        accountant="pld" if folder.before.steps else head.accountant,
        sampling="full_batch",
        seen=folder.record.seen,
        searched=searched,
        inputs=folder.record.inputs,
        settings={
            **folder.record.settings,
            "method": chosen["method"],
            "epsilon": head.epsilon,
            "delta": head.delta,
        },
        results={
            **_about(folder, test),
            **chosen,
            "test_accuracy": float(np.mean(predictions == test[1])),
            "noise_multiplier": head.noise_multiplier,
            "releases": head.num_releases,
        },
    )
    path = folder.new_head()
    record.save(path / records.FILE)  # First: no weights exist without a record.
    files.write(path / page.STATEMENT, record.statement().encode(), mode=0o644)
    with files.replacing(path / "weights.npz", mode=0o644) as fresh:
        np.savez(fresh, kernel=head.kernel, bias=head.bias)
    if folder.extractor is not None:
        logits = head.to_layer("logits")(folder.extractor.output)
        results.save_model(keras.Model(folder.extractor.inputs, logits), record, path)
    if folder.data is not None:
        results.draw_measured(folder.data, test[1], predictions, path)
    else:  # There are features alone.
        names = (record.inputs or {}).get("class_names") or range(folder.num_classes)
        pictures.confusion_matrix(test[1], predictions, names, path / page.CONFUSION)
    page.write_page(path)
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
        image_size: As of `images.load`.
        skip_broken: As of `images.load`.

    Raises:
        UserError: If the backbone saw these data without an account, or a file does not fit.
    """
    if dataset is None:
        raise UserError("Flag --dataset says whose features to extract. It is not set.")
    path = finetuning.model_file(path)
    seen = provenance.seen_by([path], init_data)
    provenance.on_same_data(seen, dataset)
    takes, about, build = opened(path, pixels)
    data = images.load(
        dataset,
        run_flags.DATA_DIR.value,
        download=run_flags.DOWNLOAD.value,
        image_size=image_size,
        skip_broken=skip_broken,
        takes=takes,
    )
    for note in (*data.notes, *about):
        print(note)
    folder = FeatureFolder(
        workdir, _extraction(path, dataset, data, seen, pixels, image_size, init_data)
    )
    folder.extractor = model = build(data.image_shape)
    folder.data = data
    for split, x, y in (("train", data.train_x, data.train_y), ("test", data.eval_x, data.eval_y)):
        if y is None:
            raise UserError(f"The images must fit in memory. Received: --dataset={dataset}.")
        for index, start in enumerate(range(0, len(x), SHARD)):
            part = slice(start, start + SHARD)
            if folder.holds(split, index, y[part], x[part]):
                continue
            folder.write(split, index, model.predict(x[part], verbose=0), y[part], x[part])
            print(f"{split}: {min(start + SHARD, len(x))} of {len(x)}", flush=True)
        # Refuses shards of more images than there are now.
        folder.holds(split, math.ceil(len(x) / SHARD), y[:0], x[:0])
    return folder


def _extraction(path, dataset, data, seen, pixels, image_size, init_data):
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
        ledger=provenance.not_private(),
        delta=None,
        seen=seen,
        inputs=image_input.of(data),
        settings={
            "backbone": provenance.without_paths(str(path)),
            "backbone_digest": digest,
            "num_classes": data.num_classes,
            **({"pixels": pixels} if pixels else {}),
            **({"image_size": image_size} if image_size else {}),
            **({"init_data": identity.called(init_data)} if init_data else {}),
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


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
