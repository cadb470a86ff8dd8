"""`warm_start`: a start on generated images, which the account takes for new weights."""

import keras
import numpy as np
import pytest

import tfdpx
from tfdpx import account, synthetic

SHAPE = (8, 8, 1)
PLAN = tfdpx.PrivacyPlan(32, 16, 2, noise_multiplier=1.0, delta=1e-3, accountant="rdp")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(synthetic, "_IMAGES", 8)
    monkeypatch.setattr(synthetic, "_UPDATES", 3)


def network(shape=SHAPE, head=True, **arguments):
    layers = [keras.Input(shape, **arguments), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    return keras.Sequential(layers + [keras.layers.Dense(3)] * head)


def is_new(model):
    ledger = account.ledger_of(model.weights)
    return ledger.is_complete and not ledger.entries


def trained(model):
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN), "mse")
    model.fit(np.zeros([32, *SHAPE], "float32"), np.zeros([32, 3]), verbose=0)
    return model


def loaded(model, path):
    model.save_weights(path)
    model.load_weights(path)
    return model


def test_all_but_the_last_layer_are_trained_and_are_new_to_the_account(tmp_path):
    model = network()
    before = model.get_weights()
    assert synthetic.warm_start(model) is model and is_new(model)
    changed = [np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert changed == [True, True, False, False]
    tfdpx.layers.trainable(model, "last")
    ledger = trained(model).optimizer.ledger
    assert ledger.is_complete and ledger.steps == 2
    tfdpx.report(model, tmp_path, data="zeros")


def test_a_nested_classifier_and_colours():
    inputs = keras.Input((8, 8, 3), dtype="uint8")
    body = network((8, 8, 3))
    grey = keras.layers.Rescaling(1 / 255)(inputs)
    model = keras.Model(inputs, body(grey))
    before = body.get_weights()
    synthetic.warm_start(model, synthetic.DeadLeaves(8, 3))
    assert np.any(before[0] != body.get_weights()[0]) and is_new(model)


@pytest.mark.parametrize(
    "dtype, factor, largest", [("uint8", 1.0, 255), ("float32", 1 / 255, 255), ("float32", 1, 1)]
)
def test_pixels_have_the_range_that_the_model_takes(monkeypatch, dtype, factor, largest):
    layers = [keras.layers.Rescaling(factor)] if factor < 1 else []
    parts = [
        keras.Input(SHAPE, dtype=dtype),
        *layers,
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    greatest = []
    monkeypatch.setattr(synthetic.Strokes, "draw", lambda self, rng: np.ones(SHAPE))

    def fit(self, data, **arguments):
        greatest.append(max(float(np.max(x)) for x, _ in data.take(2)))

    monkeypatch.setattr(keras.Model, "fit", fit)
    synthetic.warm_start(keras.Sequential(parts))
    assert greatest == pytest.approx([largest], rel=1e-3)


def test_an_interrupted_start_leaves_weights_of_unknown_origin(monkeypatch):
    def stop(*arguments, **others):
        raise KeyboardInterrupt

    model = network()
    monkeypatch.setattr(synthetic.origins, "mark_known", stop)
    with pytest.raises(KeyboardInterrupt):
        synthetic.warm_start(model)
    assert not account.ledger_of(model.weights).is_complete


class Private(synthetic.Strokes):
    """A generator that could return private images."""


def frozen():
    model = network()
    model.layers[0].trainable = False
    return model


def of_two_outputs():
    inputs = keras.Input(SHAPE)
    x = keras.layers.Flatten()(inputs)
    return keras.Model(inputs, [keras.layers.Dense(2)(x), keras.layers.Dense(3)(x)])


def test_an_ordinary_training_afterwards_is_unknown_and_ends_warm_starts():
    model = synthetic.warm_start(network())
    model.compile("sgd", "mse")
    model.fit(np.zeros([32, *SHAPE], "float32"), np.zeros([32, 3]), verbose=0)
    assert not account.ledger_of(model.weights).is_complete
    with pytest.raises(ValueError, match="has weights of unknown origin"):
        synthetic.warm_start(model)


def adapted():
    layer = keras.layers.Normalization()
    layer.adapt(np.arange(12.0).reshape(3, 4))
    layers = [keras.Input((2, 2, 4)), layer, keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential(layers)


@pytest.mark.parametrize(
    "make, images, message",
    [
        (lambda path: trained(network()), "auto", "was trained privately before"),
        (lambda path: loaded(network(), path), "auto", "has weights of unknown origin"),
        (lambda path: adapted(), "auto", "adapted layer 'normalization"),
        (
            lambda path: keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]),
            "auto",
            "be a Functional or Sequential",
        ),
        (lambda path: "model", "auto", "be a Functional or Sequential"),
        (lambda path: network(), synthetic.Strokes(9), r"images of shape \(8, 8, 1\)"),
        (lambda path: network(), "strokes", 'or "auto"'),
        (lambda path: network(), Private(8), "be Strokes or DeadLeaves"),
        (lambda path: frozen(), "auto", "has frozen layers"),
        (lambda path: of_two_outputs(), "auto", "with one output"),
    ],
)
def test_errors(make, images, message, tmp_path):
    keras.utils.clear_session()
    with pytest.raises(ValueError, match=message):
        synthetic.warm_start(make(str(tmp_path / "a.weights.h5")), images)
