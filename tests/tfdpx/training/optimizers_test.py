"""DP optimizers are Keras optimizers: arguments, saving, EMA, schedules; and they fail closed."""

import inspect

import bench
import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow_but

import tfdpx
from tfdpx.training.private_optimizer import PrivateOptimizer

PRIVATE = {"batch_size": 16, "noise_multiplier": 1.0}


OPTIMIZERS = sorted(
    name
    for name, kind in vars(keras.optimizers).items()
    if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
)
WRAPPERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


@pytest.fixture(scope="module")
def noise():
    """The gradients of three updates without examples, from the first: noise of the seed only."""
    x, y = small.data()
    sgd = bench.Bench(tfdpx.DPSGD(1.0, **PRIVATE, seed=1))
    return [-sgd.continue_step(x, y, np.zeros(len(x))) for _ in range(3)]


@pytest.mark.parametrize(
    "name", slow_but([n for n in OPTIMIZERS if n not in WRAPPERS], "Adam", "Muon")
)
def test_every_optimizer_of_keras_gets_the_noise_and_then_makes_its_own_update(name, noise):
    if name == "Muon" and keras.__version__ < "3.13":
        pytest.skip("Keras's own Muon fails on TensorFlow before Keras 3.13")
    x, y = small.data()
    keras_class = getattr(keras.optimizers, name)
    private = bench.Bench(tfdpx.make_private(keras_class)(0.1, **PRIVATE, seed=1))
    twin = keras.models.clone_model(private.model)
    twin.set_weights(private.model.get_weights())
    ordinary = keras_class(0.1)
    ordinary.build(twin.trainable_variables)
    sizes = [int(np.prod(v.shape)) for v in twin.trainable_variables]
    for gradient in noise:
        before = small.weights(twin)
        parts = np.split(gradient, np.cumsum(sizes)[:-1])
        pairs = zip(parts, twin.trainable_variables, strict=True)
        ordinary.apply([tf.constant(part.reshape(v.shape)) for part, v in pairs])
        change = private.continue_step(x, y, np.zeros(len(x)))
        assert change.all()
        np.testing.assert_allclose(change, small.weights(twin) - before, rtol=1e-3, atol=1e-5)
    assert np.std(noise) == pytest.approx(1 / 16, rel=0.15)
    assert private.optimizer.ledger.steps == 3


def test_schedules_count_updates_and_the_moving_average_warms_up():
    x, y = small.data()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 0.0])
    trainer = bench.Bench(learning_rate=schedule, microbatch_size=2, use_ema=True, ema_momentum=0.3)
    average = None
    for t in range(6):
        assert trainer.continue_step(x, y).any() == (t < 4)
        decay = 0.0 if t == 0 else min(0.3, (1 + t) / (10 + t))
        now = small.weights(trainer.model)
        average = now if average is None else decay * average + (1 - decay) * now
    assert int(trainer.optimizer.iterations) == 6
    averages = [v.numpy().ravel() for v in trainer.optimizer._model_variables_moving_average]
    np.testing.assert_allclose(np.concatenate(averages), average, atol=1e-6)
    trainer.optimizer.finalize_variable_values(trainer.model.trainable_variables)
    np.testing.assert_allclose(small.weights(trainer.model), average, atol=1e-6)


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
    former = make.from_config({**optimizer.get_config(), "microbatch_size": "auto"})
    assert former.microbatch_size is None  # As in files of tfdpx 0.2.


def test_make_private_returns_one_class_and_refuses_others():
    assert tfdpx.make_private(keras.optimizers.Lion) is tfdpx.make_private(keras.optimizers.Lion)
    assert tfdpx.make_private(keras.optimizers.Lion).__name__ == "DPLion"
    wrappers = [getattr(keras.optimizers, name) for name in WRAPPERS if name in OPTIMIZERS]
    for wrong in (tfdpx.DPSGD, *wrappers, int, keras.optimizers.SGD()):
        with pytest.raises(TypeError, match="make_private.*wraps no other"):
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
    ({"clipnorm": 1.0}, "l2_norm_clip"),
    ({"clipvalue": 1.0}, "l2_norm_clip"),
    ({"global_clipnorm": 1.0}, "l2_norm_clip"),
    ({"gradient_accumulation_steps": 2}, "microbatch_size"),
    ({"loss_scale_factor": 2.0}, "mixed_bfloat16"),
]


@pytest.mark.parametrize("private", [tfdpx.DPSGD, tfdpx.DPAdam, tfdpx.DPAdamW])
def test_a_signature_shows_the_arguments_with_the_defaults_of_keras(private):
    [base] = [c for c in private.__bases__ if c.__module__.startswith("keras")]
    shown = inspect.signature(private).parameters
    of_keras = inspect.signature(base).parameters
    places = [name for name, p in shown.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert places == list(of_keras)[: len(places)]
    assert {"learning_rate", "weight_decay"} <= set(places)
    for name in places:
        assert shown[name].default == of_keras[name].default
    assert shown["private"].annotation == "Unpack[PrivateArguments]"


def test_bad_arguments():
    for arguments, message in BAD:
        with pytest.raises(ValueError, match=message):
            tfdpx.DPSGD(0.1, **{**PRIVATE, **arguments})
    for name in ("batch_size", "noise_multiplier"):
        with pytest.raises(ValueError, match=f"{name}.*disagrees with the plan"):
            tfdpx.DPSGD(0.1, plan=PLAN, **{name: 7})
    with pytest.warns(UserWarning, match="no privacy guarantee"):
        tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=0.0)


def test_every_door_is_shut():
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
    for method, values in arguments.items():
        with pytest.raises(ValueError, match="did not come from the private step"):
            getattr(optimizer, method)(*values)
    np.testing.assert_array_equal(variable, [1.0, 2.0])


def test_errors_show_no_values_of_arrays():
    data = np.full((200, 3), 0.125), np.arange(200)
    shapes = r"\(<ndarray of shape \(200, 3\)>, <ndarray of shape \(200,\)>\)"
    for argument in ("public_data", "seed", "public_validation", "augment", "clipnorm"):
        with pytest.raises(ValueError, match=f"{argument}={shapes}") as error:
            tfdpx.DPSGD(0.1, **PRIVATE, **{argument: data})
        assert "0.125" not in str(error.value)


def test_a_keras_that_reduces_gradients_itself_is_refused(monkeypatch):
    monkeypatch.setattr(PrivateOptimizer, "all_reduce_sums", lambda self, pairs: pairs)
    with pytest.raises(RuntimeError, match="more than once"):
        small.step(small.model(), *small.data())
