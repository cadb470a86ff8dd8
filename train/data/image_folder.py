"""A folder of one's own images: its classes, its test images, and the size to read them at.

What is chosen from the files, the size and whether there are colours, counts as public, like the
number of training images and the names of the classes. Which image is a test image depends on its
own name and the number of others, so that one image more or less moves one other at most.
"""

import hashlib
import os
import pathlib
import statistics

import numpy as np

from tfdpx.sampling.users import numbered
from tfdpx.train.data import image_files
from tfdpx.train.data.builders import Features
from tfdpx.train.data.datasets import FOLDER
from tfdpx.train.data.people import People
from tfdpx.train.errors import UserError, checking_flags

TEST_FRACTION = 0.2
# The sides that are chosen. Larger images have more features than memory, where there are many.
_LEAST_SIDE, _LARGEST_SIDE, _LARGEST_SIDE_OF_MANY, _MANY = 8, 64, 32, 5_000
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "validation", "valid", "val")
_SHOWN = 5  # Names in a note.


class ImageFolder:
    """The images of `PATH/CLASS/...`, or of `PATH/train/CLASS/...` and `PATH/test/CLASS/...`.

    Args:
        path: `pathlib.Path`.
        image_size: Int, height and width to read images at; None chooses them.
        test_fraction: Float in [0, 1), the part of each class to test on; None: a fifth. Not where
            the folder has test images.
        test_seed: Int. Another one makes other images test images.
        skip_broken: Bool. Whether files that cannot be read are left out, not refused.
        takes: `(height, width, channels)` of the images that a model takes; None where any.
        user: What says whose each image is, see `people.People`; None: each is for itself.

    Attributes:
        features: `builders.Features`, with the size to read images at.
        notes: List of strings, what was found and chosen, for people.
        left_out: Int, broken files that were left out.

    Raises:
        UserError: If the folder does not hold images of at least two classes, or broken ones.
    """

    def __init__(
        self,
        path,
        image_size=None,
        test_fraction=None,
        test_seed=0,
        skip_broken=False,
        takes=(None, None, None),
        user=None,
    ):
        self._path = path
        if not path.is_dir():
            kind = "is no folder" if path.exists() else "does not exist"
            raise UserError(
                f"Cannot read --dataset={FOLDER}:{path}: it {kind}. Name a folder that holds a "
                "folder of images for each class."
            )
        train, test = _parts(path)
        people = user and People(user, train, classes=1)
        if test and test_fraction is not None:
            raise UserError(
                f"The folder --dataset={FOLDER}:{path} has test images in {test.name}: leave out "
                f"--test_fraction. Received: --test_fraction={test_fraction:g}."
            )
        fraction = TEST_FRACTION if test_fraction is None else test_fraction
        splits = {"train": _by_class(train)} | ({"test": _by_class(test)} if test else {})
        files = [file for found in splits.values() for each in found.values() for file in each]
        readable, broken = image_files.check(files, path, f"--dataset={FOLDER}:{path}", skip_broken)
        self.left_out = len(broken)
        folders = sorted(splits["train"])
        splits = {split: _without(broken, found) for split, found in splits.items()}
        passed_over = list(self._passed_over(set(files) - set(broken), broken, folders, splits))
        names = self._class_names(splits, passed_over)
        self.features = Features((), _shape(readable, image_size, takes), names)
        if not test and people:
            splits = people.part(splits["train"], fraction, test_seed)
        elif not test:
            splits = _part(splits["train"], fraction, test_seed, path)
        self._splits = {
            split: Files(
                [(file, label) for label, name in enumerate(names) for file in found.get(name, ())]
            )
            for split, found in splits.items()
        }
        of = "all, of other people" if people else "each class"
        how = f"{fraction:g} of {of}, --test_fraction; which, --test_seed={test_seed}"
        chosen = "chosen from the files; --image_size changes it"
        if takes[0] or takes[1]:
            chosen = "what --init_from takes"
        height, width, channels = self.features.shape
        self.notes = [
            f"{path}: {len(readable)} images of {len(names)} classes.",
            f"To train on: {len(self._splits['train'])}. To test on: {len(self._splits['test'])} "
            f"({f'those in {test.name}' if test else how}).",
            f"Read as {height}x{width} pixels, {'gray' if channels == 1 else 'in colour'} "
            f"({'--image_size' if image_size else chosen}).",
            f"Public, so not protected: how many {'people' if people else 'images'} there are to "
            "train on, the names of the classes, size and colours.",
            *passed_over,
        ]
        if people:
            self._splits["train"].tell_people(people.of)
            count = len(set(self._splits["train"].people))
            self.notes.insert(2, f"People to train on, by --user={user}: {count}.")

    def records(self, split):
        """The `Files` of a split.

        Args:
            split: "train" or "test".

        Raises:
            UserError: If there is no image in it.
        """
        if not len(self._splits[split]):
            raise UserError(
                f"There is no image to {split} on in --dataset={FOLDER}:{self._path}. Add images, "
                "change --test_fraction, or hold out a part by --validation."
            )
        return self._splits[split]

    def _class_names(self, splits, passed_over):
        names = tuple(sorted(splits["train"]))
        if len(names) < 2:
            raise UserError(
                f"--dataset={FOLDER}:PATH needs images of at least two classes, as PATH/CLASS/NAME "
                f"with a suffix of {', '.join(image_files.SUFFIXES)}, or as PATH/train/CLASS/NAME "
                f"and PATH/test/CLASS/NAME. Received: PATH={self._path}, with classes: "
                f"{', '.join(names) or 'none'}.{''.join(f' {note}' for note in passed_over)}"
            )
        if unknown := sorted(set(splits.get("test", ())) - set(names)):
            raise UserError(
                f"The test images of --dataset={FOLDER}:{self._path} have classes without images "
                f"to train on: {', '.join(unknown)}. Remove them, or add such images."
            )
        return names

    def _passed_over(self, used, broken, folders, splits):
        """Notes on what is in the folder and not among the images."""
        images, others = image_files.find(self._path)
        unread = [file for file in others if file.name.lower().endswith(image_files.UNREAD)]
        formats = sorted({file.suffix.lower() for file in unread})
        loose = [file for file in images if file not in used and file not in broken]
        kinds = {
            "broken, so left out": sorted(broken),
            "in no folder of a class": loose,
            f"of format {', '.join(formats)}, {image_files.NO_READER}": unread,
            "no image by its name": [file for file in others if file not in set(unread)],
            "class without an image": [
                self._path / name for name in folders if name not in splits["train"]
            ],
        }
        for kind, files in kinds.items():
            if files:
                some = [image_files.printable(f.relative_to(self._path)) for f in files[:_SHOWN]]
                more = ", ..." if len(files) > _SHOWN else ""
                yield f"Not used, {kind}: {len(files)} ({', '.join(some)}{more})."


