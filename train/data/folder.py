"""Reads folders of images, one folder for each class, and checks that the images can be read.

These facts count as public: the size and the colours of the images, which are chosen from the
files; the names of the classes; and the numbers of training and test images. A hash decides whether
an image is for training or for testing. It is the hash of the image's bytes or, with `user`, of the
person's name. So adding or removing an image moves no other image between training and test.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import io
import os
import pathlib
import re
import shlex
import statistics

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from rich import console, progress

from tfdpx.sampling.users import numbered, spelling
from tfdpx.train.data.tfds import FOLDER, Records, Source
from tfdpx.train.errors import UserError, checking_flags, printable

# File suffixes, in upper or lower case. Pillow reads these formats without a plugin (HEIC needs
# one).
SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"),
)  # fmt: skip
_GRAY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L")
_ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
# The EXIF tag of a camera's orientation, and its values for images that must be turned by 90
# degrees.
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)

# Limits for the height and width in pixels. With more than `_MANY` images the upper limit is lower,
# or their features would not fit in memory.
_LEAST_SIDE, _LARGEST_SIDE, _LARGEST_SIDE_OF_MANY, _MANY = 8, 64, 32, 5_000
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "validation", "valid", "val")
_SHOWN = 5  # The largest number of names in a note.
_MOST_NAMES = 20  # The largest number of paths in an error.

# Values of --user that are not regular expressions. "none" states that each person has one image.
PARENT_FOLDER, NONE = "parent_folder", "none"
# Matches CLASS/PERSON/NAME. In deeper paths it is unclear which folder is named after the person.
_IN_A_FOLDER = r"^[^/]+/([^/]+)/[^/]+$"
# Expressions that match file names up to the first separator, or up to the last one. They contain
# no `$`, which `make train ARGS=...` would drop.
_PREFIXES = (r"([^-_. /]+)[-_. ][^/]*\.[^./]*\Z", r"([^/]+)[-_. ][^-_. /]*\.[^./]*\Z")


@dataclasses.dataclass(frozen=True)
class Readable:
    """An image file that can be read to its end.

    Attributes:
        file: `pathlib.Path`.
        size: `(height, width)` in pixels, after turning the image upright.
        is_gray: Bool, whether the image is stored without colours.
        digest: Bytes, a hash of the file's bytes.
    """

    file: pathlib.Path
    size: tuple
    is_gray: bool
    digest: bytes


def find(folder):
    """Returns two lists of the files under a folder: files with the suffix of an image, and others.

    Skips hidden files and folders. Follows links to folders.

    Args:
        folder: `pathlib.Path`.

    Returns:
        Two sorted lists of `pathlib.Path`.

    Raises:
        UserError: If a folder cannot be listed.
    """
    images, other_files, visited = [], [], set()
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        target = os.path.realpath(parent)
        if target in visited:  # A link to a folder above.
            folders.clear()
            continue
        visited.add(target)
        folders[:] = sorted(filter(_is_shown, folders))
        for name in filter(_is_shown, names):
            kind = images if name.lower().endswith(SUFFIXES) else other_files
            kind.append(pathlib.Path(parent, name))
    return sorted(images), sorted(other_files)


def check(files, folder, named, skip_broken=False):
    """Reads each file to its end, and separates readable files from broken ones.

    Args:
        files: List of `pathlib.Path`.
        folder: `pathlib.Path`; errors name the files relative to it.
        named: String that names the files in an error, for example "--images=PATH".
        skip_broken: Bool, whether files that cannot be read are left out, without an error.

    Returns:
        List of `Readable`, and a dict from each broken file to the reason, a string.

    Raises:
        UserError: If files are broken and `skip_broken` is False. The error names all of them.
    """
    screen = console.Console(stderr=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        about = threads.map(_look, files), "Checking images", len(files)
        shown = dict(console=screen, transient=True, disable=not screen.is_terminal)
        looks = dict(zip(files, progress.track(*about, **shown), strict=True))
    broken = {file: look for file, look in looks.items() if isinstance(look, str)}
    if broken and not skip_broken:
        names = [f"{printable(f.relative_to(folder))} ({why})" for f, why in broken.items()]
        raise UserError(
            f"{len(broken)} of {len(files)} images of {named} cannot be read: {'; '.join(names)}. "
            "Repair or remove them, or add --skip_broken to leave them out."
        )
    return [look for look in looks.values() if isinstance(look, Readable)], broken


def eight_bits(image, channels):
    """Turns an image upright and converts it to 8 bits. Transparent pixels become white.

    Args:
        image: `PIL.Image.Image`.
        channels: 1 for gray, 3 for colours.

    Returns:
        A `PIL.Image.Image`.

    Raises:
        ValueError: If pixels have more than 16 bits. For such pixels the value of white is unknown.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype("uint8"))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}): save it with 8 or 16")
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def read(path, validation=0.0, test_fraction=None, test_seed=0, skip_broken=False, user=None):
    """Finds the images of `PATH/CLASS/...`, or of `PATH/train/CLASS/...` and `PATH/test/CLASS/...`.

    Args:
        path: `pathlib.Path`.
        validation: Float in [0, 1), the share of the training images (or people) to hold out.
        test_fraction: Float in [0, 1), the share of all images (or people) to test on; None means a
            fifth. Must be None if the folder has test images. A hash selects the images, so the
            shares are reached only approximately.
        test_seed: Int in [0, 2**63), the key of the hash that selects the held-out and the test
            images.
        skip_broken: Bool. If True, files that cannot be read are left out. If False, they are an
            error.
        user: String, the way to find the person of an image, see `people_of`. With the string
            "none", or with None, single images are protected instead of people. None also raises an
            error if several images seem to be of one person.

    Returns:
        `tfds.Source`. All images get the same shape, which is chosen from the files.

    Raises:
        UserError: If the folder has fewer than two classes, broken images, or a class without
            training images; or if `user` is None and several images seem to be of one person.
    """
    flag = f"--dataset={FOLDER}:{path}"
    train_folder, test_folder = _parts(existing(path))
    if test_folder and test_fraction is not None:
        raise UserError(
            f"The folder {flag} has test images in {test_folder.name}: leave out "
            f"--test_fraction. Received: --test_fraction={test_fraction:g}."
        )
    if validation >= 1:
        raise UserError(
            f"Flag --validation must be a fraction for {flag}, because each image is held out "
            f"independently. Received: --validation={validation:g}."
        )
    files, other_files = find(path)
    train, test = _in_classes(files, train_folder), _in_classes(files, test_folder)
    loose = [file for file in files if file not in train and file not in test]
    readable, broken = check([*train, *test], path, flag, skip_broken)
    for file in broken:
        (train if file in train else test).pop(file)
    names = tuple(sorted({*train.values(), *test.values()}))
    empty = [f for f in _folders(train_folder) if printable(f.name) not in names]
    passed_over = [
        f"Not used, {kind}: {len(unused)} ({_listed(unused, path, _SHOWN)})."
        for kind, unused in {
            "broken, so left out": broken,
            "in no folder of a class": loose,
            "no image by its name (convert HEIC and other formats to JPEG)": other_files,
            "class without an image": empty,
        }.items()
        if unused
    ]
    if len(names) < 2:
        raise UserError(
            f"--dataset={FOLDER}:PATH needs images of at least two classes, as PATH/CLASS/NAME "
            f"with a suffix of {', '.join(SUFFIXES)}, or as PATH/train/CLASS/NAME and "
            f"PATH/test/CLASS/NAME. Received: PATH={path}, with classes: "
            f"{' '.join([', '.join(names) or 'none', *passed_over])}"
        )
    if user is None:
        _refuse_several(list(train), train_folder, len(names))
    people = people_of(list(train), train_folder, user) if user not in (None, NONE) else {}
    # All images of a person, and all copies of an image, are in the same split.
    units = {image.file: people.get(image.file, image.digest) for image in readable}
    tested = 0.0 if test_folder else 0.2 if test_fraction is None else test_fraction
    held_out = tested + (1 - tested) * validation
    splits = {"train": {}, "validation": {}, "test": test}
    for file, name in train.items():
        share = place(units[file], test_seed)
        split = "test" if share < tested else "validation" if share < held_out else "train"
        splits[split][file] = name
    train, held, test = splits.values()
    if alone := sorted(set(names) - set(train.values())):
        raise UserError(
            f"There is no image of class {alone[0]} to train on in {flag}. Add some, or "
            "give another --test_seed or a smaller --test_fraction or --validation. Received: "
            f"--test_seed={test_seed}."
        )

    images_of = collections.Counter(people[file] for file in train if people)

    def records(split):
        paths = list(splits[split])
        labels = np.array([names.index(name) for name in splits[split].values()], int)
        return Records(
            len(paths),
            lambda rows: [(paths[row].read_bytes(), labels[row]) for row in rows],
            labels,
            [file.relative_to(path).as_posix() for file in paths],
            # Only training needs the people. The paths in the folder `test` may have no person.
            np.array([people[f] for f in paths], object) if people and split == "train" else None,
        )

    unit = "people" if people else "images"
    where = f"--test_fraction: about {tested:g} of the {unit}, by --test_seed={test_seed}"
    where = f"those in {test_folder.name}" if test_folder else where
    untested = sorted(set(names) - set(test.values())) if test else ()
    notes = [
        f"{path}: {len(readable)} images of {len(names)} classes.",
        f"To train on: {len(train)}. {f'Held out: {len(held)}. ' if validation else ''}To test "
        f"on: {len(test)} ({where}).",
        *(
            f"People to train on, by --user={user}: {len(images_of)}, with at most {number} images "
            f"each, for example {printable(os.fsdecode(name))!r}. Check that this is a person."
            for name, number in images_of.most_common(1)
        ),
        untested and f"Classes without a test image: {', '.join(untested)}.",
        f"Public, so not protected: how many {unit} there are to train on and how many images "
        "to test on, the names of the classes, size and colours.",
        *passed_over,
    ]
    return Source(_shape(readable), names, records, tuple(filter(None, notes)), len(broken))


