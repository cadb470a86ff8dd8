"""Presets of Tables 7 to 10 of the paper on heads: what it prints."""

import math

import numpy as np
import pytest

from experiments.features import head_presets
from experiments.features.mixture import mixture
from tfdpx.train.run import head_methods

METHODS = {
    "table7": ("dp_adam", 100, 200, "learning_rate"),
    "table8": ("dp_ls", None, 200, "alpha"),
    "table9": ("dp_newton", 10, 300, "learning_rate"),
    "table10": ("dp_fc", 10, 200, "learning_rate"),
}


@pytest.mark.parametrize("name", head_presets.names())
def test_a_preset_is_a_row_of_its_table(name):
    table, backbone, data = name.split("/")
    method, steps, trials, rate = METHODS[table]
    preset = head_presets.resolve(name)
    assert (preset["method"], preset["steps"], preset["trials"]) == (method, steps, trials)
    assert preset["ranges"] == {rate: (1e-8, 1e8), "l2_regularization": (1e-8, 1e8)}
    large = (backbone, data) == ("vit_g14_jft", "imagenet")
    assert preset["l2_norm_clip"] == (1.0 if large else 0.005)
    assert preset["held_out"] == 0.05
    assert "searched" not in preset


@pytest.mark.parametrize("table", METHODS)
def test_a_head_can_be_fitted_at_the_ends_of_the_ranges(table):
    preset = head_presets.resolve(f"{table}/vit_b16_imagenet1k/cifar10")
    steps = {} if preset["steps"] is None else {"steps": 3}
    x, y = mixture(100, 8, 3)
    for ends in np.ndindex(2, 2):
        chosen = {
            argument: bounds[end]
            for (argument, bounds), end in zip(preset["ranges"].items(), ends, strict=True)
        }
        head = head_methods.build(
            preset["method"], 3, 1.0, 1e-5, l2_norm_clip=preset["l2_norm_clip"], **steps, **chosen
        )
        accuracy = head.fit(x, y).evaluate(x, y)["accuracy"]
        assert math.isfinite(accuracy), chosen
