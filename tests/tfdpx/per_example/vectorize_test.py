"""Vectorized matrix products equal a loop's; TensorFlow's own destroy memory."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpx.per_example.vectorize import TakesBatch, vectorized_map


@settings(max_examples=20)
@given(
    st.sampled_from(
        [((), ()), ((1,), ()), ((1,), (1,)), ((2,), (1,)), ((1,), (3,)), ((1, 2), (1,))]
    ),
    st.sampled_from(["x", "y", "neither"]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
)
def test_products_of_examples_with_one_matrix_for_all(shapes, shared, adjoint_x, adjoint_y, n):
    rng = np.random.default_rng(0)
    inner = [(5, 4) if adjoint_x else (4, 5), (3, 5) if adjoint_y else (5, 3)]
    x, y = (
        rng.normal(size=((n,) if name != shared else ()) + batch + sizes).astype("float32")
        for name, batch, sizes in zip("xy", shapes, inner, strict=True)
    )

    @tf.function
    def products():
        def one(i):
            of_x, of_y = (
                tf.constant(t) if name == shared else tf.gather(t, i)
                for name, t in (("x", x), ("y", y))
            )
            return tf.matmul(of_x, of_y, adjoint_a=adjoint_x, adjoint_b=adjoint_y)

        return vectorized_map(one, tf.range(n))

    expected = [
        np.matmul(
            np.swapaxes(of_x, -1, -2) if adjoint_x else of_x,
            np.swapaxes(of_y, -1, -2) if adjoint_y else of_y,
        )
        for of_x, of_y in (
            (x if shared == "x" else x[i], y if shared == "y" else y[i]) for i in range(n)
        )
    ]
    np.testing.assert_allclose(products(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_values_computed_from_the_batch_are_refused(jit_compile):
    scale = tf.Variable(2.0)

    def mapped(x, function):
        @tf.function(jit_compile=jit_compile, autograph=False)
        def run(x):
            mean = tf.reduce_mean(x)
            return vectorized_map(lambda row: function(row, mean), x, "The layer")

        return run(x)

    x = tf.range(5.0)
    np.testing.assert_allclose(mapped(x, lambda row, _: row * scale), 2 * x)
    with pytest.raises(TakesBatch, match="The layer reads '.*Mean.*computed from other examples"):
        mapped(x, lambda row, mean: row - mean)
