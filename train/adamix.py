r"""Trains a private classifier of fixed features, with the help of a few public images.

    python -m tfdpx.train.adamix --dataset=folder:private --public_dataset=folder:public \
        --epsilon=1 --workdir=/tmp/adamix
    python -m tfdpx.train.adamix --dataset=digits --shots=2 --epsilon=1 --workdir=/tmp/adamix

The images of --public_dataset, of the same classes, have no guarantee. With --shots instead, so
many training images of each class are taken to be public, at random. Features are those of
`tfdpx.models.ScatterLinear`, which know no data, or of a public backbone, --init_from: one that saw
these images without an account is refused.

The working directory receives `weights.npz` (`kernel`, `bias`), `record.json`,
`privacy_statement.txt` and `report.html`, a page of these with its pictures. The last line of the
standard output is one JSON object. The comparison with other methods of docs/adamix.md is
`python -m experiments.adamix`, in a checkout.
"""

import keras
import numpy as np
from absl import app, flags

import tfdpx
from tfdpx import _files as files
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.models.transfer import PIXELS
from tfdpx.train import features
from tfdpx.train.config import run_flags
from tfdpx.train.data import identity, images
from tfdpx.train.errors import UserError, checking_flags, in_one_line
from tfdpx.train.report import page
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import finetuning, provenance, results


def define_flags(values):
    """Defines the flags in `values`, an `absl.flags.FlagValues`."""
    common = {"flag_values": values}
    flags.DEFINE_string("dataset", "digits", "As for tfdpx.train.classify.", **common)
    flags.DEFINE_string("public_dataset", None, "Public images of the same classes.", **common)
    flags.DEFINE_integer(
        "shots", None, "Training images of each class to take as public.", **common
    )
    flags.DEFINE_string(
        "init_from", None, "Public backbone, as for tfdpx.train.features.", **common
    )
    flags.DEFINE_string(
        "init_data", None, "What --init_from was trained on, where the file does not say.", **common
    )
    flags.DEFINE_enum("pixels", None, PIXELS, "As for tfdpx.train.classify.", **common)
    flags.DEFINE_float("epsilon", 1.0, "Privacy budget.", **common)
    flags.DEFINE_float("delta", 1e-5, "Delta.", **common)
    flags.DEFINE_float(
        "learning_rate", 32.0, "Fewer than 1,000 private images need less.", **common
    )
    flags.DEFINE_integer("seed", None, "Seed of split and noise; never for release.", **common)


def main(argv, values=flags.FLAGS):
    """Runs what the flags ask for; errors of the user become one line."""
    with in_one_line("tfdpx.train.adamix", argv):
        record = run(values)
    print_table(record, title="adamix")
    print(to_json(record), flush=True)


def run(values):
    """Fits the head, writes it with its record, and returns the report."""
    if run_flags.WORKDIR.value is None:
        raise UserError("Flag --workdir names the folder for results. It is not set.")
    path = values.init_from and finetuning.model_file(values.init_from)
    seen = provenance.seen_by([path] if path else [], values.init_data)
    before = provenance.on_same_data(seen, values.dataset)
    if (values.public_dataset is None) == (values.shots is None):
        raise UserError(
            "Exactly one of --public_dataset and --shots says which images are public. Received: "
            f"--public_dataset={values.public_dataset}, --shots={values.shots}."
        )
    takes, build = (None, None, None), lambda shape: None
    if path:
        takes, _, build = features.opened(path, values.pixels)
    data = load(values.dataset, takes=takes)
    public, private = _sets(values, data)
    extract = extractor(data, build(data.image_shape))
    with checking_flags():
        head = tfdpx.heads.AdaMix(
            data.num_classes,
            values.epsilon,
            values.delta,
            learning_rate=values.learning_rate,
            seed=values.seed,
        )
    workdir = run_flags.make_workdir(run_flags.WORKDIR.value)
    with checking_flags():
        head.fit(extract(private[0]), private[1], public_data=(extract(public[0]), public[1]))
    predictions = head.predict(extract(data.eval_x)).argmax(axis=1)
    record = Record(
        program="adamix",
        data=identity.of(values.dataset, len(private[1])),
        ledger=before + head.ledger,
        delta=values.delta,
        accountant="pld" if before.steps else head.accountant,
        sampling="full_batch",
        seen=seen,
        settings=_asked(values),
        results={
            "test_accuracy": float(np.mean(predictions == data.eval_y)),
            "num_examples": len(private[1]),
            "num_public": len(public[1]),
            "steps": head.steps,
            "noise_multiplier": head.noise_multiplier,
            "learning_rate": head.learning_rate,
        },
    )
    record.save(workdir / records.FILE)  # First: there are no weights without a record.
    text = (
        f"{record.statement()}\nThe {len(public[1])} public images get no guarantee: the weights "
        "may tell all of them.\n"
    )
    files.write(workdir / page.STATEMENT, text.encode(), mode=0o644)
    with files.replacing(workdir / "weights.npz", mode=0o644) as fresh:
        np.savez(fresh, kernel=head.kernel, bias=head.bias)
    results.draw_measured(data, data.eval_y, predictions, workdir)
    page.write_page(workdir)
    return {**record.view(), "workdir": str(workdir)}


