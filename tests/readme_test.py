"""The README's own text runs."""

import pathlib
import re

import keras
import numpy as np
from sklearn.datasets import load_digits

README = pathlib.Path(__file__).parents[1] / "README.md"


def examples():
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_a_head_goes_on_a_backbone():
    digits = load_digits()
    backbone = keras.Sequential(
        [
            keras.Input([8, 8]),
            keras.layers.Flatten(),
            keras.layers.Rescaling(1 / 8, -1),
            keras.layers.UnitNormalization(),
        ]
    )
    names = {"images": digits.images, "labels": digits.target, "backbone": backbone}
    _, example = examples()
    exec(compile(example, README.name, "exec"), names)
    predicted = names["model"].predict(digits.images, verbose=0).argmax(axis=-1)
    assert np.mean(predicted == digits.target) > 0.7
    assert 0.99 < names["head"].epsilon_spent() <= 1.0


def test_the_example_trains_and_run_again_has_nothing_left_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = load_digits()
    x, y = (digits.images / 8 - 1).astype("float32")[..., None], digits.target
    example, _ = examples()
    names = {"x": x, "y": y}
    exec(compile(example, README.name, "exec"), names)
    model, plan = names["model"], names["plan"]
    assert int(model.optimizer.iterations) == plan.steps == 30
    assert plan.epsilon_at(30) <= 8.0
    predicted = np.argmax(model.predict(x, verbose=0), axis=-1)
    # Chance is 0.1: this only says that it learns.
    assert np.mean(predicted == y) > 0.5
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    exec(compile(example, README.name, "exec"), names)
    again = names["model"]
    assert again is not model and again.optimizer.ledger == model.optimizer.ledger
    for weight, same in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, same)
    assert keras.saving.load_model("digits.keras").optimizer.ledger.steps == 30
