"""Losses are those of single examples, and tell the members of an overfitted model."""

import keras
import numpy as np
import pytest
import small

from tfdpx import audit
from tfdpx.audit import membership


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
    assert report.auc == membership.auc(values[:40], values[40:])
    assert list(report.tpr_at_fpr) == [0.1]
    assert f"AUC {report.auc:.3f}" in str(report)
