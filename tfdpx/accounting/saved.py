"""A ledger among the arrays that Keras saves with an optimizer, read without Keras."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from tfdpx.accounting.ledger import EXAMPLE, USER, Entry, Ledger

# Names of the arrays: JSON as bytes, and the two of the table of version 0.2.
LEDGER, ADAPTED, _FACTS, _STEPS = "ledger", "adapted", "ledger_facts", "ledger_steps"


def read(arrays: Mapping[str, np.ndarray] | None) -> Ledger | None:
    """Returns the ledger among the arrays of a saved optimizer.

    Args:
        arrays: Dict of arrays by name, or None.

    Returns:
        `tfdpx.accounting.Ledger`; None if there is none.

    Raises:
        ValueError: If it is damaged.
    """
    if arrays is not None and LEDGER in arrays:
        return Ledger.from_json(_text(arrays[LEDGER]))
    if arrays is not None and {_FACTS, _STEPS} <= set(arrays):
        return of_table(np.array(arrays[_FACTS]), np.array(arrays[_STEPS]))
    return None


def without_ledger(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a dict of the other arrays of a saved optimizer."""
    return {k: v for k, v in arrays.items() if k not in (LEDGER, ADAPTED, _FACTS, _STEPS)}


def adapted(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns digests, by name, of layers with noisy statistics that the ledger includes."""
    return json.loads(_text(arrays[ADAPTED])) if ADAPTED in arrays else {}


def of_table(facts: np.ndarray, steps: np.ndarray) -> Ledger:
    """Returns the ledger of version 0.2: a table with a row per entry, and flags in bits."""
    entries, unseen, marked_public = [], set(), set()
    for (run, noise, probability, sampling, *seeded), updates in zip(facts, steps, strict=True):
        if updates and noise < 0:
            (unseen if noise == -1 else marked_public).add(run)
        elif updates:
            entry = Entry(
                *(float(noise), float(probability) or None, int(updates)),
                poisson_sampled=bool(int(sampling) & 1),
                run=int(run),
                seeded=bool(seeded and seeded[0]),
                unit=USER if int(sampling) & 2 else EXAMPLE,
            )
            entries.append(entry)
    return Ledger(tuple(entries), is_complete=unseen <= marked_public)


def _text(array):
    return np.array(array, "uint8").tobytes().decode("utf-8")
