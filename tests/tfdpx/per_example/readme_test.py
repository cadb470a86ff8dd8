"""The example of the page on rules is a rule that works."""

import pathlib
import re

import keras
import numpy as np
from oracle import assert_matches_batches_of_one

import tfdpx.per_example

PAGE = pathlib.Path(tfdpx.per_example.__file__).with_name("README.md")


def test_the_rule_of_the_readme():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    made = {}
    exec(code, made)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=[6, *shape]).astype("float32") for shape in ([4, 3], [2]))
    hidden = [keras.layers.Rescaling(0.9), made["Scale"](), keras.layers.Activation("tanh")]
    model = keras.Sequential([*hidden, keras.layers.Flatten(), keras.layers.Dense(2)])
    assert_matches_batches_of_one(model, x, y, views=2)
    assert [c.rule for c in tfdpx.per_example.explain(model, x, 2)] == ["ScaleRule", "DenseRule"]


def test_the_readme_names_what_there_is():
    places = PAGE.parent, PAGE.parent.parent, pathlib.Path(__file__).parents[3]
    for name in re.findall(r"`([a-z_/]+\.py)`", PAGE.read_text()):
        assert any((place / name).exists() for place in places), name
