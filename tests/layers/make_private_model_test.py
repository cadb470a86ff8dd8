import keras
import numpy as np
import pytest

import tfdpx
from tfdpx import account
from tfdpx.layers.private_model import CHANGES

GIVEN = {"num_examples": 64, "delta": 1e-3, "accountant": "rdp"}


def make_model(optimizer="adam", loss="mse", batch_norm=True, **arguments):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(6)])
    if batch_norm:
        model.add(keras.layers.BatchNormalization())
    model.add(keras.layers.Dense(3))
    model.compile(optimizer, loss, **arguments)
    return model


def private(model, **arguments):
    steps = {} if "epochs" in arguments else {"steps": 2}
    target = {} if "epsilon" in arguments else {"noise_multiplier": 1.0}
    return tfdpx.make_private_model(model, **{**GIVEN, **steps, **target, **arguments})


@pytest.mark.slow
def test_from_a_compiled_model_to_a_trained_private_one():
    metric = keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = make_model(loss=loss, metrics=["accuracy", metric])
    twin, plan = private(model, epsilon=8.0, epochs=2, batch_size=16)
    assert (plan.epsilon, plan.steps, plan.batch_size) == (8.0, 8, 16)
    assert plan.epsilon_at(plan.steps) <= 8.0
    assert [type(layer).__name__ for layer in twin.layers] == ["Dense", "GroupNorm", "Dense"]
    np.testing.assert_array_equal(model.layers[0].kernel, twin.layers[0].kernel)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=[64, 4]).astype("f4"), generator.integers(0, 3, 64)
    history = twin.fit(x, y, epochs=2, verbose=0).history
    assert set(history) == {"loss", "accuracy", "top2", "epsilon"} and len(history["top2"]) == 2
    assert twin.optimizer.ledger.steps == 8 and not twin.optimizer.epsilon_is_approximate
    # The original model is unchanged, and its metrics have seen no data.
    assert type(model.layers[1]) is keras.layers.BatchNormalization
    assert type(model.optimizer) is keras.optimizers.Adam and float(metric.result()) == 0.0


@pytest.mark.parametrize(
    "optimizer, name, attributes",
    [
        (keras.optimizers.SGD, "DPSGD", {"momentum": 0.9, "nesterov": True}),
        (keras.optimizers.Adam, "DPAdam", {"beta_1": 0.5}),
        (keras.optimizers.AdamW, "DPAdamW", {"weight_decay": 0.1}),
        (keras.optimizers.Lion, "DPLion", {"use_ema": True, "ema_momentum": 0.9}),
    ],
)
def test_the_optimizer_keeps_its_arguments(optimizer, name, attributes):
    model = make_model(optimizer(0.3, **attributes), batch_norm=False)
    twin, plan = private(model, l2_norm_clip=0.5, microbatch_size=8)
    assert twin is model and type(twin.optimizer).__name__ == name
    is_suggested = name in ("DPSGD", "DPAdam", "DPAdamW")
    assert (float(twin.optimizer.learning_rate) == pytest.approx(0.3)) != is_suggested
    assert {key: getattr(twin.optimizer, key) for key in attributes} == attributes
    assert twin.optimizer.plan == plan
    assert (twin.optimizer.l2_norm_clip, twin.optimizer.microbatch_size) == (0.5, 8)