class Files:
    """Images of a split, a file each: the records that `image_sources.Images` reads.

    Args:
        pairs: List of a `pathlib.Path` and an int, the class.
    """

    people = None  # Whose each is.

    def __init__(self, pairs):
        self.pairs = pairs

    def tell_people(self, person_of):
        """Says whose each image is, by a function of a file."""
        self.people = np.array([person_of(file) for file, _ in self.pairs], object)
        with checking_flags():
            numbered(self.people, len(self))  # Refuses ids that are spelled alike.

    def __len__(self):
        return len(self.pairs)

    def __getitems__(self, rows):
        return [(file.read_bytes(), label) for file, label in (self.pairs[row] for row in rows)]

    def labels(self):
        """int64 array, without reading an image."""
        return np.array([label for _, label in self.pairs])

    def name(self, row):
        """What to call an example."""
        return str(self.pairs[row][0])


def _parts(path):
    """The folders of the training and of the test images; the latter None if there is none."""
    folders = {folder.name.lower(): folder for folder in _folders(path)}
    train = next((folders[name] for name in _TRAIN if name in folders), None)
    test = next((folders[name] for name in _TEST if name in folders), None)
    # Not where `train` is a class, of pictures of trains.
    if train and test and _folders(train) and _folders(test):
        return train, test
    if train and len(folders) == 1 and _folders(train):
        return train, None
    return path, None


def _folders(path):
    return [
        child for child in path.iterdir() if child.is_dir() and image_files.is_shown(child.name)
    ]


def _by_class(path):
    """Dict from the name of a class to its files, at any depth."""
    return {image_files.printable(f.name): image_files.find(f)[0] for f in _folders(path)}


def _without(broken, found):
    """`found` without broken files, and without classes of no file."""
    kept = {name: [f for f in files if f not in broken] for name, files in found.items()}
    return {name: files for name, files in kept.items() if files}


def _shape(readable, image_size, takes):
    """`(height, width, channels)` to read images at."""
    height, width, channels = takes
    channels = channels or (1 if all(each.is_gray for each in readable) else 3)
    if height or width:
        return (height or width, width or height, channels)
    if image_size:
        return (image_size, image_size, channels)
    sizes = {each.size for each in readable}
    most = _LARGEST_SIDE if len(readable) <= _MANY else _LARGEST_SIDE_OF_MANY
    if len(sizes) == 1 and max(next(iter(sizes))) <= most:
        return (*sizes.pop(), channels)
    side = round(statistics.median(min(each.size) for each in readable))
    side = min(max(side, _LEAST_SIDE), most)
    return (side, side, channels)


def _part(found, fraction, seed, path):
    """The two splits of `found`, each a dict as that, by a hash of the files' names.

    Of a class of one image none is tested on, of any other at least one, if `fraction` is not 0.
    """

    def key(file):
        name = os.fsencode(pathlib.PurePosixPath(file.relative_to(path)))
        return hashlib.blake2b(name, salt=seed.to_bytes(16, "little")).digest()

    train, test = {}, {}
    for name, files in found.items():
        count = min(max(round(fraction * len(files)), fraction > 0), len(files) - 1)
        ordered = sorted(files, key=key)
        test[name], train[name] = ordered[:count], sorted(ordered[count:])
    return {"train": train, "test": test}
