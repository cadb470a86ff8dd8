"""Public and private parts of a training set, and public images of another domain."""

import numpy as np


def split(labels, shots, seed):
    """Indices of public and of private examples, two int arrays.

    Args:
        labels: Integers `[n]`.
        shots: Int, public examples of each class.
        seed: Int.

    Raises:
        ValueError: If a class has no more than `shots` examples.
    """
    labels, rng = np.asarray(labels), np.random.default_rng([seed, 17])
    order = rng.permutation(len(labels))
    public = []
    for label in np.unique(labels):
        own = order[labels[order] == label]
        if len(own) <= shots:
            raise ValueError(
                f"Argument `shots` must leave private examples of each class. Received: "
                f"shots={shots}, and class {label} has {len(own)} examples."
            )
        public.extend(own[:shots])
    public = np.sort(np.array(public, int))
    return public, np.setdiff1d(np.arange(len(labels)), public)


def shifted(images, kind, largest=255):
    """Images of another domain, of the same shape and dtype.

    Args:
        images: uint8 `[n, side, side, channels]`.
        kind: "none"; "rotated", by a quarter turn; "inverted", light for dark.
        largest: Number, the largest grey level of the file format: that of the images is private.
    """
    if kind == "rotated":
        return np.rot90(images, axes=(1, 2))
    if kind == "inverted":
        return (largest - images).astype(images.dtype)
    return images


SHIFTS = ("none", "rotated", "inverted")
