"""Random layers inside a recomputed unit: the same draws again, other ones for each example."""

import contextlib

import keras
import tensorflow as tf

from tfdpx import keras_internals


class Draws:
    """The states that a layer's seed generators have as it is called; then they move on.

    Args:
        layer: The layer about to be called.
    """

    def __init__(self, layer):
        self._generators = keras_internals.seed_generators(layer)
        self._states = [generator.next() for generator in self._generators]

    @contextlib.contextmanager
    def of_example(self, index):
        """Within it, the generators start from a state of example `index`'s own, and stay put."""
        # The golden ratio spreads consecutive examples over 31 bits, whatever the state's dtype.
        offset = (tf.cast(index, "int64") + 1) * 0x9E3779B9 % 2**31
        mapping = [
            (
                g.state,
                tf.stack(
                    [tf.bitwise.bitwise_xor(state[0], tf.cast(offset, state.dtype)), state[1]]
                ),
            )
            for g, state in zip(self._generators, self._states, strict=True)
        ]
        with keras.StatelessScope(state_mapping=mapping):
            yield
