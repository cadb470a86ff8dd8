"""Folders of images as users have them, from the digits that scikit-learn bundles."""

import numpy as np
import sklearn.datasets
from PIL import Image


def write(folder, counts, size=16):
    """Writes `PATH/CLASS/NAME.png`, gray images of `size` pixels.

    Args:
        folder: `pathlib.Path`.
        counts: Dict from a digit to its number of images, for example `{3: 20, 5: 20}`.
        size: Int.
    """
    bunch = sklearn.datasets.load_digits()
    for digit, count in counts.items():
        (folder / f"{digit}").mkdir(parents=True)
        for row in np.flatnonzero(bunch.target == digit)[:count]:
            image = Image.fromarray((bunch.images[row] * 15).astype("uint8"))
            image.resize((size, size)).save(folder / f"{digit}" / f"{row}.png")


def make_messy(folder):
    """Makes the folder of `write` messy, with oddities that a run must accept silently."""
    kinds = iter(
        [
            ("RGB", "photo one.JPG"), ("RGBA", "größe.png"), ("LA", "b.png"), ("P", "c.gif"),
            ("I;16", "d.png"), ("CMYK", "e.jpeg"), ("RGB", "f.webp"), ("1", "g.bmp"),
            ("L", "h.TIFF"),
        ]
    )  # fmt: skip
    classes = sorted(path for path in folder.iterdir())
    for index, (mode, name) in enumerate(kinds):
        first = min(classes[index % len(classes)].glob("*.png"))
        image = Image.open(first).resize((11 + index, 19))
        image = (
            Image.fromarray(np.asarray(image).astype("uint16") * 257)
            if mode == "I;16"
            else image.convert("L" if mode == "LA" else "RGB").convert(mode)
        )
        image.save(first.with_name(name))
        first.unlink()
    classes[0].joinpath("deeper").mkdir()
    first = min(classes[0].glob("*.png"))
    first.rename(classes[0] / "deeper" / "nested.PNG")
    (classes[1] / "notes.txt").write_text("not an image")
    (folder / ".DS_Store").write_bytes(b"\0")
    (classes[1] / "._hidden.png").write_bytes(b"\0")
    (folder / "empty").mkdir()


def break_two(folder):
    """Adds a truncated JPEG and a text file with the suffix of a PNG; returns their names."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and any(path.iterdir()))
    cut = classes[0] / "cut off.jpg"
    Image.effect_noise((64, 64), 80).save(cut, quality=95)
    cut.write_bytes(cut.read_bytes()[:900])
    (classes[1] / "text.png").write_text("no image")
    return cut.name, "text.png"