def load(dataset, **options):
    """The `ImageData` of a data set in memory.

    Args:
        dataset: String as of --dataset.
        **options: As of `images.load`.

    Raises:
        UserError: If there is no such data set, or it does not fit into memory.
    """
    data = images.load(
        dataset, run_flags.DATA_DIR.value, download=run_flags.DOWNLOAD.value, **options
    )
    if data.train_y is None or data.eval_y is None:
        raise UserError(f"The images must fit in memory. Received: --dataset={dataset}.")
    return data


def largest_grey(data):
    """The largest grey level of the file format: the largest of the images is private.

    Args:
        data: `ImageData`.
    """
    return 255 if isinstance(data.centre, tuple) else 2 * data.centre


def extractor(data, model=None):
    """Function from uint8 images to float32 features at norm one or so.

    Args:
        data: `ImageData`, of which shape and format are used.
        model: Optional `keras.Model` that does it; None for `tfdpx.models.ScatterLinear`.
    """
    scale = 1
    if model is None:
        whole = tfdpx.models.ScatterLinear(data.num_classes, data.image_shape)
        model, scale = keras.Model(whole.input, whole.layers[-1].input), largest_grey(data)

    def extract(images):
        return model.predict(images / scale if scale != 1 else images, verbose=0)

    return extract


def _asked(values):
    """The flags for a record: neither the seed nor where anything lies."""
    names = ("pixels", "shots", "epsilon", "delta", "learning_rate")
    asked = {name: values[name].value for name in names}
    for name in ("dataset", "public_dataset", "init_data"):
        asked[name] = values[name].value and identity.called(values[name].value)
    return {**asked, "init_from": provenance.without_paths(values.init_from)}


def _sets(values, data):
    """Public and private pairs of images and labels."""
    if values.shots is not None:
        with checking_flags():
            parts = images.public_split(data.train_y, values.shots, values.seed or 0)
        return tuple((data.train_x[part], data.train_y[part]) for part in parts)
    if identity.overlap(identity.of(values.dataset, len(data.train_y)), values.public_dataset):
        raise UserError(
            "Flag --public_dataset must name other images than --dataset, because public ones are "
            f"used without clipping and noise. Received: --public_dataset={values.public_dataset}, "
            f"--dataset={values.dataset}."
        )
    other = load(values.public_dataset, takes=data.image_shape)
    if other.class_names != data.class_names:
        raise UserError(
            "The public images must be of the same classes. Received: "
            f"--public_dataset={values.public_dataset} with {', '.join(other.class_names)}, for "
            f"{', '.join(data.class_names)}."
        )
    public = (
        np.concatenate([other.train_x, other.eval_x]),
        np.concatenate([other.train_y, other.eval_y]),
    )
    return public, (data.train_x, data.train_y)


if __name__ == "__main__":
    define_flags(flags.FLAGS)
    app.run(main)
