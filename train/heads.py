"""Fits private heads, `classify --head=NAME`, on features of images that are kept in a folder.

Features are written to `--workdir` in shards. An interrupted extraction resumes after the last
shard. The shards are private data, and are reused only for the same backbone and the same images.
Each head is written to a new folder in it, for example `head-001`. Publish only that folder.
"""

import dataclasses
import hashlib
import math
import pathlib
import secrets

import keras
import numpy as np

from tfdpx import _files as files
from tfdpx import _resumable as resumable
from tfdpx import heads
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.record import Record
from tfdpx.report import measure, report
from tfdpx.train.data import identity, images, inputs, tfds
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.resume import digest
from tfdpx.train.run_flags import DATA_DIR, DOWNLOAD
from tfdpx.train.settings import check_threshold
from tfdpx.train.start_from import Start, not_private, without_paths, without_secrets

SHARD = 4096
_ABOUT, KEY = "features.json", "features.key"

# Arguments besides the budget. Learning rates and alpha were chosen on other samples of the mixture
# in docs/heads.md; the numbers of steps are from the paper.
_KINDS = {
    "least_squares": (heads.LeastSquares, {"alpha": 1.0}),
    "newton": (heads.Newton, {"steps": 10, "learning_rate": 0.1}),
    "feature_covariance": (heads.FeatureCovariance, {"steps": 10, "learning_rate": 8.0}),
    "first_order": (heads.FirstOrder, {"steps": 100, "learning_rate": 0.1}),
    "adamix": (heads.AdaMix, {}),
}


def run(settings, workdir):
    """Extracts missing features, fits the head, and writes its files.

    Args:
        settings: `settings.Settings` with `head`.
        workdir: `pathlib.Path` of the folder of features.

    Returns:
        The report, a dict.
    """
    build(settings, num_classes=2)  # Refuses invalid arguments before any image is read.
    features = FeatureFolder.of(settings, workdir)
    check_threshold(settings.threshold, features.class_names)
    x, y = features.arrays("train")
    public = ()
    if settings.head == "adamix":
        if settings.shots is None:
            public = features.arrays("public")
        else:
            with checking_flags():
                parts = images.public_split(y, settings.shots, settings.seed or 0)
            public, (x, y) = ((x[part], y[part]) for part in parts)
    head = build(settings, features.num_classes)
    with checking_flags():
        head.fit(x, y, **({"public_data": public} if public else {}))
    ledger = head.ledger if head.epsilon != math.inf else not_private()
    chosen = {"method": settings.head, "shots": settings.shots, **_head_arguments(settings)}
    num_public = len(public[1]) if public else 0
    return save(features, head, ledger, len(y), chosen, None, num_public, settings.threshold)


def save(features, head, ledger, num_examples, chosen, searched=None, num_public=0, threshold=0.5):
    """Measures a head, writes it with its record into a new folder, and returns the report.

    Args:
        features: `FeatureFolder`.
        head: The fitted head.
        ledger: `Ledger` of the head and of all fits that were made to choose it.
        num_examples: Int, the number of examples that `ledger` covers.
        chosen: Dict with the method, its arguments, and the scores of a search.
        searched: Optional string, the way arguments were chosen on these examples.
        num_public: Int, number of examples without a guarantee.
        threshold: Float, see `measure.predicted_classes`.
    """
    x, y = features.arrays("test")
    measured = measure.Measured(
        *(y, head.predict(x), features.class_names, threshold),
        is_public=tfds.is_known(features.record.data.name),
    )
    before, folder, model = features.before, features.new_head(), None
    if features.extractor is not None:
        logits = head.to_layer("logits")(features.extractor.output)
        model = keras.Model(features.extractor.inputs, logits)
    record = report.write(
        folder,
        program="classify",
        data=dataclasses.replace(features.record.data, num_examples=num_examples),
        ledger=before + ledger,
        model=model,
        measured=measured,
        examples=features.data and features.data.eval_examples,
        delta=head.delta,
        accountant="pld" if before.steps else head.accountant,
        seen=features.record.seen,
        searched=searched,
        inputs=features.record.inputs,
        settings={
            **features.record.settings,
            **{name: value for name, value in chosen.items() if name != "method"},
            "head": chosen["method"],
            "epsilon": head.epsilon,
            "delta": head.delta,
        },
        results={
            **chosen,
            "dimension": x.shape[1],
            "num_public": num_public or None,
            "left_out": features.record.settings.get("left_out"),
            "noise_multiplier": head.noise_multiplier,
            "steps": getattr(head, "steps", None),
            "releases": head.num_releases,
        },
    )
    with files.replacing(folder / "weights.npz", mode=0o644) as fresh:
        np.savez(fresh, kernel=head.kernel, bias=head.bias)
    return {**record.view(), "workdir": str(folder)}