def place(unit, seed):
    """Returns a float in [0, 1] that decides which split gets an example.

    The number does not depend on other examples.

    Args:
        unit: Bytes: the content of an image, a row, or the name of a person.
        seed: Int in [0, 2**63), the key of the hash.
    """
    digest = hashlib.blake2b(unit, key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def people_of(files, path, user):
    """Returns a dict from each file to the name of its person, as bytes in normalized Unicode.

    Args:
        files: List of `pathlib.Path`.
        path: `pathlib.Path` of the folder that contains the folders of the classes.
        user: "parent_folder", or a regular expression. The expression is searched for in the path
            of a file relative to `path`, with "/" between folders. The person is the text that
            the group in the expression matches, or the whole match if there is no group.

    Raises:
        UserError: If `user` is not a valid expression, if it finds no person in a path, if two
            names differ only in upper and lower case, or if all images are of one person.
    """
    try:
        persons = _persons(files, path, user)
    except (re.error, IndexError) as error:
        raise UserError(
            f"Flag --user must be {PARENT_FOLDER}, or a regular expression with at most one group, "
            f"which is the person; write other groups as (?:...). Received: --user={user}: {error}."
        ) from error
    if nameless := [file for file, name in persons.items() if not name]:
        as_it_is = " for images as CLASS/PERSON/NAME" if user == PARENT_FOLDER else ""
        raise UserError(
            f"Flag --user must name the person of each image. Received: --user={user}{as_it_is}, "
            f"and {len(nameless)} of {len(files)} paths do not match it: "
            f"{_listed(nameless, path, _MOST_NAMES)}."
        )
    persons = {file: os.fsencode(spelling(name)) for file, name in persons.items()}
    with checking_flags():
        numbered(np.array(list(persons.values()), object), len(persons))
    if len(set(persons.values())) == 1:
        raise UserError(
            f"Flag --user must tell people apart, for example '(MRN[0-9]+)_', where the part in "
            f"parentheses is the person. Received: --user={user}, by which all {len(files)} images "
            "are of one person."
        )
    return persons


def _persons(files, path, user):
    """Returns a dict from each file to the person that `user` finds in its path, or to None."""
    pattern = re.compile(_IN_A_FOLDER if user == PARENT_FOLDER else user)
    if pattern.groups > 1:
        raise IndexError(f"it has {pattern.groups} groups")
    matches = {file: pattern.search(file.relative_to(path).as_posix()) for file in files}
    return {file: match and match[pattern.groups] for file, match in matches.items()}


def _refuse_several(files, path, num_classes):
    """Raises UserError if several images seem to be of one person."""
    for user in (PARENT_FOLDER, *_PREFIXES):
        names = collections.Counter(filter(None, _persons(files, path, user).values()))
        shared = sum(count for count in names.values() if count > 1)
        # Names that begin alike are no sign of people if the images are only numbered, for example
        # within each class. Then there are few different beginnings.
        if len(names) > 2 * num_classes and shared > len(files) / 2:
            [(name, count)] = names.most_common(1)
            raise UserError(
                f"Several images may be of one person, such as {count} of {printable(name)!r}. "
                "Epsilon then protects only one of them: to protect people, add "
                f"--user={shlex.quote(user)}, but not with --head, which protects single images. "
                "If every person has one image, add --user=none."
            )


def existing(path):
    """Returns `path` if it is a folder.

    Raises:
        UserError: If it is not a folder.
    """
    if not path.is_dir():
        raise UserError(
            f"There is no folder {path}. Name one that holds a folder of images for each class. "
            f"Received: --dataset={FOLDER}:{path}."
        )
    return path


def _listed(files, folder, most):
    """Returns the names of the first `most` files as a text."""
    names = [printable(file.relative_to(folder)) for file in sorted(files)[:most]]
    return ", ".join(names + ["..."] * (len(files) > most))


def _is_shown(name):
    """Returns whether a file or folder is neither hidden nor made by an archiver."""
    return not name.startswith(".") and name != "__MACOSX"


def _look(file):
    """Returns a `Readable`, or a string with the reason why the file cannot be read."""
    encoded = b""
    try:
        encoded = file.read_bytes()
        with Image.open(io.BytesIO(encoded)) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                width, height = height, width
            is_gray = image.mode in _GRAY_MODES
            image.draft(None, (1, 1))  # Reads the whole JPEG, but decodes an eighth of its size.
            eight_bits(image, 3)
    except UnidentifiedImageError:
        return "is no image that can be read: convert HEIC to JPEG" if encoded else "is empty"
    # For broken files Pillow raises many types of errors: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        return f"{error}" or type(error).__name__
    return Readable(file, (height, width), is_gray, hashlib.blake2b(encoded).digest())


def _refuse(error):
    raise UserError(f"Cannot list the folder {error.filename}: {error.strerror}.") from error


def _parts(path):
    """Returns two paths: the folder of training images, and the folder of test images or None."""
    folders = {folder.name.lower(): folder for folder in _folders(path)}
    train = next((folders[name] for name in _TRAIN if name in folders), None)
    test = next((folders[name] for name in _TEST if name in folders), None)
    # If both contain folders. Otherwise `train` is a class, for example of pictures of trains.
    if train and test and _folders(train) and _folders(test):
        return train, test
    if train and len(folders) == 1 and _folders(train):
        return train, None
    return path, None


def _folders(path):
    return [child for child in path.iterdir() if child.is_dir() and _is_shown(child.name)]


def _in_classes(files, folder):
    """Returns a dict from each file in `folder` to its class, which is the name of a subfolder."""
    return {
        file: printable(file.relative_to(folder).parts[0])
        for file in files
        if folder in file.parents[1:]
    }


def _shape(readable):
    """Returns the `(height, width, channels)` to which all images are converted."""
    channels = 1 if all(image.is_gray for image in readable) else 3
    sizes = {image.size for image in readable}
    largest = _LARGEST_SIDE if len(readable) <= _MANY else _LARGEST_SIDE_OF_MANY
    if len(sizes) == 1 and max(next(iter(sizes))) <= largest:
        return (*sizes.pop(), channels)
    side = round(statistics.median(min(image.size) for image in readable))
    side = min(max(side, _LEAST_SIDE), largest)
    return (side, side, channels)
