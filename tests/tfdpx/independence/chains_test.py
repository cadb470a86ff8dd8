"""Random chains of operations: whatever is proved shows no mixing on data, in any batch size."""

import hypothesis
import pytest
import tensorflow as tf
import traced
from hypothesis import strategies

from tfdpx.independence import registry

SHAPE = (2, 3)


def along(axis, x):
    if not x.shape.rank:
        raise ValueError("No axis is left.")
    return axis % len(x.shape)


def reshaped_like(x, order):
    """Merged and cut into the lengths of another order of the axes."""
    shape = tf.shape(x)
    return tf.reshape(x, tf.gather(shape, [n % len(x.shape) for n in order[: len(x.shape)]]))


def moved(x, axis):
    """The axis put first; as many axes as before."""
    axis = along(axis, x)
    return tf.transpose(x, [axis, *(a for a in range(len(x.shape)) if a != axis)])


def merged(x, axis):
    """An axis and the one behind it as one."""
    shape = tf.unstack(tf.shape(x))
    axis = min(along(axis, x), len(shape) - 2)
    if axis < 0:
        return x
    both = shape[axis] * shape[axis + 1]
    return tf.reshape(x, tf.stack([*shape[:axis], both, *shape[axis + 2 :]]))


def cut(x, axis):
    """The last axis with a new one of length 1 somewhere."""
    return tf.expand_dims(x, along(axis, x)) if len(x.shape) < 4 else x


def looped(x, axis):
    """A loop that adds a running sum along an axis."""
    return tf.while_loop(
        lambda i, y: i < 2,
        lambda i, y: (i + 1, y + tf.cumsum(x, along(axis, x))),
        (0, tf.zeros_like(x)),
    )[1]


def listed(x, axis):
    """What a list has of the parts along an axis, put together along the first."""
    del axis
    return tf.map_fn(lambda part: part * 2.0 - 1.0, x)


def paired(x, axis):
    """Products of the last two axes with themselves."""
    return tf.matmul(x, x, transpose_b=True) if len(x.shape) > 1 and axis % 2 else x


def weighed(x, axis):
    """Products of the last axis with constant weights."""
    last = x.shape[-1]
    if last is None or len(x.shape) < 2 or axis % 2:
        return x
    return tf.matmul(x, tf.ones([*([1] * (len(x.shape) - 2)), last, last]) / 3.0)


ACTIONS = {
    "add one": lambda x, a: x + 1.0,
    "argsort": lambda x, a: tf.cast(tf.argsort(x, along(a, x)), x.dtype),
    "back": lambda x, a: tf.reshape(x, [-1, *SHAPE]),
    "branch": lambda x, a: tf.where(x > 0, x, tf.reduce_min(x, along(a, x), keepdims=True)),
    "cumsum": lambda x, a: tf.cumsum(x, along(a, x)),
    "cut": cut,
    "doubled": lambda x, a: tf.concat([x, x], along(a, x)),
    "first": lambda x, a: tf.gather(x, [0], axis=along(a, x)),
    "flat": lambda x, a: tf.reshape(x, [-1]) if a % 2 else tf.reshape(x, [tf.shape(x)[0], -1]),
    "halved": lambda x, a: tf.split(tf.concat([x, -x], along(a, x)), 2, along(a, x))[a % 2],
    "in a function": lambda x, a: tf.function(tf.nn.softmax, autograph=False)(x),
    "listed": listed,
    "looped": looped,
    "merged": merged,
    "minus mean": lambda x, a: x - tf.reduce_mean(x, along(a, x), keepdims=True),
    "moved": moved,
    "paired": paired,
    "places": lambda x, a: x * tf.cast(tf.range(tf.shape(x)[-1]), x.dtype),
    "reshaped": lambda x, a: reshaped_like(x, [a, a + 1, a + 2, a + 3]),
    "reversed": lambda x, a: tf.reverse(x, [along(a, x)]),
    "rolled": lambda x, a: tf.roll(x, 1, along(a, x)),
    "softmax": lambda x, a: tf.nn.softmax(x),
    "sorted": lambda x, a: tf.sort(x, along(a, x)),
    "squeezed": lambda x, a: tf.squeeze(x, along(a, x)) if x.shape[along(a, x)] == 1 else x,
    "stacked": lambda x, a: tf.stack([x, x + 1.0], along(a, x)) if len(x.shape) < 4 else x,
    "summed": lambda x, a: tf.reduce_sum(x, along(a, x)) if len(x.shape) > 1 else x,
    "tail": lambda x, a: x[:, 1:] if len(x.shape) > 1 and a % 2 else x[..., ::-1],
    "tiled": lambda x, a: tf.tile(x, [2 if n == along(a, x) else 1 for n in range(len(x.shape))]),
    "weighed": weighed,
}
STEPS = strategies.lists(
    strategies.tuples(strategies.sampled_from(sorted(ACTIONS)), strategies.integers(0, 3)),
    min_size=1,
    max_size=7,
)