def test_schedules_and_arguments_of_compile_stay():
    def loss(y, z):
        return keras.ops.mean(keras.ops.abs(y - z), axis=-1)

    def make():
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.2, 10, 0.5))
        return make_model(
            optimizer, loss, batch_norm=False, steps_per_execution=2, jit_compile=False
        )

    twin, _ = private(make())
    assert twin.loss is loss and twin.steps_per_execution == 2 and twin.jit_compile is False
    assert twin.optimizer.get_config()["learning_rate"]["class_name"] == "ExponentialDecay"
    assert twin.optimizer.plan.batch_size == 64  # Few examples make one full batch.
    assert float(private(make(), learning_rate=3.0)[0].optimizer.learning_rate) == 3.0


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (lambda: keras.Sequential([keras.Input([1])]), {}, "must be compiled"),
        (lambda: "model", {}, "`model` must be a keras.Model"),
        (lambda: make_model(keras.optimizers.SGD(clipnorm=1.0)), {}, "has clipn.*l2_norm_clip"),
        (lambda: private(make_model())[0], {}, "private already.*DPAdam"),
        (make_model, {"batch_size": 65}, "`batch_size` must not exceed"),
        (make_model, {"num_examples": 0}, "`num_examples` must be a positive integer"),
        (make_model, {"augmult": -1}, "`augmult` must be"),
        (make_model, {"without": ["relu"]}, r"`without` must be one of \['group_norm"),
    ],
)
def test_errors(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        private(make(), **arguments)


def image_model(norm=True, **arguments):
    layers = keras.layers
    inputs = keras.Input((9, 9, 2))
    x = layers.Conv2D(4, 3, padding="same", activation="relu", **arguments)(inputs)
    y = layers.Conv2D(4, 1, padding="same")(x)
    y = layers.ReLU()(layers.BatchNormalization()(y) if norm else y)
    x = layers.GlobalAveragePooling2D()(layers.Add()([x, y]))
    model = keras.Model(inputs, layers.Dense(3)(x))
    model.compile("sgd", "mse")
    return model


def kinds(model):
    return [type(layer).__name__ for layer in model.layers[1:]]


def test_a_network_of_images_is_changed_and_says_so(capsys, tmp_path):
    model = image_model()
    twin, _ = private(model)
    text = capsys.readouterr().out
    assert '("group_norm")' in text and '("pool")' in text and "Learning rate:" in text
    assert kinds(twin) == ["Conv2D", "Conv2D", "GroupNorm", "ReLU", "Add", "Sequential", "Dense"]
    assert twin.layers[-1].kernel.shape == (9 * 4, 3)
    np.testing.assert_array_equal(twin.layers[1].kernel, model.layers[1].kernel)
    images = np.random.default_rng(0).normal(size=[64, 9, 9, 2]).astype("float32")
    pooled = keras.Model(twin.inputs, twin.layers[-1].input)(images[:2])
    feature_map = keras.Model(twin.inputs, twin.layers[-3].output)(images[:2])
    by_hand = np.reshape(feature_map, (2, 3, 3, 3, 3, 4)).mean(axis=(2, 4)).reshape(2, -1)
    np.testing.assert_allclose(pooled, by_hand, atol=1e-6)
    twin.fit(images, np.eye(3)[np.arange(64) % 3], verbose=0)
    assert twin.optimizer.ledger.is_complete
    twin.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(images[:2]), twin(images[:2]), atol=1e-6)


def test_without_normalization_activations_are_bounded():
    model = image_model(norm=False)
    twin, _ = private(model)
    assert kinds(twin) == ["Conv2D", "Conv2D", "Activation", "Add", "Sequential", "Dense"]
    for layer in (twin.layers[1], twin.layers[3]):
        assert layer.activation is keras.activations.tanh
    for old, new in zip(model.layers[1].weights, twin.layers[1].weights, strict=True):
        np.testing.assert_array_equal(old, new)


def test_each_change_can_be_refused():
    assert "Sequential" not in kinds(private(image_model(), without="pool")[0])
    assert "Activation" not in kinds(private(image_model(norm=False), without=["tanh"])[0])
    model = image_model()
    twin, _ = private(model, without=(name for name in CHANGES if name != "group_norm"))
    assert kinds(twin) == [kind.replace("BatchNormalization", "GroupNorm") for kind in kinds(model)]
    for old, new in zip(model.trainable_variables, twin.trainable_variables, strict=True):
        np.testing.assert_array_equal(old, new)


def test_trained_weights_keep_their_layers():
    model = image_model(bias_initializer="uniform")
    assert "Sequential" not in kinds(private(model)[0])


