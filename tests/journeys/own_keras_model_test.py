"""A user with a Keras model and arrays plans, trains, looks, saves, and returns for more."""

import keras
import numpy as np
import pytest
import small
from tensorboard.backend.event_processing import event_accumulator

import tfdpx


@pytest.mark.slow
def test_from_plan_to_released_model(tmp_path, capsys, recwarn):
    generator = np.random.default_rng(0)
    y = generator.integers(0, 3, 600)
    x = (np.eye(3)[y] + 0.3 * generator.normal(size=[600, 3])).astype("float32")

    # The user knows epochs and epsilon, and holds a sixth out, as in Keras.
    plan = tfdpx.PrivacyPlan(500, batch_size=100, epochs=6, epsilon=8.0, delta=1e-4)
    assert plan.steps == 30 and plan.epsilon_at(30) <= 8.0
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(3)])
    model.compile(
        tfdpx.DPSGD(4.0, plan=plan),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    board = tfdpx.callbacks.TensorBoard(str(tmp_path / "logs"))
    history = model.fit(
        x,
        y,
        epochs=6,
        validation_split=1 / 6,
        callbacks=[tfdpx.callbacks.Checkpoint(tmp_path / "run"), board],
        verbose=2,
    ).history

    # The output: six epochs of five steps, epsilon in each, the end of the budget, and one warning,
    # because the held-out part is private too.
    text = capsys.readouterr().out
    assert "Epoch 6/6" in text and text.count("5/5 - ") == 6
    assert f"Privacy budget used up after 30 updates: epsilon={plan.epsilon_at(30):.4g}" in text
    assert history["epsilon"][-1] == pytest.approx(plan.epsilon_at(30))
    assert history["val_accuracy"][-1] > 0.9
    [warning] = [str(w.message) for w in recwarn if issubclass(w.category, UserWarning)]
    assert "leaves the validation metrics out" in warning and "public_validation=True" in warning

    # TensorBoard: epsilon and its budget in one chart, by updates.
    runs = {}
    for run in ("train", "budget"):
        events = event_accumulator.EventAccumulator(str(tmp_path / "logs" / run))
        events.Reload()
        runs[run] = {event.step: event for event in events.Tensors("epsilon")}
    assert sorted(runs["train"]) == sorted(runs["budget"]) == [0, 5, 10, 15, 20, 25, 30]

    # One more call is refused, also after saving: the ledger stays with the weights.
    with pytest.raises(tfdpx.callbacks.BudgetExceeded, match="30 of 30 steps"):
        model.fit(x[:500], y[:500], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    with pytest.raises(tfdpx.callbacks.BudgetExceeded):
        loaded.train_on_batch(x[:100], y[:100])


def test_mixed_float16_is_answered_before_the_first_update():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = small.model()
        with pytest.raises(ValueError, match="mixed_bfloat16"):
            model.fit(*small.data(), verbose=0)
        assert model.optimizer.inner_optimizer.ledger.steps == 0
    finally:
        keras.config.set_dtype_policy("float32")
