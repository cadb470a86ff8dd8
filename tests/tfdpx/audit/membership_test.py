"""Attacks on losses find what was planted, equal their definitions, and refuse misfits."""

import keras
import numpy as np
import pytest
import small
from scipy import special, stats

from tfdpx import audit
from tfdpx.audit import membership, scores


def test_losses_of_examples_are_those_of_batches_of_one():
    x, y = small.data()
    model = small.model(noise_multiplier=1.0, compile_arguments={"jit_compile": False})
    model(x)
    found = audit.example_losses(model, x, y, batch_size=5)
    alone = [model.evaluate(x[i : i + 1], y[i : i + 1], verbose=0) for i in range(len(x))]
    np.testing.assert_allclose(found, alone, rtol=1e-5)


@pytest.mark.slow
def test_an_overfitted_model_tells_its_members():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 30)).astype("float32"), rng.integers(0, 2, 80)
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, jit_compile=False)
    model.fit(x[:40], y[:40], epochs=60, batch_size=40, verbose=0)
    values = -audit.example_losses(model, x, y)
    report = audit.membership_report(values[:40], values[40:])
    # Half of the others are guessed right, and with more confidence than members.
    assert report.auc > 0.5 and report.advantage > 0.3
    assert report.auc == scores.auc(values[:40], values[40:])
    assert list(report.tpr_at_fpr) == [0.1]
    assert f"AUC {report.auc:.3f}" in str(report)


def test_true_class_logits():
    logits = np.array([[[1.0, 2.0, -1.0], [500.0, 0.0, 3.0]]])
    labels = np.array([1, 0])
    probabilities = special.softmax(logits, -1)
    chosen = probabilities[0, 0, 1]
    found = membership.true_class_logits(logits, labels)
    assert found.shape == (1, 2)
    assert found[0, 0] == pytest.approx(np.log(chosen / (1 - chosen)))
    # Where p is 1 in any precision.
    assert found[0, 1] == pytest.approx(500.0 - np.logaddexp(0.0, 3.0))
    again = membership.true_class_logits(probabilities[:, :1], labels[:1], from_logits=False)
    assert again == pytest.approx(found[:, :1])
    with pytest.raises(ValueError, match="`labels`"):
        membership.true_class_logits(logits, [1, 3])
    with pytest.raises(ValueError, match="`outputs`"):
        membership.true_class_logits(logits, [1])


def shadows(models, examples=200, gain=1.0, seed=0):
    """Values of examples of unlike difficulty; training adds `gain`. The last model is attacked."""
    rng = np.random.default_rng(seed)
    halves = np.tile(np.arange(models) % 2 == 0, (examples, 1))
    trained_on = np.concatenate(
        [rng.permuted(halves, axis=1).T, rng.uniform(size=(1, examples)) < 0.5]
    )
    difficulty = rng.normal(scale=5.0, size=examples)
    values = difficulty + gain * trained_on + rng.normal(scale=0.5, size=trained_on.shape)
    return values[-1], values[:-1], trained_on[:-1], trained_on[-1]


@pytest.mark.parametrize("models", [8, 200])
def test_the_likelihood_ratio_knows_how_hard_each_example_is(models):
    *arguments, members = shadows(models)
    ratios = membership.likelihood_ratio(*arguments)
    found = scores.auc(ratios[members], ratios[~members])
    # Normals one gain apart: the best that any attack can do.
    best = stats.norm.cdf(1.0 / 0.5 / 2**0.5)
    assert best - 0.08 < found < best + 0.06
    plain = scores.auc(arguments[0][members], arguments[0][~members])
    assert plain < 0.65


def test_the_ratio_is_that_of_normals_and_one_sided_without_members():
    observed, values, trained_on, _ = shadows(200, examples=5)
    trained_on[:, 0] = False
    ratios = membership.likelihood_ratio(observed, values, trained_on)
    out, within = values[~trained_on[:, 1], 1], values[trained_on[:, 1], 1]
    densities = [stats.norm(v.mean(), v.std(ddof=1)).logpdf(observed[1]) for v in (within, out)]
    assert ratios[1] == pytest.approx(densities[0] - densities[1])
    alone = stats.norm(values[:, 0].mean(), values[:, 0].std(ddof=1))
    assert ratios[0] == pytest.approx(-alone.logsf(observed[0]))


def test_shadows_that_do_not_fit_are_refused():
    observed, values, trained_on, _ = shadows(4, examples=3)
    with pytest.raises(ValueError, match="`shadows`"):
        membership.likelihood_ratio(observed, values[:, :2], trained_on)
    with pytest.raises(ValueError, match="`trained_on`"):
        membership.likelihood_ratio(observed, values, np.ones_like(trained_on))
