"""Whether private examples are among the public ones, by hash.

A private example that is also used without noise has no guarantee. Two computations of the same
features may differ in their last bits, so what is hashed is rounded: a few random projections of an
example, on two grids that are half a step apart. What lies on the edge of one grid lies inside the
other, so noise of a float32's last bits hides about one example in a thousand.
"""

import numpy as np

_PROJECTIONS = 16
# A step of the grid, as a share of the longest public example.
_STEP = 1e-4


class Fingerprints:
    """The hashes of public examples.

    Args:
        rows: Array `[n, ...]` of finite numbers.
    """

    def __init__(self, rows):
        rows = _flat(rows)
        directions = np.random.default_rng(17_004)  # Any: they only have to be the same.
        self._directions = directions.standard_normal((rows.shape[1], _PROJECTIONS))
        self._step = _STEP * max(float(np.linalg.norm(rows, axis=1).max()), 1e-30)
        self._known = {digest for pair in self._digests(rows) for digest in pair}

    def count_in(self, rows):
        """Int: how many of `rows` `[n, ...]` are public examples. Rows of zeros are none."""
        rows = _flat(rows)
        rows = rows[np.isfinite(rows).all(axis=1) & np.any(rows, axis=1)]
        return sum(any(digest in self._known for digest in pair) for pair in self._digests(rows))

    def _digests(self, rows):
        places = rows @ self._directions / self._step
        grids = [np.floor(places + shift).astype("int64") for shift in (0.0, 0.5)]
        for pair in zip(*grids, strict=True):
            yield [(grid, place.tobytes()) for grid, place in enumerate(pair)]


def _flat(rows):
    rows = np.asarray(rows, "float64")
    return rows.reshape(len(rows), -1)


def refuse(count, examples):
    """Raises ValueError if `count`, of so many private `examples`, are public ones too."""
    if count:
        raise ValueError(
            f"Argument `public_data` holds {count} of the {examples} private examples: public "
            "examples are used without clipping and noise, so these would have no guarantee. Take "
            "them out of one of the two sets."
        )
