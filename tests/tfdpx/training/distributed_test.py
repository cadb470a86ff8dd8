"""`tfdpx.distributed.fit` on one device equals `model.fit`, for callbacks too."""

import keras
import numpy as np
import pytest
import small

import tfdpx

STEPS = 6
PLAN = tfdpx.PrivacyPlan(60, batch_size=20, steps=STEPS, noise_multiplier=1.0, delta=1e-3)


def make(optimizer=None, **compile_arguments):
    optimizer = optimizer or tfdpx.DPAdam(0.05, plan=PLAN, seed=1, use_ema=True, ema_momentum=0.5)
    arguments = {"metrics": ["accuracy"], **compile_arguments}
    return small.model(optimizer, compile_arguments=arguments)


class Record(keras.callbacks.Callback):
    """Records every event in order, with its number and the names of the logs."""

    def __init__(self):
        super().__init__()
        self.events = []
        for kind in ("train", "epoch", "train_batch", "test", "test_batch"):
            for end in ("begin", "end"):
                setattr(self, f"on_{kind}_{end}", self._recorder(f"{kind}_{end}"))

    def _recorder(self, name):
        def record(*arguments, logs=None):
            number = arguments[0] if arguments and isinstance(arguments[0], int) else None
            self.events.append((name, number))

        return record


def ours(model, callbacks=(), **arguments):
    x, y = small.data(60)
    return tfdpx.distributed.fit(
        model, PLAN, x, y, seed=3, verbose=0, callbacks=list(callbacks), **arguments
    )


def keras_fit(model, callbacks=(), **arguments):
    batches = PLAN.batches(*small.data(60), seed=3)
    return model.fit(batches, verbose=0, callbacks=list(callbacks), **arguments)


@pytest.mark.slow
def test_it_is_keras_fit():
    x, y = small.data(50)
    results = []
    for fit in (keras_fit, ours):
        model, record = make(), Record()
        history = fit(
            model, epochs=2, steps_per_epoch=3, validation_data=(x, y), validation_batch_size=20,
            callbacks=[tfdpx.callbacks.PrivacyBudget(PLAN), record],
        )  # fmt: skip
        results.append((small.weights(model), history.history, record.events))
    (weights, history, events), (our_weights, our_history, our_events) = results
    np.testing.assert_array_equal(our_weights, weights)
    assert our_history.keys() == history.keys()
    for name, values in history.items():
        np.testing.assert_allclose(our_history[name], values, rtol=1e-5, err_msg=name)
    assert our_events == events and len(events) > 20


@pytest.mark.slow
def test_it_goes_on_where_the_optimizer_is_and_ends_with_the_plan(tmp_path, capsys):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert {"loss", "accuracy"} <= set(logs)
            self.model.stop_training = batch == 1

    # Without averages: these replace the weights at the end of each `fit`.
    whole, parts = (make(tfdpx.DPSGD(0.1, plan=PLAN, seed=1)) for _ in range(2))
    tensorboard = tfdpx.callbacks.TensorBoard(str(tmp_path), plan=PLAN)
    tfdpx.distributed.fit(whole, PLAN, *small.data(60), seed=3, callbacks=[tensorboard], verbose=2)
    assert f"{STEPS}/{STEPS}" in capsys.readouterr().out
    assert list((tmp_path / "train").iterdir())
    ours(parts, [Stop()], epochs=3, steps_per_epoch=3)
    assert parts.optimizer.iterations == 2  # A callback stopped it.
    ours(parts, steps_per_epoch=2)
    assert parts.optimizer.iterations == 4
    ours(parts, epochs=9, steps_per_epoch=5)
    assert parts.optimizer.iterations == STEPS
    np.testing.assert_array_equal(small.weights(parts), small.weights(whole))


def test_unfit_arguments():
    with pytest.raises(TypeError, match="private optimizer.*SGD"):
        ours(make(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="disagree on `noise_multiplier`"):
        ours(make(tfdpx.DPSGD(0.1, batch_size=20, noise_multiplier=0.5)))
    with pytest.raises(ValueError, match="must be a list"):
        x, y = small.data(60)
        callbacks = keras.callbacks.CallbackList([])
        tfdpx.distributed.fit(make(), PLAN, x, y, callbacks=callbacks)
