"""Keyed digests of rows, by which rows that are given more than once are found.

The key is a secret of this process. Digests stay in memory: no file holds one, or a number that was
counted by them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

_SECRET = secrets.token_bytes(16)
_CHUNK = 2**22  # Bytes that are copied at a time.


def row_digests(arrays: Sequence[Any]) -> np.ndarray:
    """Returns a digest of each row: equal rows have equal digests, others hardly ever.

    Two rows that differ collide with a probability of about 2^-62 (multilinear hashing of 32-bit
    words with random 64-bit keys, the upper half of each of two sums).

    Args:
        arrays: Arrays with the same number of rows, for example x and y.

    Returns:
        uint64 `[rows]`.
    """
    arrays = [np.asarray(array) for array in arrays]
    sums = np.zeros([len(arrays[0]), 2], "uint64")
    for place, array in enumerate(arrays):
        if array.dtype.kind not in "biufcmM":  # Texts and other objects.
            array = np.array([_digest(row) for row in array]).reshape(len(array), -1)
        row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:]))
        num_words = -(-row_bytes // 4)
        source = np.random.default_rng(list(_SECRET) + [place])
        keys = source.integers(2**64, size=[num_words, 2], dtype="uint64")
        step = max(1, _CHUNK // max(1, row_bytes))
        for start in range(0, len(array), step):
            rows = np.ascontiguousarray(array[start : start + step])
            padded = np.zeros([len(rows), 4 * num_words], "uint8")
            padded[:, :row_bytes] = rows.reshape(len(rows), -1).view("uint8")
            sums[start : start + step] += padded.view("uint32").astype("uint64") @ keys
    upper = sums >> np.uint64(32)
    return upper[:, 0] << np.uint64(32) | upper[:, 1]


def _digest(row):
    """Returns a uint64 digest of a row of texts or other objects."""
    content = repr(row.tolist() if hasattr(row, "tolist") else row).encode()
    digest = hashlib.blake2b(content, digest_size=8, key=_SECRET).digest()
    return np.frombuffer(digest, "uint64")[0]
