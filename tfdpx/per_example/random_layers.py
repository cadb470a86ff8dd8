"""Makes Keras's random layers draw from secret keys instead of their seed generators' states.

A layer draws from the states of its `keras.random.SeedGenerator`s. These states are not secret:
`keras.utils.set_random_seed` sets them, and Keras saves them. In the private step, states that are
derived from a secret key take their place (`keras.StatelessScope`). Keras's states are then neither
read, nor advanced, nor saved. With states from a key, the masks of rows (for example, of dropout)
are independent and identically distributed, so the order of rows changes no distribution
(`docs/proofs/private_step.md`).

The function of one example may draw random numbers. Vectorization turns such a draw into one draw
for all examples (see `vectorizing_by`), and each example gets its part.
"""

import contextlib

import keras
import tensorflow as tf

from tfdpx._arguments import first_names
from tfdpx._keras import layer_internals
from tfdpx._keras.tensorflow_internals import mark_states

# Keras takes the two numbers of a state modulo this.
_WORDS = 2**31 - 2

# The remedy for layers that keep statistics of a batch, for the errors about them.
BATCH_NORM_REMEDY = (
    "(BatchNormalization: `tfdpx.layers.replace_batch_norm(model)`; in the code of a class, write "
    "`tfdpx.layers.GroupNorm(16)`), or keep pre-trained statistics: set `trainable = False` on "
    "each BatchNormalization layer (`training=False` in the call is not enough)."
)


class UnmappedState(ValueError):
    """Raised if a layer adds a loss, or changes a variable other than a seed generator's state."""


def seeds(key, shape):
    """Returns independent, uniformly distributed states for seed generators, derived from `key`.

    Args:
        key: int64 tensor [2].
        shape: Sequence of ints and scalar int tensors, the number of states along each axis.

    Returns:
        int64 tensor [*shape, 2].
    """
    is_empty, shape = isinstance(shape[-1], int) and shape[-1] == 0, tf.stack([*shape, 2])
    if is_empty:  # Without a draw, nothing in the graph depends on the key.
        return tf.zeros(shape, tf.int64)
    return tf.random.stateless_uniform(
        shape, key, minval=0, maxval=_WORDS, dtype=tf.int64, alg="philox"
    )


@contextlib.contextmanager
def drawing_from_key(layer, key):
    """Returns a context manager that sets all seed generators in a layer to states from `key`.

    Seed generators of sublayers are set, too.

    Args:
        layer: `keras.Layer`.
        key: int64 tensor [2].

    Raises:
        UnmappedState: If code in the context assigned a value to any other variable. This value
            would be lost.
    """
    count = len(layer_internals.seed_generators(layer))
    with starting_from(layer, seeds(key, [count]) if count else None):
        yield


@contextlib.contextmanager
def starting_from(layer, states):
    """Returns a context manager that starts all seed generators in a layer from `states`.

    Seed generators of sublayers start from these states, too.

    Args:
        layer: `keras.Layer`.
        states: int64 tensor [generators, 2]. It is not read if there are no generators.

    Raises:
        UnmappedState: If code in the context assigned a value to any other variable. This value
            would be lost.
    """
    generators = layer_internals.seed_generators(layer)
    graph = tf.compat.v1.get_default_graph()
    mapping = state_mapping(generators, states)
    with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
        yield
    if scope.losses:
        names = layer_internals.adding_losses(layer)
        layer_internals.clear_added_losses(layer)
        raise UnmappedState(
            f"These layers call `add_loss`: {names}. Such a loss is not known by example. Put one "
            "on weights into a `kernel_regularizer`; of one on data, let the layer return the loss "
            "of each example, make it an output of the model, and give that output the loss "
            "`lambda y_true, y_pred: y_pred`."
        )
    check_assigned(scope, [g.state for g in generators], f"Layer '{layer.name}'", layer)
    for generator in generators:
        # In a loop, every round would begin with the same state.
        if getattr(scope.get_current_value(generator.state), "graph", graph) is not graph:
            owners = [
                part.name
                for part in layer_internals.flatten_layers(layer)
                if any(
                    generator is part_generator
                    for part_generator in layer_internals.seed_generators(part)
                )
            ]
            raise UnmappedState(
                f"Layer '{owners[-1]}' draws random numbers within a loop or a branch of "
                "TensorFlow's, where they would repeat in every round. Draw before the loop or the "
                "branch, for all of its rounds."
            )


def state_mapping(generators, states):
    """Returns a list of pairs: the state variable of each seed generator, and its new value.

    Args:
        generators: List of `keras.random.SeedGenerator`.
        states: int64 tensor [generators, 2].
    """
    if not generators:
        return []
    states = tf.unstack(mark_states(states), num=len(generators))
    return [(g.state, tf.cast(s, g.state.dtype)) for g, s in zip(generators, states, strict=True)]


def check_assigned(scope, allowed, name, layer=None):
    """Raises UnmappedState if code in a scope assigned to a variable that is not in `allowed`.

    Keras drops such an assignment at the end of the scope, and the graph does not show it.

    Args:
        scope: `keras.StatelessScope` that has ended.
        allowed: List of the `keras.Variable`s that may be assigned to.
        name: Str, the name of the code in the scope, which the message shows.
        layer: Optional `keras.Layer`. The message names the variables of this layer.
    """
    allowed_ids = {id(variable) for variable in allowed}
    unmapped_ids = [i for i in scope.state_mapping if i not in allowed_ids]
    if not unmapped_ids:
        return
    variables = (
        [] if layer is None else [*layer.variables, *getattr(layer, "metrics_variables", ())]
    )
    paths = {id(v): v.path for v in variables}
    if not any(i in paths for i in unmapped_ids):
        raise UnmappedState(
            f"{name} draws from Keras's global seed generator, or changes state: a variable that "
            "is not its own, where random numbers must be secret. Give random layers an attribute "
            "`seed_generator = keras.random.SeedGenerator()` and draw from that."
        )
    names = sorted(paths[i] for i in unmapped_ids if i in paths)
    raise UnmappedState(
        f"{name} changes state in training: {first_names(names)}. This state would hold data "
        f"without noise. Replace layers that keep statistics of a batch {BATCH_NORM_REMEDY}"
    )
