"""Runs `classify --head=NAME`, which fits a private head on features of images."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

from tfdpx.report import measure, report
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples
from tfdpx.train import start_from
from tfdpx.train.data import identity, images, tfds
from tfdpx.train.data.folder import NONE
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.objects import HEADS, without_folders
from tfdpx.train.settings import DATA_DIR, DOWNLOAD
from tfdpx.train.start_from import Start, inputs_of, ledger_on, not_private, without_secrets

# A batch of images has at most this many values, for example 55 photos of 224 x 224 x 3.
_MOST_VALUES = 2**23


def run(settings, workdir):
    """Computes features, fits the head, and writes the files of the run.

    Args:
        settings: `settings.Settings` with `head`.
        workdir: `pathlib.Path` of the folder to write to.

    Returns:
        The report, a dict.
    """
    head = build(settings, num_classes=2)  # Refuses invalid arguments before any image is read.
    features = Features(settings, getattr(head, "public_dataset", None))
    start_from.check_threshold(settings.threshold, features.data.class_names)
    (x, y), public = features.train, features.public
    if getattr(head, "shots", None):
        with checking_flags():
            parts = images.public_split(y, head.shots, settings.seed or 0)
        public, (x, y) = ((x[part], y[part]) for part in parts)
    head = build(settings, features.data.num_classes)
    with checking_flags():
        head.fit(x, y, **({"public_data": public} if public else {}))
    ledger = head.ledger if head.epsilon != math.inf else not_private()
    results = {"num_public": len(public[1]) if public else None}
    return save(features, head, ledger, len(y), workdir, results)


def build(settings, num_classes):
    """Returns the head of `tfdpx.heads` that the settings name, not yet fitted.

    Args:
        settings: `settings.Settings` with `head`.
        num_classes: Int, the number of classes of the images.

    Raises:
        UserError: If an argument is invalid, or a flag belongs to another head.
    """
    name, _, _ = HEADS.read(settings.head)
    accepted = {field.name for field in dataclasses.fields(HEADS.constructor(name))}
    values = {flag: getattr(settings, flag) for flag in HEADS.by_flags if hasattr(settings, flag)}
    values = {flag: value for flag, value in values.items() if value is not None}
    if foreign := [f"--{flag}" for flag in values if flag not in accepted]:
        raise UserError(
            f"The flags {', '.join(foreign)} do not go with --head={name}: leave them out."
        )
    if settings.right_guesses:  # For full batches, as in heads, this limit determines epsilon.
        values["epsilon"] = settings.budget
    if "epsilon" not in values and not ({"noise_multiplier", "steps"} & set(values)):
        raise UserError(
            "Flag --head needs --epsilon or --right_guesses. With --epsilon=inf nothing is private."
        )
    return HEADS.make(settings.head, num_classes=num_classes, **values)


class Features:
    """The features of the images of `--dataset`. Images are read batch by batch.

    Args:
        settings: `settings.Settings` with `head`.
        public_dataset: Optional string, public images of the same classes.

    Attributes:
        settings: The settings, in which `init_from` is the path of a file.
        data: `images.ImageData`.
        before: `Ledger` of the backbone's earlier trainings on the same images.
        seen: Tuple of `UpstreamTraining`, all earlier trainings of the backbone on any data.
        extractor: `keras.Model` from images to features `[batch, d]`.
        train, test, public: Pairs of features, float32 `[n, d]`, and labels `[n]`; `public` is None
            without `public_dataset`.

    Raises:
        UserError: If the backbone was trained on these images without a record of the privacy loss,
            or `init_from` is not a file of a model.
    """

    def __init__(self, settings, public_dataset=None):
        if settings.dataset is None:
            raise UserError("Flag --head needs --dataset, the images to fit the head on.")
        start = Start(settings)
        self.settings, self.seen = start.settings, start.seen
        self.before = ledger_on(start.seen, settings.dataset)
        data = self.data = _load(settings, start.image_shape)
        extra = public_dataset and _public(settings, public_dataset, data)
        for note in (*data.notes, *start.notes):
            print(note)
        self.extractor = start.extractor(data.image_shape, data.largest_grey)
        self.train = computed(self.extractor, data.train_x, data.train_y)
        self.test = computed(self.extractor, *data.eval_examples)
        self.public = None
        if extra:
            pairs = (extra.train_x, extra.train_y), extra.eval_examples
            parts = zip(*(computed(self.extractor, *pair) for pair in pairs), strict=True)
            self.public = tuple(map(np.concatenate, parts))


def computed(extractor, *examples):
    """Returns the outputs of a model, float32 `[n, ...]`, and the labels of the examples `[n]`.

    Args:
        extractor: `keras.Model`.
        *examples: Arguments of `tfdpx.sampling.examples.as_examples`. The examples are read batch
            by batch, so they may be larger than memory.
    """
    # With this signature one trace serves batches of any size. `predict` would trace twice.
    spec = tf.TensorSpec([None, *extractor.input_shape[1:]], extractor.inputs[0].dtype)
    compute = tf.function(extractor, input_signature=[spec], autograph=False)
    source, rows = as_examples(*examples), 0
    size = max(1, min(measure.BATCH_SIZE, _MOST_VALUES // math.prod(extractor.input_shape[1:])))
    features = np.empty([source.count, *extractor.output_shape[1:]], "float32")
    labels = np.empty([source.count], "int64")
    for x, y, _ in sampled_batches.in_order(source, size):
        part = slice(rows, rows := rows + len(x))
        features[part] = compute(x)
        labels[part] = np.reshape(y, [-1])
    return features, labels


def save(features, head, ledger, num_examples, workdir, results, searched=None):
    """Measures a head, writes its model and its record, and returns the report.

    Args:
        features: `Features`.
        head: The fitted head.
        ledger: `Ledger` of the head and of all fits that were made to choose it.
        num_examples: Int, the number of examples that `ledger` covers.
        workdir: `pathlib.Path`.
        results: Dict of further results for the record.
        searched: Optional string, the trials on the same examples from which the head's arguments
            were chosen, for example "30 trials".
    """
    settings, data = features.settings, features.data
    x, y = features.test
    about = (data.class_names, settings.threshold)
    is_public = tfds.is_known(data.name)
    measured = measure.Measured(y, head.predict(x), *about, is_public=is_public)
    logits = head.to_layer("logits")(features.extractor.output)
    record = report.write(
        workdir,
        program="classify",
        data=dataclasses.replace(identity.of(settings.dataset), num_examples=num_examples),
        ledger=features.before + ledger,
        model=keras.Model(features.extractor.inputs, logits),
        measured=measured,
        examples=data.eval_examples,
        delta=head.delta,
        accountant="pld" if features.before.steps else head.accountant,
        seen=features.seen,
        initialized=True,  # Earlier trainings, if any, are in `seen`.
        searched=searched,
        inputs=inputs_of(data),
        settings={**without_secrets(settings), "epsilon": head.epsilon, "delta": head.delta},
        results={
            "method": without_folders(settings.head),
            "dimension": x.shape[1],
            "left_out": data.left_out or None,
            "noise_multiplier": head.noise_multiplier,
            "steps": getattr(head, "steps", None),
            "releases": head.num_releases,
            **results,
        },
    )
    return {**record.view(), "workdir": str(workdir)}


def _load(settings, takes):
    """Loads the data set without decoding its images, as each image is needed only once."""
    return images.load_for(settings, DATA_DIR.value, DOWNLOAD.value, takes, in_memory=0)


def _public(settings, public_dataset, data):
    """Loads `public_dataset`. Raises UserError unless it holds other images of the same classes."""
    pairs = (settings.dataset, public_dataset), (public_dataset, settings.dataset)
    if any(identity.overlap(identity.of(one), other) for one, other in pairs):
        raise UserError(
            "Argument public_dataset of --head must name other images than --dataset, because "
            "public images get no clipping and no noise. Received: "
            f"public_dataset={public_dataset}, --dataset={settings.dataset}."
        )
    usual = dict(user=NONE, test_fraction=None, test_seed=0, image_size=None)
    plain = dataclasses.replace(settings, dataset=public_dataset, **usual)
    public = _load(plain, data.image_shape)
    if public.class_names != data.class_names:
        raise UserError(
            "The public images must be of the same classes. Received: "
            f"public_dataset={public_dataset} with {', '.join(public.class_names)}, for "
            f"{', '.join(data.class_names)}."
        )
    return public
