"""From columns to numbers around zero, by statistics that a part of the budget pays for.

A column of numbers is centred and scaled by a private mean and variance, or by its public range
where there are too few rows for these. A column of texts is one-hot over its frequent values.
"""

import math

import keras
import numpy as np
import tensorflow as tf
from keras import ops

import tfdpx
from tfdpx.accounting.ledger import Ledger
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.tables.reading import BOOLEAN, CATEGORY, NUMBER

# Of the squared mu of Gaussian differential privacy, which adds up: releases get this share.
_SHARE = 0.1
_LARGEST = 4.0  # Numbers are clipped to so many deviations.
# Where noise would move the mean of a column by more than this part of its range, it is not taken.
_WORTH = 0.05
# Ranges are found from bins of powers of two, of which the fullest should stand out.
_FULLEST = 1 / 3
_BINS = 123
_BATCH_SIZE = 1024  # Of predictions.


class Preprocessing:
    """The layers before a model of a table.

    Guarantee: `ledger` is what their statistics cost. Names and kinds of columns, the number of
    rows and `ranges` are public.

    Args:
        kinds: Dict from columns to kinds.
        ranges: Dict from columns, or "*", to pairs of floats.
        num_rows: Int, of the rows to train on.
        epsilon: Float, of the run.
        delta: Float, of the run.

    Raises:
        UserError: If there are too few rows for ranges that nobody knows.
    """

    def __init__(self, kinds, ranges, num_rows, epsilon, delta):
        numbers = [name for name, kind in kinds.items() if kind == NUMBER]
        other = ranges.get("*")
        ranges = {name: ranges.get(name, other) for name in numbers}
        ranges |= {name: (0.0, 1.0) for name, kind in kinds.items() if kind == BOOLEAN}
        self._found = [name for name, limits in ranges.items() if limits is None]
        self._known = {name: limits for name, limits in ranges.items() if limits is not None}
        self._texts = [name for name, kind in kinds.items() if kind == CATEGORY]
        with checking_flags():
            whole = tfdpx.PrivacyPlan(
                num_rows, num_rows, 1, epsilon=epsilon, delta=delta, accountant="gdp"
            )
        count = 2 * bool(self._found) + len(self._texts)
        noise = whole.noise_multiplier * math.sqrt((count + 1) / _SHARE)
        moved = noise * math.sqrt(1.25 * len(self._known)) / num_rows
        self._takes_moments = bool(self._known) and moved < 2 * _WORTH
        count += self._takes_moments
        self.noise_multiplier = whole.noise_multiplier * math.sqrt(count / _SHARE)
        columns = len(self._found)
        deviation = self.noise_multiplier * math.sqrt(columns)
        needed = deviation * math.sqrt(2 * math.log(10 * _BINS * max(columns, 1)))
        if columns and needed > _FULLEST * num_rows:
            raise UserError(
                f"{num_rows} rows are too few to find the ranges of {columns} columns at "
                f"--epsilon={epsilon:g}, which takes some {math.ceil(needed / _FULLEST)}. Give "
                f"what is publicly known: --bounds={self._found[0]}:LOWER:UPPER,... or "
                "--bounds=*:LOWER:UPPER."
            )

    def adapt(self, columns, seed=None):
        """Makes the layers; reads the rows to train on.

        Args:
            columns: Dict from a name to an array `[rows]`.
            seed: Optional int, for experiments alone.

        Returns:
            A `keras.Model` from a dict of `[rows, 1]` to `[rows, features]`, and the
            `tfdpx.accounting.Ledger` of what its statistics cost.
        """
        ledger, inputs, parts = Ledger(), {}, []
        common = dict(noise_multiplier=self.noise_multiplier, seed=seed)
        for i, name in enumerate(columns):
            kind = "string" if name in self._texts else "float32"
            inputs[name] = keras.Input((1,), dtype=kind, name=f"column_{i}")
        for names in (self._found, list(self._known)):
            if not names:
                continue
            lower = upper = None
            layer = keras.layers.Normalization()
            x = np.stack([columns[name] for name in names], axis=1)
            if names != self._found:
                lower, upper = np.array([self._known[name] for name in names]).T
            if lower is None or self._takes_moments:
                ledger += tfdpx.private_adapt(layer, x, lower=lower, upper=upper, **common)
            else:
                middle, half = (lower + upper) / 2, (upper - lower) / 2
                layer = keras.layers.Normalization(
                    mean=middle.tolist(), variance=(half**2).tolist()
                )
            joined = [inputs[name] for name in names]
            z = layer(ops.concatenate(joined, axis=-1))
            z = ops.where(ops.isnan(z), 0.0, z)
            parts.append(ops.clip(z, -_LARGEST, _LARGEST))
        for name in self._texts:
            layer = keras.layers.StringLookup(output_mode="one_hot")
            ledger += tfdpx.private_adapt(layer, columns[name], **common)
            parts.append(layer(inputs[name]))
        features = ops.concatenate(parts, axis=-1)
        # A model of its own, for columns may be called as layers are.
        inner = keras.Model(list(inputs.values()), features, name="tfdpx.preprocessing")
        named = {
            input_name(name): keras.Input((1,), dtype=each.dtype, name=input_name(name))
            for name, each in inputs.items()
        }
        return keras.Model(named, inner(list(named.values()))), ledger


def input_name(column):
    """What the input of a model is called for a column: Keras's names have no slash."""
    return column.replace("/", "_")


def as_inputs(columns):
    """Columns as a model takes them, a dict of tensors `[rows, 1]`.

    Args:
        columns: Dict from a name to an array `[rows]`.
    """
    largest = np.finfo("float32").max
    found = {}
    for name, values in columns.items():
        if values.dtype.kind != "U":  # Infinity is one of float32 too, and is clipped in the model.
            values = np.clip(values, -largest, largest).astype("float32")
        found[input_name(name)] = tf.constant(values[:, np.newaxis])
    return found


def predict(model, columns):
    """What a model says of columns, float32 `[rows, outputs]`."""
    return model.predict(as_inputs(columns), batch_size=_BATCH_SIZE, verbose=0)
