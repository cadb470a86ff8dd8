"""What the benchmark of Scattering2D compares. Speed itself is not tested."""

import numpy as np
import pytest
import tensorflow as tf

from experiments.benchmark import workloads as tool


@pytest.mark.slow
def test_ratios_are_of_medians():
    figures = tool.measure((8, 8, 1), batch=2, repeats=1)
    speed = figures["images_per_second"]
    assert (
        speed.keys() == figures["first_call_seconds"].keys() == tool.contenders((8, 8, 1), 2).keys()
    )
    assert figures["ffts_ratio"] == pytest.approx(speed["ffts"] / speed["layer"])
    assert figures["kymatio_ratio_xla"] == pytest.approx(speed["layer_xla"] / speed["kymatio"])


def test_the_layer_and_kymatio_compute_the_same():
    made = tool.contenders((16, 12, 3), 2)
    features, wanted = (
        function(inputs) for function, inputs in (made["layer"](), made["kymatio"]())
    )
    wanted = tf.reshape(tf.transpose(wanted, [0, 3, 4, 1, 2]), features.shape)
    np.testing.assert_allclose(features, wanted, atol=1e-5)


def test_the_bare_ffts_are_all_that_two_orders_need():
    inputs, transform = tool.bare_ffts((16, 12), rows=3)
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
        "images": (3, 1, 24, 20),
        "moduli": (3, 8, 24, 20),
        "waves_0": (3, 8, 24, 20),
        "waves_1": (3, 8, 12, 10),
        "second_waves": (3, 64, 12, 10),
    }
    assert len(transform(inputs)) == len(inputs)
