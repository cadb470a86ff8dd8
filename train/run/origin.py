"""Which data the weights in a `.keras` file have seen, and at what epsilon.

A model that saw the private data before would have a guarantee for its last training alone, and its
report would say too little. So `classify` and `pretrain` write into each file what its weights have
seen, and private training refuses to start from one that has seen its data, or does not say.
"""

import json
import zipfile

from tfdpx.train.config.errors import UserError
from tfdpx.train.data import datasets
from tfdpx.train.report.record import to_json
from tfdpx.train.run import side_by_side

# In the zip archive that a .keras file is. Keras does not read it and writes none, so a file that
# Keras has rewritten does not say what it has seen.
_ENTRY = "tfdpx_seen.jsonl"


def write(path, seen, record):
    """Says in a `.keras` file what its weights have seen.

    Args:
        path: Path of a file without such an entry.
        seen: What they had seen before, as `seen_by` gives it. If that is not known, the file is
            left without an entry, so that it says no less than the truth.
        record: Dict with the report of the run: its `dataset`, `epsilon`, `delta` and `steps`.
    """
    if seen is None:
        return
    own = {name: record.get(name) for name in ("dataset", "epsilon", "delta", "steps")}
    folder = datasets.Name.parse(own["dataset"]).path
    if folder:  # Which need not be found from where the file is read.
        own["dataset"] = f"{datasets.FOLDER}:{folder.resolve()}"
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(_ENTRY, "".join(to_json(line) + "\n" for line in [*seen, own]))


def seen_by(settings):
    """The trainings behind the weights that a run starts from, of `--init_from` or `--features`.

    Args:
        settings: A `settings.Settings`. Where a file does not say, its `init_data` does.

    Returns:
        List of dicts with `dataset` and `epsilon` at least, empty without a file; None if a file
        does not say it, nor do the settings.

    Raises:
        UserError: If what a file says is damaged.
    """
    seen = [_seen_by(path, settings.init_data) for path in files(settings)]
    return None if None in seen else [training for of_file in seen for training in of_file]


def files(settings):
    """Paths of the files that a run starts from, of `--init_from` and `--features`.

    Args:
        settings: A `settings.Settings`.
    """
    features = side_by_side.files(getattr(settings, "features", None))
    return [settings.init_from, *features] if settings.init_from else features


def _seen_by(path, init_data):
    told = None
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if _ENTRY in archive.namelist():
                told = archive.read(_ENTRY)
    if told is not None:
        try:
            seen = [json.loads(line) for line in told.decode().splitlines()]
            if not seen:
                raise ValueError("nothing")
            return [
                {**line, "dataset": str(line["dataset"]), "epsilon": float(line["epsilon"])}
                for line in seen
            ]
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"Damaged: what the file {path} says of its training data: {error!r}"
            ) from error
    return [{"dataset": init_data, "epsilon": float("inf")}] if init_data else None


def check_unseen(settings):
    """Raises UserError if the weights that a run starts from may have seen its data set.

    Args:
        settings: A `training.Training` of a private run. With `allow_seen_data` a file may have,
            if it says at what epsilon.
    """
    flag = "init_from" if settings.init_from else "features"
    for path in files(settings):
        seen = _seen_by(path, settings.init_data)
        if seen is None:
            raise UserError(
                f"The file does not say what it was trained on: --{flag}={path}. If that was none "
                "of the private data, name it with --init_data."
            )
        if settings.allow_seen_data:
            continue
        for training in repeated(seen, settings.dataset):
            raise UserError(
                f"The model of --{flag}={path} was trained on {training['dataset']} already, "
                f"at epsilon={training['epsilon']:.4g}: the epsilon of this run would not "
                f"cover that. Received: --dataset={settings.dataset}. Start from a model that "
                "has not seen it. To train the last layer first and then all, give one run "
                "--head_steps. With --allow_seen_data the run reports the sum of the epsilons."
            )


def repeated(seen, dataset):
    """Those of the trainings `seen` that cost something and may have had images of a data set.

    Args:
        seen: List as of `seen_by`.
        dataset: String as of `--dataset`.
    """
    return [each for each in seen if each["epsilon"] > 0 and _overlap(each["dataset"], dataset)]


def _overlap(one, other):
    """Whether two names, as `--dataset` takes them, may mean some of the same images."""
    one, other = datasets.Name.parse(one), datasets.Name.parse(other)
    if one.path and other.path:  # One folder may lie in the other.
        first, second = one.path.resolve(), other.path.resolve()
        return first.is_relative_to(second) or second.is_relative_to(first)
    if _images(one) != _images(other):
        return False
    if one.classes is None or other.classes is None:
        return True
    return one.classes.start < other.classes.stop and other.classes.start < one.classes.stop


def _images(name):
    """What names of the same images share; versions and sizes of a data set are no others."""
    if name.path:
        return str(name.path.resolve())
    source = name.entry.source.partition(":")[0].partition("/")[0]
    return "imagenet" if source.startswith("imagenet") else source
