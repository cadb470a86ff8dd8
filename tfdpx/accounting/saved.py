"""A ledger among the arrays that Keras saves with an optimizer, read without Keras."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from tfdpx.accounting.ledger import Ledger

# Names of the arrays, which hold JSON as bytes. Version 0.2 wrote a table in place of the ledger.
LEDGER, ADAPTED, TABLE = "ledger", "adapted", "ledger_facts"


OF_0_2 = (
    "The ledger of this file is of version 0.2, which this version does not read: load the file "
    "with tfdpx 0.2, or train the model again."
)


def read(arrays: Mapping[str, np.ndarray] | None) -> Ledger | None:
    """Returns the ledger among the arrays of a saved optimizer.

    Args:
        arrays: Dict of arrays by name, or None.

    Returns:
        `tfdpx.accounting.Ledger`; None if there is none.

    Raises:
        ValueError: If it is damaged, or of version 0.2.
    """
    if arrays is not None and LEDGER in arrays:
        return Ledger.from_json(_text(arrays[LEDGER]))
    if arrays is not None and TABLE in arrays:
        raise ValueError(OF_0_2)
    return None


def without_ledger(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a dict of the other arrays of a saved optimizer."""
    return {k: v for k, v in arrays.items() if k not in (LEDGER, ADAPTED)}


def adapted(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns digests, by name, of layers with noisy statistics that the ledger includes."""
    return json.loads(_text(arrays[ADAPTED])) if ADAPTED in arrays else {}


def _text(array):
    return np.array(array, "uint8").tobytes().decode("utf-8", "replace")
