"""Runs the code of the README and of the first pages that it links to."""

import pathlib
import re

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits

import tfdpx
from tfdpx.accounting import group_epsilon
from tfdpx.report import verify

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs a checkout")


def example(page, index=-1):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    return compile(blocks[index], page, "exec")


@pytest.mark.slow
def test_the_program_of_the_readme_learns_within_its_budget(capsys):
    names = {}
    exec(example("README.md"), names)
    model = names["model"]
    assert model.evaluate(names["x_test"], names["y_test"], verbose=0)[1] > 0.9
    assert model.optimizer.ledger.epsilon(1e-5) <= 3.0
    assert "differential privacy" in capsys.readouterr().out


@pytest.mark.slow
def test_the_program_of_own_code_runs_and_its_report_is_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(example("docs/own_code.md", 0), {})
    verdict = verify.check(tmp_path / "reports" / "digits")
    assert not verdict.problems and verdict.record.results["test_accuracy"] > 0.9
    text = (ROOT / "docs" / "own_code.md").read_text("utf-8")
    found = round(100 * verdict.record.attack_bounds().right_guesses + 0.5)
    assert f"right at most {found} times of 100" in " ".join(text.split())


@pytest.mark.slow
def test_the_epsilons_of_several_rows():
    page = (ROOT / "docs" / "one_example.md").read_text("utf-8")
    plan = tfdpx.PrivacyPlan(2_000, batch_size=200, epochs=20, epsilon=4.0, delta=1e-5)
    assert "PrivacyPlan(len(windows), batch_size=200, epochs=20, epsilon=4.0, delta=1e-5)" in page
    rows, epsilons = (
        re.search(rf"^\| {name} \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
        for name in ("rows that change", "epsilon")
    )
    for row, epsilon in zip(rows, epsilons, strict=True):
        half_a_digit = 0.51 * 10 ** -len(epsilon.partition(".")[2])
        assert float(epsilon) == pytest.approx(group_epsilon(plan, int(row)), abs=half_a_digit)
    for sentence in (
        f"With epsilon {epsilons[0]} for a window, epsilon is therefore {epsilons[-1]}",
        f"A photo in three triplets has epsilon {epsilons[rows.index('3')]}",
        f"puts a photo in two rows (epsilon {epsilons[rows.index('2')]})",
    ):
        assert sentence in " ".join(page.split())


@pytest.mark.slow
def test_the_code_for_each_kind_of_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, ends = {}, []
    blocks = re.findall(r"```python", (ROOT / "docs" / "one_example.md").read_text("utf-8"))
    for index in range(len(blocks)):
        exec(example("docs/one_example.md", index), names)
        ends.append({name: names.get(name) for name in ("model", "plan", "judge")})
    assert ends[0]["plan"].num_examples == 2_000 and ends[2]["plan"].num_examples == 200
    trained = [(ends[1]["model"], ends[1]["plan"]), (ends[3]["model"], ends[3]["plan"])]
    for model, plan in [*trained, (names["judge"], names["plan"])]:
        ledger = model.optimizer.ledger
        assert ledger.steps == plan.steps and ledger.is_complete and not ledger.is_approximate
        assert ledger.unit == plan.unit
        assert ledger.epsilon(plan.delta) == pytest.approx(plan.epsilon, rel=1e-4)
    # Each step is in one window, each photo in one triplet.
    assert len(np.unique(names["windows"])) == names["windows"].size
    assert len(np.unique(names["triplets"][..., 0])) == len(names["photos"])
    saved = tfdpx.accounting.Ledger.load("generator.ledger")
    assert saved.epsilon(1e-3) == names["judge"].optimizer.ledger.epsilon(1e-3)
    assert names["optimizer"].augmult == 8
    graphs = names["model"].predict([np.ones([2, 5, 3]), np.ones([2, 5, 5])], verbose=0)
    assert graphs.shape == (2, 1)


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
    exec(example("docs/own_code.md"), names)
    predicted = names["model"].predict(digits.images, verbose=0).argmax(axis=-1)
    assert np.mean(predicted == digits.target) > 0.7
    assert 0.99 < names["head"].epsilon_spent() <= 1.0


@pytest.mark.slow
def test_the_program_of_the_first_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(example("docs/start.md"), names)
    model, plan = names["model"], names["plan"]
    assert int(model.optimizer.iterations) == plan.steps == 113
    assert plan.epsilon_at(113) <= 8.0 and not model.optimizer.epsilon_is_approximate
    predicted = np.argmax(model.predict(names["x_test"], verbose=0), axis=-1)
    assert np.mean(predicted == names["y_test"]) > 0.85
    # The output, as the page shows it.
    text, page = capsys.readouterr().out, (ROOT / "docs" / "start.md").read_text("utf-8")
    for line in (
        "Epoch 19/20",
        "Privacy budget used up after 113 updates: epsilon=8 at delta=1e-05.",
    ):
        assert line in text and line in page
    assert keras.saving.load_model("digits.keras").optimizer.ledger.steps == 113