def build(settings, num_classes):
    """Builds the head of `tfdpx.heads` that the settings name, without fitting it.

    Args:
        settings: `settings.Settings` with `head`.
        num_classes: Int.

    Raises:
        UserError: If an argument is invalid, or belongs to another head.
    """
    kind, usual = _KINDS[settings.head]
    taken = {field.name for field in dataclasses.fields(kind)}
    arguments = _head_arguments(settings)
    if foreign := [name for name in arguments if name not in taken]:
        raise UserError(
            f"The flags {', '.join('--' + name for name in foreign)} do not go with "
            f"--head={settings.head}: leave them out."
        )
    if "epsilon" not in arguments and not ({"noise_multiplier", "steps"} & set(arguments)):
        raise UserError("Flag --head needs --epsilon; inf is without privacy.")
    if path := arguments.pop("initial_weights", None):
        try:
            arguments["initial_weights"] = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot read --initial_weights={path}: {error}.") from error
    with checking_flags():
        return kind(num_classes, seed=settings.seed, **{**usual, **arguments})


def _head_arguments(settings):
    """Returns the arguments of the head that the settings have, a dict."""
    names = {field.name for kind, _ in _KINDS.values() for field in dataclasses.fields(kind)}
    names = (names & {field.name for field in dataclasses.fields(settings)}) - {"seed"}
    values = {name: getattr(settings, name) for name in sorted(names)}
    return {name: value for name, value in values.items() if value is not None}


class FeatureFolder:
    """A folder with shards `<split>-00000.npz` of features and labels, and their record.

    The `Record` is in `features.json`. Its epsilon is infinite, because features of private
    examples are not private. Its `seen` has the earlier trainings of the backbone.

    Args:
        path: Folder.
        record: Optional `Record` of an extraction. A folder with another record is refused.

    Attributes:
        path: `pathlib.Path`.
        record: `Record`.
        extractor: `keras.Model` for the extraction; None if this process only reads.
        data: `images.ImageData` to extract from, or None.

    Raises:
        UserError: If the folder has other features, or none while `record` is None.
    """

    def __init__(self, path, record=None):
        self.path, self.extractor, self.data = pathlib.Path(path), None, None
        about = self.path / _ABOUT
        if about.exists():
            with checking_flags():
                self.record = records.read(about)
                if record is not None:
                    resumable.check_same(
                        _origin(self.record),
                        _origin(record),
                        f"The folder {path} holds features made",
                        "Choose another folder.",
                    )
        elif record is None:
            raise UserError(
                f"The folder {path} holds no features: make them with --dataset=NAME and "
                "--init_from=MODEL.keras."
            )
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            files.write(self.path / KEY, secrets.token_bytes(32))
            self.record = record
            record.save(about)

    @classmethod
    def of(cls, settings, workdir):
        """Opens the folder `workdir`, and extracts the features that the settings name.

        Args:
            settings: `settings.Settings` with `head`; without `dataset` the folder must have all
                features.
            workdir: `pathlib.Path`.

        Raises:
            UserError: If the backbone was trained on these data without an account, or a file is of
                another kind.
        """
        if settings.dataset is None:
            usual = {field.name: field.default for field in dataclasses.fields(settings)}
            names = [name for name in _OF_FEATURES if getattr(settings, name) != usual[name]]
            if names:
                raise UserError(
                    f"The features in {workdir} are made already: --{names[0]} needs --dataset."
                )
            return cls(workdir)
        start = Start(settings, settings.pixels)
        start.ledger_on(settings.dataset)
        data = _load(settings, settings.dataset, start.image_shape)
        public = _public(settings, data) if settings.public_dataset else None
        print(*data.notes, *start.notes, sep="\n", end="\n" * bool(data.notes or start.notes))
        folder = cls(workdir, _extraction(settings, start, data))
        folder.extractor, folder.data = start.extractor(data.image_shape, data.largest_grey), data
        folder.extract("train", data.train_x, data.train_y)
        folder.extract("test", data.eval_x, data.eval_y)
        if public:
            folder.extract("public", *public)
        return folder

    @property
    def num_classes(self):
        """The number of classes, an int."""
        return self.record.settings["num_classes"]

    @property
    def class_names(self):
        """The names of the classes, a tuple of strings; numbers if they are unknown."""
        names = (self.record.inputs or {}).get("class_names")
        return tuple(names or map(str, range(self.num_classes)))

    @property
    def before(self):
        """The `Ledger` of the backbone's training on the same data."""
        same = (
            training.ledger for training in self.record.seen if training.data == self.record.data
        )
        return sum(same, Ledger())

    def arrays(self, split):
        """Returns the features `[n, d]` and labels `[n]` in all shards of a split."""
        shards = [np.load(path) for path in sorted(self.path.glob(f"{split}-*.npz"))]
        if not shards:
            raise UserError(f"The folder {self.path} holds no features of the split {split!r}.")
        return tuple(
            np.concatenate([shard[name] for shard in shards]) for name in ("features", "labels")
        )

    def extract(self, split, x, y):
        """Writes the missing shards of a split. Each is written completely or not at all.

        Args:
            split: "train", "test" or "public".
            x: uint8 images `[n, height, width, channels]`.
            y: Integer labels `[n]`.

        Raises:
            UserError: If a shard is of other images or labels, because the data have changed since.
        """
        count = math.ceil(len(x) / SHARD)
        for index in range(count):
            part = slice(index * SHARD, (index + 1) * SHARD)
            path, seal = self._shard(split, index), self._seal(x[part], y[part])
            if path.exists():
                with np.load(path) as shard:
                    self._check(bytes(shard["seal"]) == seal, split)
                continue
            features = self.extractor.predict(x[part], verbose=0).astype("float32")
            with files.replacing(path) as fresh:
                np.savez(fresh, features=features, labels=y[part], seal=np.frombuffer(seal, "u1"))
            print(f"{split}: {min(part.stop, len(x))} of {len(x)}", flush=True)
        self._check(not self._shard(split, count).exists(), split)

    def new_head(self):
        """Returns the path of a new folder for a head."""
        number = 1 + sum(1 for _ in self.path.glob("head-*"))
        while True:
            head = self.path / f"head-{number:03}"
            try:
                head.mkdir()
                return head
            except FileExistsError:
                number += 1

    def _shard(self, split, index):
        return self.path / f"{split}-{index:05}.npz"

    def _seal(self, x, y):
        """Returns a digest of examples under a key of the folder, so that it reveals nothing."""
        key = (self.path / KEY).read_bytes()
        content = np.ascontiguousarray(x).tobytes() + np.asarray(y, "int64").tobytes()
        return hashlib.blake2b(content, key=key, digest_size=16).digest()

    def _check(self, is_same, split):
        if not is_same:
            raise UserError(
                f"The folder {self.path} holds features of other {split} images or labels: the "
                "data set has changed since. Choose another folder."
            )


