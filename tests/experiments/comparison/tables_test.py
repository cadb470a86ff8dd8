"""The study of tables: its cases train, and the fit simulates the program's updates."""

import numpy as np
import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

import tfdpx  # noqa: E402
from experiments.tables import fit_rule, generated, study  # noqa: E402
from tfdpx.train.tables import models, run  # noqa: E402
from tfdpx.train.tables.preprocessing import as_inputs, predict  # noqa: E402


@pytest.mark.parametrize("name", ["wine", "diabetes"])
def test_a_case_trains_and_has_arrays_for_peers(name):
    table, settings = study.case(name, 0, 8.0, None, "public")
    assert run.measure(run.fit(table, settings).model, table.test, settings)
    task = study.as_arrays(table, settings)
    assert np.all(np.abs(task["x"]) <= 1) and len(task["x"]) == len(table.train)
    assert study.without_privacy(task) > 0.3
    if task["classes"]:
        found = study.heads(task, 8.0)
        assert len(found) == len(study.HEADS) and max(found) > 0.7


def test_generated_tables_are_drawn_from_their_key():
    one, same, other = (generated.table(key, 50) for key in (3, 3, 4))
    assert np.array_equal(one.train.target, same.train.target)
    assert one.kinds != other.kinds or not np.array_equal(one.train.target, other.train.target)


@pytest.mark.parametrize("model", ["linear", "network"])
def test_the_simulated_update_is_that_of_the_optimizer(model, monkeypatch):
    """At almost no noise both learn the same function; a network's initial weights differ."""
    table = generated.table(5, 300, curved=False)
    plan = tfdpx.PrivacyPlan(300, 300, 60, noise_multiplier=1e-3, delta=1e-5, accountant="gdp")
    monkeypatch.setattr(models, "choose", lambda *_: models.Choice(model, plan, 0.5))
    limits = generated.ranges(table)
    bounds = [f"{name}:{low!r}:{high!r}" for name, (low, high) in limits.items()]
    settings = study.TableSettings(dataset="", target="t", epsilon=50.0, bounds=bounds)
    trained = run.fit(table, settings)
    theirs = predict(trained.model, table.test.columns)
    inner = trained.model.get_layer("tfdpx.preprocessing")
    x, test_x = (
        np.asarray(inner(list(as_inputs(each.columns).values())))
        for each in (table.train, table.test)
    )
    ours = fit_rule.simulated(x, table, model, 0.5, plan)(test_x)
    exact = np.exp(theirs) / np.exp(theirs).sum(axis=1, keepdims=True)
    assert np.mean(np.abs(ours - exact)) < (0.003 if model == "linear" else 0.08)
