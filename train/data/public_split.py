"""Public and private parts of a training set."""

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
