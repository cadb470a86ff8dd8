"""The code of docs/architecture.md runs."""

import pathlib
import re

import bench
import head_cases
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
import transcripts

import tfdpx
from tfdpx import noise
from tfdpx.training.clipping import ClipPolicy

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")
layers = keras.layers


def code_of(heading):
    """Returns the Python block of the section `heading`."""
    section = PAGE.read_text(encoding="utf-8").split(f"### {heading}\n")[1].split("\n### ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


def run(heading):
    """Returns the names that the Python block of the section `heading` defines."""
    names = {"__name__": "followed"}
    exec(compile(code_of(heading), PAGE.name, "exec"), names)
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


class Careless(ClipPolicy):
    """A one-line policy that does not mask the factors of absent rows."""

    def clip(self, squared_norms, present, batch_size, clips):
        return 1.0 / (tf.sqrt(squared_norms) * batch_size)


def test_the_step_leaves_out_what_a_careless_policy_does_not():
    def make_bench(microbatch_size):
        return bench.Bench(  # Without a bias, the gradient of a row of zeros is zero.
            layers=lambda: [layers.Dense(3, use_bias=False)],
            noise_multiplier=1e-6,
            l2_norm_clip=Careless(1.0),
            microbatch_size=microbatch_size,
        )

    x, y = small.data()
    without = make_bench(None).step(np.delete(x, 3, 0), np.delete(y, 3))
    in_microbatches = make_bench(5)  # The last microbatch has absent rows.
    for value in (np.nan, np.inf, 0.0):
        x[3] = value
        np.testing.assert_allclose(in_microbatches.step(x, y), without, atol=1e-5)


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
    stack = [layers.Flatten(), layers.Dense(3)]
    model = small.model(layers=stack, augment=brighter(0.5), augmult=2)
    images = np.random.default_rng(0).uniform(size=(16, 4, 4, 1)).astype("float32")
    model.train_on_batch(images, np.arange(16) % 3)
    assert int(model.optimizer.iterations) == 1
    again = tfdpx.DPSGD.from_config(model.optimizer.get_config())
    assert again.augment.get_config() == {"most": 0.5}
