"""Image files of any folder: which there are, which can be read, and their pixels in 8 bits."""

import concurrent.futures
import dataclasses
import os
import pathlib

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from rich import console, progress

from tfdpx.train.errors import UserError

# In any case; what Pillow reads without a plugin.
SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".bmp", ".gif", ".pgm", ".ppm", ".tif", ".tiff", ".webp"),
)  # fmt: skip
# Of cameras and telephones; what Pillow reads with a plugin at most.
UNREAD = (".heic", ".heif", ".hif", ".avif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw")
NO_READER = "which has no reader, so convert it to JPEG"
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")
_GRAY_MODES = ("1", "L", "LA", "La", "I;16", "I;16B", "I;16L")
_ALPHA_MODES = ("RGBA", "RGBa", "LA", "La", "PA")
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # Of EXIF, which cameras write.


@dataclasses.dataclass(frozen=True)
class Readable:
    """An image file that can be read to its end.

    Attributes:
        file: `pathlib.Path`.
        size: `(height, width)` in pixels, upright.
        is_gray: Bool, whether it is stored without colours.
    """

    file: pathlib.Path
    size: tuple
    is_gray: bool


def find(folder):
    """The files under a folder that are images by their names, and those that are not.

    Hidden files and folders are passed over. Links to folders are followed.

    Args:
        folder: `pathlib.Path`.

    Returns:
        Two sorted lists of `pathlib.Path`.

    Raises:
        UserError: If a folder cannot be listed.
    """
    images, others, seen = [], [], set()
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        there = os.path.realpath(parent)
        folders[:] = [] if there in seen else [name for name in folders if is_shown(name)]
        if there in seen:  # A link that leads back.
            continue
        seen.add(there)
        for name in filter(is_shown, names):
            kind = images if name.lower().endswith(SUFFIXES) else others
            kind.append(pathlib.Path(parent, name))
    return sorted(images), sorted(others)


def is_shown(name):
    """Whether a file or folder of that name is one of the user's own."""
    return not name.startswith(".") and name != "__MACOSX"


def check(files, folder, named, skip_broken=False):
    """Reads each file to its end, and says which are images.

    Args:
        files: List of `pathlib.Path`.
        folder: `pathlib.Path`, relative to which an error names them.
        named: What an error calls them all, such as "--images=PATH".
        skip_broken: Bool, whether files that cannot be read are no error.

    Returns:
        List of `Readable`, and a dict from each broken file to what is wrong with it.

    Raises:
        UserError: If there are broken ones: it names all.
    """
    screen = console.Console(stderr=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        looks = progress.track(
            threads.map(_look, files),
            "Checking images",
            len(files),
            console=screen,
            transient=True,
            disable=not screen.is_terminal,
        )
        found = list(zip(files, looks, strict=True))
    broken = {file: why for file, why in found if isinstance(why, str)}
    if broken and not skip_broken:
        each = [f"{printable(f.relative_to(folder))} ({why})" for f, why in broken.items()]
        raise UserError(
            f"{len(broken)} of {len(files)} images of {named} cannot be read: {'; '.join(each)}. "
            "Repair or remove them, or add --skip_broken to leave them out."
        )
    return [good for _, good in found if not isinstance(good, str)], broken


def printable(path):
    """A path as text that can be printed anywhere: what cannot be is written as an escape."""
    text = str(path)
    # Persian, Indic scripts and emoji join or part letters by these two.
    shown = text.replace("\u200c", "").replace("\u200d", "")
    return text if shown.isprintable() else ascii(text)[1:-1]


def eight_bits(image, channels):
    """An image upright and in 8 bits, whatever the file has: on white where it is transparent.

    Args:
        image: `PIL.Image.Image`.
        channels: 1 for gray, 3 for colours.

    Returns:
        `PIL.Image.Image`.

    Raises:
        ValueError: If its pixels have more than 16 bits, of which it is not known what is white.
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


def _look(file):
    """A `Readable`, or what is wrong with the file."""
    try:
        with Image.open(file) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                width, height = height, width
            is_gray = image.mode in _GRAY_MODES
            image.draft(None, (1, 1))  # A JPEG is read whole, but decoded to an eighth.
            eight_bits(image, 3)
    except UnidentifiedImageError:
        return _unidentified(file)
    # Of broken files Pillow raises nearly anything: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        return f"{error}" or type(error).__name__
    return Readable(file, (height, width), is_gray)


def _unidentified(file):
    """What is wrong with a file that Pillow does not know."""
    with file.open("rb") as opened:
        start = opened.read(12)
    # Telephones send such images under the names of JPEG files.
    is_heic = start[4:8] == b"ftyp" and start[8:] in _HEIC_BRANDS
    if is_heic or file.name.lower().endswith(UNREAD):
        return f"is of format {'HEIC' if is_heic else file.suffix}, {NO_READER}"
    return "is no image" if start else "is empty"


def _refuse(error):
    raise UserError(f"Cannot list the folder {error.filename}: {error.strerror}.") from error
