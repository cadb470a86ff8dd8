"""Invalid values of an example make its gradient not finite, where TensorFlow would end the run.

An index beyond its table, an assertion that fails: TensorFlow stops with an error, on CPUs at
least, and so tells that such an example was drawn. Here the operation gets a valid value in place
of the invalid one, and the example's gradient is NaN: it contributes zero and is counted, as is
every example whose gradient is not finite.

`tfdpx.independence.raising` finds what is neither made safe here nor safe by itself.
"""

import contextlib

import tensorflow as tf

from tfdpx import tensorflow_internals

# The names of operations that were made safe contain it.
SCOPE = "invalid_as_nan"


class Conditions:
    """What must hold for an example that is computed alone, on pain of a gradient of NaN.

    Args:
        graph: The `tf.Graph` in which the example is computed; None where many are.
    """

    def __init__(self, graph=None):
        self._graph = graph
        self._conditions = []

    def add(self, condition):
        """Whether a bool tensor of any shape can be asked for: those of inner graphs cannot."""
        if not self._graph or getattr(condition, "graph", None) is not self._graph:
            return False
        self._conditions.append(condition)
        return True

    def factor(self):
        """Float32 scalar, 1 where all hold and NaN elsewhere: to multiply the loss with."""
        held = [_holds(condition) for condition in self._conditions]
        return tf.where(tf.reduce_all(tf.stack(held)), 1.0, float("nan")) if held else 1.0


def _holds(condition):
    # Keras's lookups assert that `tf.where` finds nothing, whose length no vectorization can have.
    found = [condition.op.type, condition.op]
    for kind in ("Size", "Where"):
        found = [*found[:-1], found[-1].inputs[0].op.type, found[-1].inputs[0].op]
        if found[-2] != kind:
            return tf.reduce_all(condition)
    nothing = found[0] == "Equal" and tf.get_static_value(condition.op.inputs[1]) == 0
    return ~tf.reduce_any(found[-1].inputs[0]) if nothing else tf.reduce_all(condition)
