"""The examples of batches: nests, dtypes, weights."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpx
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import Examples

PLAN = tfdpx.PrivacyPlan(4, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-3)


def test_nests_and_dtypes():
    x = {
        "image": np.arange(20, dtype="uint8")[:, None, None] * np.ones([20, 4, 3], "uint8"),
        "meta": (np.arange(20.0), np.arange(20, dtype="float16")),
    }
    y = (np.arange(20) % 2 == 0, [f"label {i}" for i in range(20)])
    examples = Examples(x, y)
    dataset = sampled_batches.poisson_sampler(
        examples, sampling_probability=0.5, capacity=16, steps=2, seed=0
    ).dataset()
    spec_x, spec_y, spec_weight = dataset.element_spec
    assert (spec_x["image"].dtype, spec_x["image"].shape) == (tf.uint8, [16, 4, 3])
    assert [spec.dtype for spec in spec_x["meta"]] == [tf.float32, tf.float16]
    assert [spec.dtype for spec in spec_y] == [tf.bool, tf.string]
    assert spec_weight == tf.TensorSpec([16], tf.float32)
    x, y, weight = next(iter(dataset))
    for row in range(int(tf.reduce_sum(weight))):
        number = int(x["meta"][0][row])
        assert int(x["image"][row, 3, 2]) == number == int(x["meta"][1][row])
        assert y[0][row] == (number % 2 == 0) and y[1][row] == f"label {number}"


def test_weights_of_examples_and_of_classes():
    x, labels, weights = np.zeros([4, 2]), np.array([0, 1, 2, 1]), [0.0, 0.5, 2.0, 1.0]
    [batch] = PLAN.batches(x, labels, weights)
    np.testing.assert_array_equal(batch[2], weights)
    for y in (labels, labels[:, np.newaxis], np.eye(3)[labels], labels.astype("float32")):
        [batch] = PLAN.batches(x, y, class_weight={0: 0.25, 1: 3.0})
        np.testing.assert_array_equal(batch[2], [0.25, 3.0, 1.0, 3.0])
        [batch] = PLAN.batches(x, y, weights, class_weight={0: 0.25, 1: 3.0})
        np.testing.assert_array_equal(batch[2], [0.0, 1.5, 2.0, 3.0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sample_weight": [1.0, -1.0, 1.0, 1.0]}, "finite and >= 0.*from -1.0 to 1.0"),
        ({"sample_weight": [1.0, math.nan, 1.0, 1.0]}, "finite and >= 0"),
        ({"sample_weight": np.ones(3)}, r"`sample_weight` must have shape \(4,\).*\(3,\)"),
        ({"class_weight": {0: -1.0}}, "finite and >= 0"),
        ({"class_weight": {0: math.nan}}, "finite and >= 0"),
        ({"class_weight": {0: 1.0}, "y": None}, "`class_weight` needs a single array `y`"),
        ({"class_weight": {0: 1.0}, "y": np.zeros([4, 2, 2])}, r"Received: shape \(4, 2, 2\)"),
        ({"y": np.zeros(5)}, r"arrays of the same length, at least 1. Received: lengths \[4, 5\]"),
        ({"x": np.zeros([0, 2]), "y": None}, r"Received: lengths \[0\]"),
    ],
)
def test_unfit_examples(arguments, message):
    arguments = {"x": np.zeros([4, 2]), "y": np.zeros(4, int)} | arguments
    with pytest.raises(ValueError, match=message):
        PLAN.batches(**arguments)
