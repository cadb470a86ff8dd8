"""Keras's own BackupAndRestore: fresh noise, a true account, and never more than the budget."""

import keras
import pytest
import small
from killing import KillAfter, Killed

import tfdpx

N, STEPS = 60, 12
PLAN = tfdpx.PrivacyPlan(N, batch_size=20, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
X, Y = small.data(N)


def fit(folder, bound, budget_first, extra=()):
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN, momentum=0.9))
    model.build((None, 6))
    own = [tfdpx.PrivacyBudget(PLAN), keras.callbacks.BackupAndRestore(folder, save_freq=2)]
    batches = PLAN.batches(X, Y, optimizer=model.optimizer if bound else None)
    try:
        model.fit(batches, callbacks=[*extra, *own[:: 1 if budget_first else -1]], verbose=0)
    except Killed:
        pass
    return model


@pytest.mark.parametrize("bound, budget_first", [(True, True), (False, True), (False, False)])
def test_a_restored_run_has_fresh_noise_and_keeps_to_the_budget(tmp_path, bound, budget_first):
    killed = fit(tmp_path, bound, budget_first, [KillAfter(7)])
    restored = fit(tmp_path, bound, budget_first)
    first, second = killed.optimizer.run.state(), restored.optimizer.run.state()
    assert first["noise_seed"] != second["noise_seed"]
    assert first["draw_seed"] != second["draw_seed"]
    # A budget that was counted before the callback restored would let all twelve steps run again.
    assert restored.optimizer.ledger.steps == STEPS
    assert [entry.steps for entry in restored.optimizer.ledger.entries] == [6, 6]
    assert restored.optimizer.ledger.epsilon(1e-3) == PLAN.epsilon
