"""The README's own text runs."""

import pathlib
import re

import keras
import numpy as np
from sklearn.datasets import load_digits

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_example_trains():
    digits = load_digits()
    x, y = (digits.images / 8 - 1).astype("float32")[..., None], digits.target
    [example] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names = {"x": x, "y": y}
    exec(compile(example, README.name, "exec"), names)
    model, plan = names["model"], names["plan"]
    assert int(model.optimizer.iterations) == plan.steps == 30
    assert plan.epsilon_at(30) <= 8.0
    predicted = np.argmax(model.predict(x, verbose=0), axis=-1)
    # Chance is 0.1: this only says that it learns.
    assert np.mean(predicted == y) > 0.5
    assert isinstance(model.optimizer, keras.optimizers.SGD)