def chain(steps):
    def apply(x):
        for name, axis in steps:
            x = ACTIONS[name](x, axis)
        return x

    return apply


def falsely_proved(steps, rows=None):
    """How a chain that is proved mixes rows, a text; None if it is not proved; "" if it is, truly.

    Args:
        steps: List of pairs of a name of `ACTIONS` and an int.
        rows: Int or None, the number of rows that it is traced for.
    """
    function = chain(steps)
    if traced.reasons(function, SHAPE, rows):
        return None
    try:
        sizes = (2, 3, 5) if rows is None else (rows,)
        return traced.mixes(traced.trace(function, SHAPE, rows), SHAPE, sizes, rows is None) or ""
    except tf.errors.InvalidArgumentError:
        return ""  # It fails, whatever the data: nothing comes out.


def check(steps):
    # Three rows are as many as there are entries along an axis: one may be taken for the other.
    for rows in (None, len(SHAPE) + 1):
        try:
            found = falsely_proved(steps, rows)
        except (ValueError, TypeError):
            continue  # TensorFlow refuses to trace it.
        assert not found
        hypothesis.event("not proved" if found is None else "proved")


@hypothesis.settings(max_examples=60)
@hypothesis.given(STEPS)
@pytest.mark.slow
def test_no_chain_that_mixes_is_proved(steps):
    check(steps)


@pytest.mark.nightly
@hypothesis.settings(max_examples=1000)
@hypothesis.given(STEPS)
def test_none_of_many_chains_that_mix_is_proved(steps):
    check(steps)


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    strategies.lists(
        strategies.sampled_from(
            [("add one", 0), ("cumsum", 1), ("minus mean", 2), ("moved", 0), ("sorted", 2)]
            + [("softmax", 0), ("looped", 1), ("back", 0), ("weighed", 0), ("rolled", 1)]
            + [("halved", 2), ("in a function", 0), ("branch", 1), ("reversed", 2)]
        ),
        min_size=1,
        max_size=5,
    )
)
def test_chains_along_other_axes_are_proved(steps):
    assert not traced.reasons(chain(steps), SHAPE)
    assert not traced.reasons(chain(steps), SHAPE, rows=3)


def keeps(number=0):
    """A rule that claims too much: the rows stay where they are, whatever happens."""
    return lambda site, *inputs: site.rows(inputs[number], inputs[number].axis)


PLANTED = {
    "Cumsum": (keeps(), ("cumsum", 0)),
    "ReverseV2": (keeps(), ("reversed", 0)),
    "Roll": (keeps(), ("rolled", 0)),
    "Transpose": (keeps(), ("moved", 1)),
    "Mean": (lambda site, x, axes: x, ("minus mean", 0)),
    "Reshape": (keeps(), ("reshaped", 1)),
}


@pytest.mark.planted("a rule of independence that claims too much")
@pytest.mark.parametrize("name", PLANTED)
def test_a_rule_that_claims_too_much_is_found(name, monkeypatch):
    rule, step = PLANTED[name]
    assert not falsely_proved([step])
    monkeypatch.setitem(registry._ROWS, name, rule)
    assert falsely_proved([step])
