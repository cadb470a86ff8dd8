"""What is searched for a head: by default, and by a preset of the paper."""

import math

import numpy as np
import pytest

from experiments.features import head_presets, head_search
from experiments.features.mixture import mixture
from tfdpx.train.run import head_methods

BUDGET = dict(num_classes=3, epsilon=4.0, delta=1e-5)


@pytest.mark.parametrize("method", head_methods.METHODS)
def test_clips_reach_the_papers(method):
    ranges = head_search.ranges(method)
    assert ranges["l2_norm_clip"][0] <= 0.005 and ranges["l2_norm_clip"][1] >= 1.0
    # What the method has by itself lies inside.
    _, own = head_methods.METHODS[method]
    assert all(low <= own.get(name, 1.0) <= high for name, (low, high) in ranges.items())


def test_a_search_keeps_to_the_ranges_and_the_fixed_arguments_of_a_preset(monkeypatch):
    preset = head_presets.resolve("table10/vit_b16_imagenet1k/cifar10")
    built, build = [], head_methods.build
    monkeypatch.setattr(
        head_methods, "build", lambda *args, **given: built.append(given) or build(*args, **given)
    )
    train, held_out = mixture(200, 8, 3, seed=0), mixture(50, 8, 3, seed=1)
    budget = {**BUDGET, "steps": preset["steps"], "l2_norm_clip": preset["l2_norm_clip"]}
    found, _ = head_search.by_optuna(
        "dp_fc", train, held_out, budget, 12, searched=preset["ranges"]
    )
    assert set(found) == set(preset["ranges"])
    _, chosen, *_ = head_search.privately(
        "dp_fc", train, held_out, budget, 5.0, searched=preset["ranges"]
    )
    assert set(chosen) == set(preset["ranges"])
    rates = [each["learning_rate"] for each in built if "learning_rate" in each]
    assert all(each["l2_norm_clip"] == 0.005 and each["steps"] == 10 for each in built)
    assert 1e-8 <= min(rates) and max(rates) <= 1e8
    assert np.ptp(np.log10(rates)) > 6  # Logarithmically, over 16 powers of ten.


def test_private_draws_are_even_on_a_logarithmic_scale(monkeypatch):
    monkeypatch.setattr(head_search.selection, "draw_runs", lambda mean: 200)
    drawn = []

    class Head:
        num_releases = 3

        def __init__(self, *args, **given):
            drawn.append(given.get("l2_norm_clip"))

        def fit(self, *data):
            return self

        def evaluate(self, *data):
            return {"accuracy": 0.5}

    monkeypatch.setattr(head_methods, "build", lambda method, **given: Head(**given))
    data = mixture(20, 8, 3)
    head_search.privately("dp_ls", data, data, BUDGET, 5.0, np.random.default_rng(0))
    logs = np.log(drawn[1:])
    low, high = map(math.log, head_search.ranges("dp_ls")["l2_norm_clip"])
    assert low <= logs.min() < low + 0.2 and high - 0.2 < logs.max() <= high
    assert np.mean(logs) == pytest.approx((low + high) / 2, abs=0.4)
