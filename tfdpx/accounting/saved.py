"""Reads the ledger that Keras has saved with an optimizer, without importing Keras.

Some arrays of a saved optimizer hold JSON as bytes. One of these arrays holds the ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from tfdpx.accounting.ledger import Ledger

# The names of these arrays. tfdpx 0.2 wrote a table instead of the ledger.
LEDGER, ADAPTED, TABLE = "ledger", "adapted", "ledger_facts"


OF_0_2 = (
    "The ledger of this file is of version 0.2, which this version does not read: load the file "
    "with tfdpx 0.2, or train the model again."
)


def read(arrays: Mapping[str, np.ndarray] | None) -> Ledger | None:
    """Returns the ledger among the arrays of a saved optimizer.

    Args:
        arrays: Dict from names to the arrays of the optimizer, or None.

    Returns:
        `tfdpx.accounting.Ledger`; None if no array holds a ledger.

    Raises:
        ValueError: If the ledger is damaged, or was written by tfdpx 0.2.
    """
    if arrays is not None and LEDGER in arrays:
        return Ledger.from_json(_text(arrays[LEDGER]))
    if arrays is not None and TABLE in arrays:
        raise ValueError(OF_0_2)
    return None


def without_ledger(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns a dict of a saved optimizer's arrays, without those of `read` and `adapted`."""
    return {k: v for k, v in arrays.items() if k not in (LEDGER, ADAPTED)}


def adapted(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Returns a dict from the layers that `private_adapt` changed to digests of their statistics.

    The keys are names of layers. The cost of the noisy statistics is in the ledger.

    Args:
        arrays: Dict from names to the arrays of a saved optimizer.
    """
    return json.loads(_text(arrays[ADAPTED])) if ADAPTED in arrays else {}


def _text(array):
    return np.array(array, "uint8").tobytes().decode("utf-8", "replace")
