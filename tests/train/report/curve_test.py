"""The learning curve holds accuracy only on examples that are declared public."""

import json

import keras
import pytest
import small

import tfdpx
from tfdpx.train.report import curve

PLAN = tfdpx.PrivacyPlan(16, batch_size=8, steps=2, noise_multiplier=2.0, delta=1e-3)


@pytest.mark.parametrize("declared", [False, True])
def test_accuracy_is_in_the_rows_if_the_examples_are_public(declared, tmp_path):
    x, y = small.data(16)
    model = keras.Sequential([keras.Input([6]), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpx.DPSGD(0.1, plan=PLAN, public_validation=declared)
    model.compile(optimizer, loss, metrics=["accuracy"])
    rows = curve.Curve(tmp_path / "curve.jsonl", PLAN, steps=0)
    model.fit(x, y, validation_data=(x + 1, y), callbacks=[rows], verbose=0)
    [row] = map(json.loads, (tmp_path / "curve.jsonl").read_text().splitlines())
    assert row["step"] == 2 and ("accuracy" in row) == declared
