"""Peaks of graphs whose tensors can be counted by hand."""

import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.training import _graph_peak

SIZE = 4 * 1000  # Bytes of one tensor of these tests.


def peak(function, *specs):
    specs = specs or (tf.TensorSpec([10, 100]),)
    return _graph_peak.peak_bytes(
        tf.function(function, autograph=False).get_concrete_function(*specs)
    )


def test_a_chain_holds_two_tensors():
    def chain(x):
        for _ in range(9):
            x = tf.sin(x)
        return x

    assert peak(chain) == 2 * SIZE


@given(st.integers(2, 9))
def test_what_is_read_last_is_held(depth):
    def held(x):
        made = [x]
        for _ in range(depth):
            made.append(tf.sin(made[-1]))
        return tf.add_n(made)

    assert peak(held) == (depth + 2) * SIZE  # The argument, and the sum while all are there.


@given(st.integers(2, 6))
def test_a_backward_pass_holds_the_activations(depth):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in range(depth):
                y = tf.sin(y)
        return tape.gradient(y, x)

    # The inputs of every sine, and a few tensors of the backward pass.
    assert depth * SIZE < peak(gradient) <= (depth + 4) * SIZE
    assert peak(tf.recompute_grad(lambda x: tf.sin(tf.sin(x)))) <= 4 * SIZE


def test_work_whose_result_is_unused_is_not_counted():
    def lazy(x):
        tf.tile(x, [100, 1])
        return tf.sin(x)

    assert peak(lazy) == 2 * SIZE


def test_reshapes_share_memory():
    assert SIZE <= peak(lambda x: tf.reshape(tf.identity(x), [-1, 4])) < 1.1 * SIZE


def test_side_effects_are_counted():
    variable = tf.Variable(tf.zeros([]))

    def effect(x):
        variable.assign_add(tf.reduce_sum(tf.tile(x, [5, 1])))
        return tf.constant(0.0)

    assert 6 * SIZE <= peak(effect) < 6.1 * SIZE


def test_variables_are_not_counted():
    variable = tf.Variable(tf.zeros([1000, 1000]))
    assert peak(lambda x: x + variable[:10, :100]) < 4 * SIZE


def test_the_inside_of_a_function_is_counted_where_it_is_called():
    @tf.function(autograph=False)
    def inner(x):
        return tf.reduce_sum(tf.tile(x, [7, 1]))

    assert 8 * SIZE <= peak(lambda x: inner(tf.sin(x))) < 10 * SIZE


@given(st.integers(1, 20))
def test_a_loop_keeps_what_its_backward_pass_needs(rounds):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y = tf.while_loop(
                lambda i, _: i < rounds,
                lambda i, y: (i + 1, tf.sin(y)),
                (0, x),
                maximum_iterations=rounds,
            )
        return tape.gradient(y, x)

    assert rounds * SIZE < peak(gradient) <= (rounds + 12) * SIZE


def test_an_unknown_length_counts_as_the_largest_input():
    def masked(x):
        return tf.sin(tf.boolean_mask(x, x[:, 0] > 0))

    assert 2 * SIZE <= peak(masked) < 2.1 * SIZE


def test_a_peak_is_affine_in_the_batch():
    def network(x):
        return tf.nn.softmax(tf.nn.relu(x @ tf.ones([100, 50])) @ tf.ones([50, 3]))

    a, b, c = (peak(network, tf.TensorSpec([n, 100])) for n in (8, 16, 32))
    assert c - b == 2 * (b - a) > 0
