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


def test_the_example_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example, names = examples()[0], {}
    exec(compile(example, README.name, "exec"), names)
    model, plan = names["model"], names["plan"]
    assert int(model.optimizer.iterations) == plan.steps == 113
    assert plan.epsilon_at(113) <= 8.0 and not model.optimizer.epsilon_is_approximate
    predicted = np.argmax(model.predict(names["x_test"], verbose=0), axis=-1)
    assert np.mean(predicted == names["y_test"]) > 0.85
    # What the page shows of it.
    text = capsys.readouterr().out
    for line in (
        "Epoch 19/20",
        "Privacy budget used up after 113 updates: epsilon=8 at delta=1e-05.",
    ):
        assert line in text and line in README.read_text()
    assert keras.saving.load_model("digits.keras").optimizer.ledger.steps == 113
