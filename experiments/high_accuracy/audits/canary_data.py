"""What the audited models train on: a small data set D, and the targets that D' may add.

The guarantee is for the worst data, so these are free to choose (appendix A.2 of De et al. 2022).
"""

import numpy as np

from tfdpx.train.config.errors import UserError

# Images that are taken for another class, as in Table 7: (class, label).
_WRONG = ((7, 8), (6, 7), (0, 1))
TARGETS = ("blank", "noise", *(f"{digit}_as_{label}" for digit, label in _WRONG))
# LeNet's least height and width.
_LEAST = 12


def prepared(images):
    """Bytes [n, height, width, channels] as float32 in [0, 1], with a border to LeNet's size."""
    short = [max(0, _LEAST - size) for size in images.shape[1:3]]
    border = [(size // 2, size - size // 2) for size in short]
    return np.pad(images.astype("float32") / 255, [(0, 0), *border, (0, 0)])


def data_set(data, count):
    """D: `count` training images and labels, the same each time.

    Args:
        data: `tfdpx.train.data.loading.ImageData` in memory.
        count: Int.

    Returns:
        Pair of float32 [count, height, width, channels] and int64 [count].

    Raises:
        UserError: If there are fewer images.
    """
    if not 0 < count <= len(data.train_y):
        raise UserError(
            f"Flag --num_examples must be from 1 to the {len(data.train_y)} training images. "
            f"Received: {count}."
        )
    rows = np.random.default_rng(0).permutation(len(data.train_y))[:count]
    return prepared(data.train_x[rows]), data.train_y[rows].astype("int64")


def target(data, name):
    """A target: an image [1, height, width, channels] and its label [1].

    Args:
        data: `tfdpx.train.data.loading.ImageData` in memory.
        name: One of `TARGETS`.

    Raises:
        UserError: If there is no such target, or no such digit.
    """
    if name not in TARGETS:
        raise UserError(f"A target is one of {', '.join(TARGETS)}. Received: {name}.")
    images = prepared(data.eval_x[:1])
    if name == "blank":
        return np.zeros_like(images), np.zeros([1], "int64")
    if name == "noise":
        drawn = np.random.default_rng(0).uniform(size=images.shape)
        return drawn.astype("float32"), np.zeros([1], "int64")
    digit, label = (int(part) for part in name.split("_as_"))
    rows = np.flatnonzero(data.eval_y == digit)
    if not len(rows):
        raise UserError(f"Target {name} needs a test image of class {digit}, and there is none.")
    return prepared(data.eval_x[rows[:1]]), np.full([1], label, "int64")
