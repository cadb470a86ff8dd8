"""Runs the code of the README, of pages that it links to, and of docstrings."""

import doctest
import importlib
import pathlib
import re

import head_cases
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
import transcripts
from cases import slow
from sklearn.datasets import load_digits

import tfdpx
from tfdpx import noise
from tfdpx.report import verify
from tfdpx.sampling.examples import as_examples

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
    right = round(100 * verdict.record.attack_bounds().right_guesses + 0.5)
    assert f"right at most {right} times out of 100" in " ".join(text.split())


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
    names = {"keras": keras, "tfdpx": tfdpx, "backbone": backbone}
    names |= {"images": digits.images, "labels": digits.target}
    exec(example("docs/heads.md"), names)
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


def run(heading):
    """Returns the names that the Python block of a section of docs/architecture.md defines."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split(f"### {heading}\n")[1].split("\n### ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {"__name__": "followed"}
    exec(compile(block, "architecture.md", "exec"), names)
    return names


@pytest.mark.slow
def test_a_clip_policy(monkeypatch):
    monkeypatch.setattr(noise, "normal", lambda shape, seed, stddev=1.0: tf.zeros(shape))
    normalized = run("A clip policy")["Normalized"]
    x, y = small.data()
    x[-1] *= 1e4
    model = small.model(l2_norm_clip=normalized(1.0))
    y[-1] = model(x[-1:]).numpy().argmin()  # The label with the largest gradient.
    change = small.step(model, x, y)
    weight = np.append(np.ones(15, "float32"), 0.0)
    without = small.step(small.model(l2_norm_clip=normalized(1.0)), x, y, weight)
    assert 0.9 < np.linalg.norm(change - without) * 16 < 1
    again = tfdpx.DPSGD.from_config(model.optimizer.get_config())
    assert isinstance(again.clip_policy, normalized) and again.l2_norm_clip == 1.0


def test_a_head(monkeypatch):
    class_sums = run("A head")["ClassSums"]
    x, y = head_cases.data()
    head = class_sums(head_cases.CLASSES, 8.0).fit(x, y)
    assert head.evaluate(x, y)["accuracy"] > 0.6 and 7.99 < head.epsilon_spent() <= 8.0
    x[0], y = 0.0, np.eye(head_cases.CLASSES)[y]
    without, (x[0], y[0]) = (x.copy(), y.copy()), (1e3, 1.0)
    without[1][0] = 0.0
    _, epsilon = transcripts.spent(
        monkeypatch, lambda: class_sums(head_cases.CLASSES, 1.0, scale=2.0), without, (x, y)
    )
    assert 0.99 < epsilon <= 1.0


@pytest.mark.slow
def test_an_augmentation():
    brighter = run("An augmentation")["Brighter"]
    stack = [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = small.model(layers=stack, augment=brighter(0.5), augmult=2)
    images = np.random.default_rng(0).uniform(size=(16, 4, 4, 1)).astype("float32")
    model.train_on_batch(images, np.arange(16) % 3)
    assert int(model.optimizer.iterations) == 1
    again = tfdpx.DPSGD.from_config(model.optimizer.get_config())
    assert again.augment.get_config() == {"most": 0.5}


MODULES = [
    "tfdpx.accounting.groups",
    "tfdpx.accounting.individual",
    "tfdpx.accounting.ledger",
    slow("tfdpx.accounting.plan"),
    "tfdpx.audit.bounds",
    "tfdpx.audit.membership",
    slow("tfdpx.audit.one_run"),
    "tfdpx.audit.sampling_check",
    slow("tfdpx.audit.white_box"),
    "tfdpx.augment.crops",
    "tfdpx.augment.mix_views",
    "tfdpx.layers.blocks",
    slow("tfdpx.layers.private_model"),
    "tfdpx.layers.scattering2d",
    "tfdpx.layers.ws_conv2d",
    "tfdpx.training.optimizers",
    "tfdpx.training.gradient_norms",
    "tfdpx.sampling.sampled_batches",
    "tfdpx.suggestion",
    "tfdpx.synthetic",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    keras.backend.clear_session()  # Resets Keras's numbering of optimizers.
    # The usual names, whether or not the module itself needs them.
    names = {"np": np, "keras": keras, "tfdpx": tfdpx, "as_examples": as_examples}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and not result.failed