def _load(settings, dataset, takes):
    data = images.load(
        dataset,
        DATA_DIR.value,
        download=DOWNLOAD.value,
        image_size=settings.image_size,
        center_crop=settings.center_crop,
        test_fraction=settings.test_fraction,
        test_seed=settings.test_seed,
        skip_broken=settings.skip_broken,
        takes=takes,
    )
    if data.train_y is None or data.eval_y is None:
        raise UserError(f"The images must fit in memory. Received: --dataset={dataset}.")
    return data


def _public(settings, data):
    """Returns all images and labels of `--public_dataset`."""
    pairs = (settings.dataset, settings.public_dataset), (settings.public_dataset, settings.dataset)
    if any(identity.overlap(identity.of(one), other) for one, other in pairs):
        raise UserError(
            "Flag --public_dataset must name other images than --dataset, because public ones are "
            "used without clipping and noise. Received: "
            f"--public_dataset={settings.public_dataset}, --dataset={settings.dataset}."
        )
    plain = dataclasses.replace(settings, test_fraction=None, test_seed=0)
    public = _load(plain, settings.public_dataset, data.image_shape)
    if public.class_names != data.class_names:
        raise UserError(
            "The public images must be of the same classes. Received: "
            f"--public_dataset={settings.public_dataset} with {', '.join(public.class_names)}, for "
            f"{', '.join(data.class_names)}."
        )
    return (
        np.concatenate([public.train_x, public.eval_x]),
        np.concatenate([public.train_y, public.eval_y]),
    )


def _extraction(settings, start, data):
    """Returns the `Record` of features; trainings on the same data get the same `DatasetId`."""
    mine = identity.of(settings.dataset)
    trainings = tuple(
        dataclasses.replace(training, data=mine)
        if identity.overlap(training.data, settings.dataset)
        else training
        for training in start.seen
    )
    recorded = without_secrets(start.settings)
    return Record(
        program="classify",
        data=mine,
        ledger=not_private(),
        delta=None,
        seen=trainings,
        inputs=inputs.of(data),
        settings={
            **{name: recorded[name] for name in _OF_FEATURES if recorded[name]},
            "backbone": without_paths(start.settings.init_from) or "scatter",
            "backbone_digest": [digest(path) for path in start.files],
            "num_classes": data.num_classes,
            "left_out": data.left_out or None,
        },
    )


_OF_FEATURES = (
    "dataset init_from init_data pixels image_size center_crop test_fraction test_seed skip_broken "
    "public_dataset"
).split()


def _origin(record):
    return {"identifier": record.data.identifier, **record.settings}