def test_settings_that_are_left_out_are_those_of_suggest():
    twin, plan = tfdpx.make_private_model(image_model(), epsilon=8.0, num_examples=64, delta=1e-3)
    suggested = tfdpx.suggest(plan, twin)
    optimizer = twin.optimizer
    assert (plan.batch_size, plan.steps) == (suggested.batch_size, suggested.steps)
    assert float(optimizer.learning_rate) == pytest.approx(suggested.learning_rate)
    assert optimizer.l2_norm_clip == suggested.l2_norm_clip
    assert optimizer.use_ema and optimizer.ema_momentum == suggested.ema_momentum
    assert not private(image_model(), use_ema=False)[0].optimizer.use_ema
    model = image_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    twin, _ = tfdpx.make_private_model(model, epsilon=8.0, num_examples=64, delta=1e-3)
    rate = float(twin.optimizer.learning_rate)
    assert rate == pytest.approx(suggested.learning_rate / 10, rel=0.02)


def of_images(*layers, optimizer="sgd", loss="mse"):
    model = keras.Sequential([keras.Input((9, 9, 2)), *layers])
    model.compile(optimizer, loss)
    return model


def frozen_body():
    body = of_images(keras.layers.Conv2D(4, 3, activation="relu"))
    body.trainable = False
    return of_images(body, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(3))


L = keras.layers
KEPT = {
    "a frozen body": frozen_body,
    "layers behind the average": lambda: of_images(
        L.Conv2D(4, 3), L.GlobalAveragePooling2D(), L.Dense(5, "tanh"), L.Dense(3)
    ),
    "a counting output": lambda: of_images(L.Conv2D(4, 3), L.Flatten(), L.Dense(1, "relu")),
    "nothing to change": lambda: of_images(L.Conv2D(4, 3, activation="tanh"), L.Flatten()),
    "a loss that no file could name": lambda: of_images(
        L.Conv2D(4, 3), L.Flatten(), loss=lambda y, z: keras.ops.mean(y - z, axis=-1)
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_networks_that_no_change_suits_are_returned(name):
    model = KEPT[name]()
    assert private(model)[0] is model


def test_a_squeeze_of_channels_is_no_last_average():
    inputs = keras.Input((9, 9, 2))
    x = L.Conv2D(4, 3)(inputs)
    squeezed = L.Dense(4, "sigmoid")(L.GlobalAveragePooling2D()(x))
    x = L.GlobalAveragePooling2D()(L.Multiply()([x, L.Reshape((1, 1, 4))(squeezed)]))
    model = keras.Model(inputs, L.Dense(3)(x))
    model.compile("sgd", lambda y, z: keras.ops.mean(y - z, axis=-1))
    twin, _ = private(model)
    assert [kind for kind in kinds(model) if kind not in kinds(twin)] == []
    assert kinds(twin).count("Sequential") == 1 and twin.output_shape == (None, 3)
    assert model.compiled and twin.compiled


def test_operations_keep_their_arguments():
    inputs = keras.Input((9, 9, 2))
    x = keras.ops.mean(L.BatchNormalization()(inputs), axis=(1, 2))
    assert tfdpx.layers.replace_batch_norm(keras.Model(inputs, x)).output_shape == (None, 2)


@pytest.mark.parametrize("is_private", [True, False])
def test_a_changed_twin_keeps_the_account_of_earlier_trainings(is_private):
    model = of_images(
        L.Conv2D(4, 3, use_bias=False), L.GlobalAveragePooling2D(), L.Dense(3, None, False)
    )
    plan = tfdpx.PrivacyPlan(16, 8, 2, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    model.compile(tfdpx.DPSGD(0.1, plan=plan) if is_private else "sgd", "mse")
    model.fit(np.zeros([16, 9, 9, 2]), np.zeros([16, 3]), verbose=0)
    model.compile("sgd", "mse")
    twin, _ = private(model)
    assert twin is not model
    ledger = account.ledger_of(twin.weights)
    assert (ledger.steps, ledger.is_complete) == ((2, True) if is_private else (0, False))
