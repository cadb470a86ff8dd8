"""DP optimizers are Keras optimizers: arguments, saving, EMA, schedules; and they fail closed."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow

import tfdpx

NO_NOISE = pytest.mark.filterwarnings("ignore:`noise_multiplier=0`")
PRIVATE = {"batch_size": 16, "noise_multiplier": 1.0}


def huge_clip(optimizer_class, **arguments):
    """An optimizer that never clips, with the factor 1/C undone by the batch size."""
    return optimizer_class(
        **arguments, batch_size=16, noise_multiplier=0.0, l2_norm_clip=1e3, seed=0
    )


@NO_NOISE
@pytest.mark.parametrize("name", ["SGD", "Adam", *map(slow, ("AdamW", "Lion", "RMSprop"))])
def test_without_clipping_and_noise_it_is_the_keras_optimizer(name):
    x, y = small.data()
    keras_class = getattr(keras.optimizers, name)
    private = small.model(huge_clip(tfdpx.make_private(keras_class), learning_rate=0.1))

    class Scaled(keras_class):
        # Eq. 3 divides by the clip.
        def update_step(self, gradient, variable, learning_rate):
            return super().update_step(gradient / 1e3, variable, learning_rate)

    ordinary = small.model(Scaled(learning_rate=0.1))
    for _ in range(3):
        np.testing.assert_allclose(
            small.step(private, x, y), small.step(ordinary, x, y), rtol=1e-3, atol=1e-5
        )


@NO_NOISE
def test_momentum_and_schedules_count_updates():
    x, y = small.data()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.0])
    optimizer = tfdpx.DPSGD(schedule, batch_size=16, noise_multiplier=0.0, microbatch_size=2)
    model = small.model(optimizer)
    changes = [np.abs(small.step(model, x, y)).max() for _ in range(3)]
    assert changes[0] > 0 and changes[1] > 0 and changes[2] == 0
    assert int(optimizer.iterations) == 3


def test_the_moving_average_warms_up():
    x, y = small.data()
    model = small.model(use_ema=True, ema_momentum=0.3)
    model.build(x.shape)
    average = None
    for t in range(6):
        small.step(model, x, y)
        decay = 0.0 if t == 0 else min(0.3, (1 + t) / (10 + t))
        now = small.weights(model)
        average = now if average is None else decay * average + (1 - decay) * now
    kept = [v.numpy().ravel() for v in model.optimizer._model_variables_moving_average]
    np.testing.assert_allclose(np.concatenate(kept), average, atol=1e-6)
    model.optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_allclose(small.weights(model), average, atol=1e-6)


PLAN = tfdpx.PrivacyPlan(100, batch_size=16, steps=10, noise_multiplier=2.0, delta=1e-5)


@pytest.mark.parametrize("make", [tfdpx.DPSGD, tfdpx.DPAdam, tfdpx.DPAdamW])
def test_config_round_trip(make):
    optimizer = make(
        0.5, plan=PLAN, l2_norm_clip=0.7, microbatch_size=4, augmult=2, use_ema=True, seed=3,
        augment=tfdpx.augment.RandomCropFlip(padding=2, flip=False),
    )  # fmt: skip
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is make
    assert str(again.get_config()) == str(optimizer.get_config())
    assert again.noise_multiplier == PLAN.noise_multiplier
    assert again.batch_size == 16 and again.augment.padding == 2


@NO_NOISE
@pytest.mark.slow
def test_a_saved_model_goes_on_where_it_stopped(tmp_path):
    """Exactly so without noise: noise is fresh in a loaded optimizer."""
    x, y = small.data()
    model = small.model(noise_multiplier=0.0, momentum=0.9)
    small.step(model, x, y)
    model.save(tmp_path / "model.keras")
    small.step(model, x, y)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == loaded.optimizer.ledger.steps == 1
    loaded.train_on_batch(x, y)
    np.testing.assert_array_equal(small.weights(loaded), small.weights(model))


def test_make_private_returns_one_class_and_refuses_others():
    assert tfdpx.make_private(keras.optimizers.Lion) is tfdpx.make_private(keras.optimizers.Lion)
    assert tfdpx.make_private(keras.optimizers.Lion).__name__ == "DPLion"
    for wrong in (tfdpx.DPSGD, keras.optimizers.LossScaleOptimizer, int, keras.optimizers.SGD()):
        with pytest.raises(TypeError, match="make_private"):
            tfdpx.make_private(wrong)


BAD = [
    ({"batch_size": None}, "batch_size.*missing"),
    ({"batch_size": 0}, "batch_size"),
    ({"batch_size": 1.5}, "batch_size"),
    ({"noise_multiplier": None}, "noise_multiplier.*missing"),
    ({"noise_multiplier": -1.0}, "noise_multiplier"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier"),
    ({"l2_norm_clip": 0.0}, "l2_norm_clip"),
    ({"l2_norm_clip": float("inf")}, "l2_norm_clip"),
    ({"microbatch_size": 0}, "microbatch_size"),
    ({"augmult": -1}, "augmult"),
    ({"augment": "flip"}, "augment"),
    ({"seed": 1.5}, "seed"),
    ({"per_example_engine": "fast"}, "per_example_engine"),
    ({"clipnorm": 1.0}, "l2_norm_clip"),
    ({"clipvalue": 1.0}, "l2_norm_clip"),
    ({"global_clipnorm": 1.0}, "l2_norm_clip"),
    ({"gradient_accumulation_steps": 2}, "microbatch_size"),
    ({"loss_scale_factor": 2.0}, "mixed_bfloat16"),
]


@pytest.mark.parametrize("arguments, message", BAD)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.DPSGD(0.1, **{**PRIVATE, **arguments})


def test_an_argument_that_contradicts_the_plan():
    for name in ("batch_size", "noise_multiplier"):
        with pytest.raises(ValueError, match=f"{name}.*disagrees with the plan"):
            tfdpx.DPSGD(0.1, plan=PLAN, **{name: 7})


def test_no_noise_warns():
    with pytest.warns(UserWarning, match="no privacy guarantee"):
        tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=0.0)


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_gradients_from_outside_the_private_step_are_refused():
    x, y = small.data()
    model = OwnStep()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tfdpx.DPSGD(0.1, **PRIVATE), loss=loss)
    with pytest.raises(ValueError, match="did not come from the private step"):
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize("method", ["apply", "apply_gradients", "stateless_apply", "update_step"])
def test_every_door_is_shut(method):
    variable = keras.Variable([1.0, 2.0])
    optimizer = tfdpx.DPSGD(0.1, **PRIVATE)
    optimizer.build([variable])
    gradient = tf.ones([2])
    arguments = {
        "apply": ([gradient], [variable]),
        "apply_gradients": ([(gradient, variable)],),
        "stateless_apply": (optimizer.variables, [gradient], [variable]),
        "update_step": (gradient, variable, 0.1),
    }
    with pytest.raises(ValueError, match="did not come from the private step"):
        getattr(optimizer, method)(*arguments[method])
    np.testing.assert_array_equal(variable, [1.0, 2.0])


def test_a_keras_that_reduces_gradients_itself_is_refused(monkeypatch):
    from tfdpx.training.private_optimizer import PrivateOptimizer

    monkeypatch.setattr(PrivateOptimizer, "all_reduce_sums", lambda self, pairs: pairs)
    with pytest.raises(RuntimeError, match="more than once"):
        small.step(small.model(), *small.data())


@pytest.mark.parametrize("compile_arguments", [slow({}), {"steps_per_execution": 2}])
@pytest.mark.slow
def test_batches_keyed_by_iterations_are_those_of_one_pass(compile_arguments):
    x, y = small.data(40)
    plan = tfdpx.PrivacyPlan(40, batch_size=16, steps=6, noise_multiplier=1.0, delta=1e-5)

    def train(epochs):
        model = small.model(
            tfdpx.DPSGD(1.0, plan=plan, seed=1), compile_arguments=compile_arguments
        )
        for _ in range(epochs):
            batches = plan.batches(x, y, seed=2, start=model.optimizer.iterations)
            model.fit(batches, steps_per_epoch=6 // epochs, verbose=0)
        return small.weights(model)

    np.testing.assert_array_equal(train(3), train(1))


@NO_NOISE
@pytest.mark.slow
def test_fit_on_arrays_datasets_and_several_steps_per_execution():
    x, y = small.data()
    fit = dict(verbose=0, shuffle=False)
    arrays = small.model(noise_multiplier=0.0)
    arrays.fit(x, y, batch_size=8, **fit)
    dataset = small.model(noise_multiplier=0.0)
    dataset.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0)
    several = small.model(noise_multiplier=0.0, compile_arguments={"steps_per_execution": 2})
    several.fit(x, y, batch_size=8, **fit)
    np.testing.assert_allclose(small.weights(dataset), small.weights(arrays), atol=1e-7)
    np.testing.assert_allclose(small.weights(several), small.weights(arrays), atol=1e-7)
    assert int(arrays.optimizer.iterations) == 2
