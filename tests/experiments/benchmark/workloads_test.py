"""Tests of the benchmark of Scattering2D. Speed itself is not tested."""

import numpy as np
import pytest
import tensorflow as tf

from experiments.benchmark import workloads as tool


@pytest.mark.slow
def test_ratios_are_of_medians_and_the_layer_computes_what_kymatio_does():
    figures = tool.measure((8, 8, 1), batch=2, repeats=1)
    speed = figures["images_per_second"]
    assert speed.keys() == tool.contenders((8, 8, 1), 2).keys()
    assert figures["ffts_ratio"] == pytest.approx(speed["ffts"] / speed["layer"])
    assert figures["kymatio_ratio_xla"] == pytest.approx(speed["layer_xla"] / speed["kymatio"])
    contenders = tool.contenders((16, 12, 3), 2)
    features, wanted = (
        function(inputs) for function, inputs in (contenders["layer"](), contenders["kymatio"]())
    )
    wanted = tf.reshape(tf.transpose(wanted, [0, 3, 4, 1, 2]), features.shape)
    np.testing.assert_allclose(features, wanted, atol=1e-5)
