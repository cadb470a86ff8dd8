"""Finds rows that occur several times in the training data, by keyed digests of rows.

The key is a secret of this process. Digests and counts stay in memory and are never written to a
file.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdpx._warnings import warn
from tfdpx.accounting import groups

_MOST_ROWS = 100_000  # Larger data are searched in a random sample of this size.
_MOST_COMPARED = 10_000  # The number of rows to estimate the frequency of a value from.
_MOST_VALUES = 64  # The number of values of a row to estimate frequencies of.
_LARGEST_GROUP = 12  # Epsilon of larger groups is in the hundreds, and takes minutes.
_group_epsilon = functools.lru_cache(maxsize=16)(groups.group_epsilon)

_SECRET = secrets.token_bytes(16)
_CHUNK = 2**22  # The number of bytes that are copied at a time.


def row_digests(arrays: Sequence[Any]) -> np.ndarray:
    """Returns a digest of each row. Equal rows have equal digests; different rows almost never do.

    Two different rows have the same digest with a probability of about 2^-62. Each half of the
    digest is the upper half of a multilinear hash of 32-bit words with random 64-bit keys.

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


def warn_of_repeated_rows(plan: Any, arrays: Sequence[np.ndarray]) -> None:
    """Warns if more rows are equal than chance explains, and states the epsilon of equal rows.

    The warning is only for the user, because it tells numbers that are computed from private data
    without noise.

    Args:
        plan: The `PrivacyPlan` of the training, with a nonzero noise multiplier.
        arrays: Arrays with the same number of rows, inputs and targets.
    """
    is_sample = (count_rows := len(arrays[0])) > _MOST_ROWS
    if is_sample:
        is_taken = np.random.default_rng().random(count_rows) < _MOST_ROWS / count_rows
        arrays = [array[is_taken] for array in arrays]
    if (count := largest_repeat(arrays)) > 1:
        several = min(count, _LARGEST_GROUP)
        more = " or more" if is_sample or several < count else ""
        warn(
            f"{count}{more} examples are equal in `x` and `y`, which chance does not explain. If "
            "they are of one person, or are one example given several times, their epsilon "
            f"together is {_group_epsilon(plan, several):.4g}{more} at delta={plan.delta:g}, not "
            f"{plan.epsilon:.4g}. Give each example once, or protect people: `user_ids` and "
            'PrivacyPlan(unit="user", ...). Do not publish these numbers: they are of private data.'
        )


def largest_repeat(arrays: Sequence[np.ndarray]) -> int:
    """Returns the largest number of equal rows that chance does not explain, or 1.

    If the columns were independent, the probability of a row would be the product of the
    frequencies of its values. Columns depend on each other, so this function takes the square root
    of the product, as if half of the columns were copies of the rest. Two kinds of values are left
    out: NaN, and a value that equals the one before it (blank images, padded texts).

    Chance does not explain c equal rows if it accounts for less than a twentieth of all rows that
    occur at least c times.

    Args:
        arrays: Arrays with the same number of rows.
    """
    if not len(arrays[0]):  # For example, all sample weights are zero.
        return 1
    # Equal arrays count once. For example, the targets of an autoencoder are its inputs.
    arrays = [a for i, a in enumerate(arrays) if not any(np.array_equal(a, b) for b in arrays[:i])]
    tables = [array.reshape(len(array), -1) for array in arrays]
    # First the digests of only some columns are compared, which takes a fraction of the time.
    parts = [table[:, :: table.shape[1] // _MOST_VALUES + 1] for table in tables]
    _, places, counts = np.unique(row_digests(parts), return_inverse=True, return_counts=True)
    rows = np.flatnonzero(counts[places] > 1)
    if len(rows):
        digests = row_digests([table[rows] for table in tables])
        _, first, counts = np.unique(digests, return_index=True, return_counts=True)
    for count in np.unique(counts[counts > 1])[::-1]:
        row = rows[first[counts == count][0]]
        frequencies = np.concatenate([_frequencies(table, row) for table in tables])
        by_chance = len(places) * np.sqrt(np.prod(frequencies))
        # Markov's inequality bounds the number of rows that occur so often by chance.
        if len(places) * by_chance / (count - 1) < 0.05 * counts[counts >= count].sum():
            return int(count)
    return 1


def _frequencies(table, row):
    """Returns, for some values of a row, which share of all rows has the value: floats in (0, 1].

    `table` is an array [rows, columns], and `row` is the index of the row.
    """
    values = table[row]
    is_new = np.append(True, values[1:] != values[:-1])[: len(values)] & (values == values)
    places = np.flatnonzero(is_new)
    places = places[:: len(places) // _MOST_VALUES + 1]
    compared = table[:: len(table) // _MOST_COMPARED + 1, places] == values[places]
    return np.maximum(compared.sum(axis=0), 1) / len(compared)


def _digest(row):
    """Returns a uint64 digest of a row of texts or other objects."""
    content = repr(row.tolist() if hasattr(row, "tolist") else row).encode()
    digest = hashlib.blake2b(content, digest_size=8, key=_SECRET).digest()
    return np.frombuffer(digest, "uint64")[0]
