"""The examples of the page on rules work."""

import pathlib
import re

import keras
import numpy as np
import pytest
from cases import slow
from oracle import assert_matches_batches_of_one

import tfdpx
from tfdpx.per_example import rule

PAGE = pathlib.Path(tfdpx.per_example.__file__).with_name("README.md")


@pytest.fixture
def page_names(monkeypatch):
    """The names that the page defines."""
    monkeypatch.setattr(rule, "_RULES", dict(rule._RULES))
    names = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)), names)
    return names


def data():
    rng = np.random.default_rng(0)
    return (rng.normal(size=[6, *shape]).astype("float32") for shape in ([4, 3], [2]))


def model_with(layer):
    hidden = [keras.layers.Rescaling(0.9), layer, keras.layers.Activation("tanh")]
    return keras.Sequential([*hidden, keras.layers.Flatten(), keras.layers.Dense(2)])


def test_the_rule_of_one_variable(page_names):
    x, y = data()
    model = model_with(page_names["Scale"]())
    assert_matches_batches_of_one(model, x, y, views=2)
    choices = tfdpx.per_example.explain(model, x, 2)
    assert [c.rule for c in choices] == ["ScaleRule", "DenseRule"]
    assert all(choice.layer in repr(choices) for choice in choices)


@pytest.mark.parametrize("frozen", [None, slow("down")])
def test_the_rule_of_two_kernels(page_names, frozen):
    x, y = data()
    model = model_with(page_names["LowRank"](2, 5))
    model(x)
    if frozen:
        getattr(model.layers[1], frozen).trainable = False
    assert_matches_batches_of_one(model, x, y, views=2)
    first, *_ = tfdpx.per_example.explain(model, x, 2)
    assert (first.rule, first.norm, first.sum) == ("LowRankRule", "ghost", "ordinary")
