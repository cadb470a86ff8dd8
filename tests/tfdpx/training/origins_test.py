"""The ledger reports weights of an unknown origin, and only those."""

import contextlib
import copy
import functools
import pickle
import warnings

import copies
import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx
from tfdpx._keras import hook, origins
from tfdpx.accounting import Ledger

N, B = 60, 20
PLAN = tfdpx.PrivacyPlan(N, batch_size=B, steps=12, noise_multiplier=2.0, delta=1e-3)


def bare():
    """Returns a model of new weights, without an optimizer."""
    layers = keras.layers
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, "relu"), layers.Dense(3)])


def compiled(model, optimizer=None):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpx.DPSGD(0.1, plan=PLAN) if optimizer is None else optimizer
    model.compile(optimizer, loss=loss, run_eagerly=True)  # A trace costs more than these updates.
    return model


def is_complete(model):
    return model.optimizer.ledger.is_complete


def train(model, steps=1, **arguments):
    arguments = {"steps_per_epoch": steps, "verbose": 0, **arguments}
    return model.fit(PLAN.batches(*small.data(N)), **arguments)


@pytest.fixture(scope="module")
def trained():
    """Returns a model after 2 private updates."""
    model = compiled(bare())
    train(model, 2)
    return model


# Ways to get weights of an unknown origin. Each takes a model and a folder.


def file_of_weights(model, folder):
    bare().save_weights(folder / "m.weights.h5")
    model.load_weights(folder / "m.weights.h5")


def file_with_another_optimizer(model, folder):
    compiled(bare(), "adam").save(folder / "m.keras")
    model.load_weights(folder / "m.keras")


def old_file_of_weights(model, folder):
    compiled(bare(), "adam").save(folder / "m.h5")
    model.load_weights(folder / "m.h5", by_name=True)


def file_of_arrays(model, folder):
    np.savez(folder / "m.npz", *bare().get_weights())
    with np.load(folder / "m.npz") as saved:
        model.set_weights([saved[name] for name in saved.files])


def arrays_of_one_layer(model, folder):
    model.layers[-1].set_weights([np.ones([5, 3]), np.zeros(3)])


def arrays_that_do_not_fit(model, folder):
    with pytest.raises(ValueError):
        model.set_weights([np.ones(v.shape) for v in model.weights[:-1]] + [np.ones(7)])


def tree_of_states(model, folder):
    states = {v.path: np.ones(v.shape) for v in model.trainable_variables}
    tree = {}
    for path, value in states.items():
        layer, name = path.split("/")[-2:]
        tree.setdefault(layer, {})[name] = value
    model.set_state_tree({"trainable_variables": tree})


def ordinarily(model, train):
    optimizer = getattr(model, "optimizer", None)
    train(compiled(model, "sgd"), *small.data(8))
    if optimizer is not None:
        compiled(model, optimizer)


def ordinary_fit(model, folder):
    ordinarily(model, lambda model, x, y: model.fit(x, y, verbose=0))


def ordinary_batch(model, folder):
    ordinarily(model, keras.Model.train_on_batch)


def ordinary_loop(model, folder):
    optimizer, (x, _) = keras.optimizers.SGD(0.1), small.data(8)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def checkpoint_without_optimizer(model, folder):
    path = tf.train.Checkpoint(model=bare()).save(str(folder / "c"))
    tf.train.Checkpoint(model=model).restore(path)


def file_that_does_not_fit(model, folder):
    other = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(4)])
    other.save_weights(folder / "m.weights.h5")
    with pytest.raises(ValueError, match="shape"):
        model.load_weights(folder / "m.weights.h5")


UNSEEN = [
    file_of_weights,
    file_with_another_optimizer,
    old_file_of_weights,
    file_of_arrays,
    arrays_of_one_layer,
    arrays_that_do_not_fit,
    tree_of_states,
    ordinary_fit,
    ordinary_batch,
    ordinary_loop,
    checkpoint_without_optimizer,
    file_that_does_not_fit,
]


@pytest.mark.parametrize("way", UNSEEN, ids=lambda way: way.__name__)
def test_weights_of_unseen_origin_leave_the_ledger_incomplete(way, tmp_path):
    before = bare()
    way(before, tmp_path)
    assert not is_complete(compiled(before))
    model = bare()
    assert is_complete(compiled(model))
    way(model, tmp_path)
    assert not is_complete(model)
    assert model.optimizer.ledger.epsilon(1e-3) == 0.0  # The known part.
    tfdpx.checks.mark_public(model)
    assert is_complete(model)
    way(model, tmp_path)
    if way is not ordinary_batch:
        assert not is_complete(compiled(model))


@contextlib.contextmanager
def before_import():
    """Context manager in which Keras is as it is before `import tfdpx`."""
    hook.uninstall()
    try:
        yield
    finally:
        hook.install()


@pytest.mark.parametrize("how", ["made", "loaded"])
def test_a_model_from_before_the_import_is_of_unseen_origin(how, tmp_path):
    bare().save(tmp_path / "m.keras")
    with before_import():
        model = bare() if how == "made" else keras.saving.load_model(tmp_path / "m.keras")
    compiled(model)
    with pytest.warns(UserWarning, match="Import tfdpx first, and make the model again"):
        train(model)
    with pytest.raises(ValueError, match="or from before `import tfdpx`"):
        tfdpx.report(model, tmp_path / "report", data="rows")
    tfdpx.checks.mark_public(model)
    assert is_complete(model) and model.optimizer.ledger.steps == 1


class MyInitializer(keras.initializers.Zeros):
    """May return anything."""


FOUND = np.ones([6, 3], "float32")  # In private data, perhaps.


class Shift(keras.layers.Layer):
    """Makes a variable of an array."""

    def build(self, shape):
        self.shift = keras.Variable(FOUND[0], trainable=False)

    def call(self, x):
        return x + self.shift


def dense(initializer):
    return lambda: keras.layers.Dense(3, kernel_initializer=initializer)


def lstm(initializer):
    """Keras joins the initializer to its own one."""
    return lambda: keras.layers.LSTM(3, bias_initializer=initializer)


HOLDING = {
    "Constant": dense(keras.initializers.Constant(FOUND)),
    "array": dense(keras.initializers.get(FOUND)),
    "list": dense(keras.initializers.Constant(FOUND[0].tolist())),
    "lambda": dense(lambda shape, dtype=None: FOUND),
    "partial": dense(functools.partial(np.full, fill_value=0.5)),
    "subclass": dense(MyInitializer()),
    "Constant in LSTM": lstm(keras.initializers.Constant(FOUND[0, :1])),
    "lambda in LSTM": lstm(lambda shape, dtype=None: np.resize(FOUND[0], shape)),
    "variable": Shift,
    "weights": lambda: keras.layers.Embedding(6, 3, weights=[FOUND]),
}


@pytest.mark.parametrize("name", HOLDING)
def test_a_layer_that_may_be_made_with_data_is_of_unseen_origin(name):
    shape = {"Embedding": (2,), "LSTM": (None, 6), "Shift": (3,)}
    layer = HOLDING[name]()
    inputs = keras.Input(shape.get(type(layer).__name__, (6,)))
    assert not is_complete(compiled(keras.Sequential([inputs, layer, keras.layers.Dense(2)])))


def test_initializers_of_keras_are_of_known_origin():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((4, 6)),
            layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
            layers.BatchNormalization(renorm=True),
            layers.Conv1D(2, 3, kernel_initializer=keras.initializers.Orthogonal(0.5, seed=1)),
            layers.EinsumDense("abc,cd->abd", [2, 4]),  # Its initializer knows axes.
            layers.Flatten(),
            layers.Dropout(0.1),
            layers.Dense(3, bias_initializer=keras.initializers.Constant(0.5)),
        ]
    )
    assert is_complete(compiled(model))


class Freezing(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        for layer in self.model.layers:
            layer.trainable = False


class Thawing(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.layers[0].trainable = True
        self.model.layers[0].kernel.assign_add(tf.ones([6, 5]))
        self.model.layers[0].trainable = False


def test_an_ordinary_fit_leaves_no_state_known_that_it_changed():
    def normalized():
        layers = [keras.layers.Dense(5), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *layers])

    def features_of(model):
        """Returns a model of other weights after the first two layers of `model`, frozen."""
        body = keras.Model(model.inputs, model.layers[1].output)
        body.trainable = False
        return compiled(keras.Sequential([body, keras.layers.Dense(3)]))

    for callback in (Freezing(), None):
        model = normalized()
        compiled(model, "sgd").fit(*small.data(8), verbose=0, callbacks=callback)
        tfdpx.checks.mark_public(model.layers[0])  # The moving statistics know the data, too.
        assert not is_complete(features_of(model))
    for callback, known in ((None, True), (Thawing(), False)):
        model = normalized()
        model.layers[0].trainable = model.layers[1].trainable = False
        compiled(model, "sgd").fit(*small.data(8), verbose=0, callbacks=callback)
        assert is_complete(features_of(model)) == known  # Frozen layers keep their values.


def test_a_layer_that_a_file_skips_keeps_its_origin(trained, tmp_path):
    trained.save_weights(tmp_path / "m.weights.h5")
    for is_fitted in (True, False):
        model = bare()
        if is_fitted:
            ordinary_fit(model, tmp_path)
        model.load_weights(tmp_path / "m.weights.h5", objects_to_skip=[model.layers[0]])
        assert is_complete(compiled(model)) != is_fitted and model.optimizer.ledger.steps == 2
        fresh, loaded = (origins.mark_of(layer.kernel).is_known for layer in model.layers)
        assert loaded and fresh != is_fitted


def test_a_shallow_copy_of_a_variable_has_not_its_mark():
    kernel = bare().weights[0]
    assert origins.mark_of(kernel).is_known and not origins.mark_of(copy.copy(kernel)).is_known


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_without_an_optimizer_are_of_unseen_origin(duplicate, trained):
    backbone = keras.Model(trained.inputs, trained.layers[0].output)
    assert not is_complete(compiled(duplicate(backbone)))


# More ways to get weights together with their ledger. Each takes a trained model and a folder.


def built():
    model = compiled(bare())
    model.optimizer.build(model.trainable_variables)
    return model


def by_file_before_compile(model, folder):
    model.save_weights(folder / "m.weights.h5")
    loaded = bare()
    loaded.load_weights(folder / "m.weights.h5")
    return compiled(loaded)


def by_loading_without_optimizer(model, folder):
    model.save(folder / "m.keras")
    return compiled(keras.saving.load_model(folder / "m.keras", compile=False))


def by_copy_weights(model, folder):
    clone = keras.models.clone_model(model)
    tfdpx.copy_weights(model, clone)
    return compiled(clone)


SEEN = {
    **{name: functools.partial(way, fresh=built) for name, way in copies.WAYS.items()},
    "weights before compile": by_file_before_compile,
    "loading without optimizer": by_loading_without_optimizer,
    "copy_weights": by_copy_weights,
    "replace_batch_norm": lambda model, _: compiled(tfdpx.layers.replace_batch_norm(model)),
    "compile": lambda model, _: compiled(keras.Sequential(model.layers)),
}


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("way", SEEN)
def test_ledgers_that_can_be_seen_go_with_the_weights(way, trained, tmp_path):
    ledger = SEEN[way](trained, tmp_path).optimizer.ledger
    assert ledger == trained.optimizer.ledger and ledger.is_complete and ledger.steps == 2


@pytest.mark.filterwarnings("ignore:Skipping variable loading")
@pytest.mark.parametrize("way", SEEN)
def test_an_unknown_origin_goes_with_the_weights(way, tmp_path):
    model = compiled(bare())
    file_of_arrays(model, tmp_path)
    other = SEEN[way](model, tmp_path)
    assert not is_complete(other)
    tfdpx.checks.mark_public(other)
    assert is_complete(other)
    assert is_complete(SEEN[way](other, tmp_path))


def test_fresh_weights_have_nothing_to_bring(trained):
    assert is_complete(compiled(bare()))
    clone = compiled(keras.models.clone_model(trained))
    assert clone.optimizer.ledger == Ledger()


@pytest.mark.slow
def test_callbacks_of_one_training_leave_it_complete(tmp_path):
    class Last(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            self.complete = is_complete(self.model)

    optimizer = tfdpx.DPSGD(0.1, plan=PLAN, use_ema=True, public_validation=True)
    model = compiled(bare(), optimizer)
    best = keras.callbacks.EarlyStopping(
        "val_loss", patience=0, min_delta=9.0, start_from_epoch=0, restore_best_weights=True
    )
    callbacks = [
        tfdpx.callbacks.Checkpoint(tmp_path / "checkpoint"),
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
        keras.callbacks.SwapEMAWeights(),
        best,
        last := Last(),
    ]
    rng = np.random.default_rng(1)
    held_out = rng.normal(size=[8, 6]).astype("float32"), rng.integers(3, size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 2, epochs=3, validation_data=held_out, callbacks=callbacks)
    assert best.stopped_epoch and last.complete and is_complete(model)
    resumed = compiled(bare(), tfdpx.DPSGD(0.1, plan=PLAN, use_ema=True))
    train(resumed, 2, epochs=3, callbacks=callbacks[:1])
    assert resumed.optimizer.ledger.steps > 4 and is_complete(resumed)
    assert is_complete(keras.saving.load_model(tmp_path / "m.keras"))


def test_arrays_that_are_set_beside_early_stopping_are_of_unseen_origin():
    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.set_weights([np.ones(w.shape) for w in self.model.get_weights()])

    model, (x, y) = (
        compiled(bare(), tfdpx.DPSGD(0.1, plan=PLAN, public_validation=True)),
        small.data(8),
    )
    stop = keras.callbacks.EarlyStopping("val_loss", restore_best_weights=True)
    train(model, callbacks=[stop, Sets()], validation_data=(x + 1, y))
    assert stop.best_weights and not is_complete(model)


@pytest.mark.slow
def test_training_from_unknown_weights_warns_once_and_names_the_remedy(tmp_path):
    model = compiled(bare())
    file_of_arrays(model, tmp_path)
    with pytest.warns(UserWarning, match=r"without a ledger.*checks\.mark_public\(model\)"):
        train(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model)
    assert not is_complete(model) and model.optimizer.ledger.steps == 2
    tfdpx.checks.mark_public(model)
    assert is_complete(model) and model.optimizer.ledger.steps == 2
    file_of_weights(model, tmp_path)
    with pytest.warns(UserWarning, match="source without a ledger"):
        model.train_on_batch(*small.data(B))


def test_weights_that_came_together_are_declared_together(tmp_path):
    model = compiled(bare())
    file_of_arrays(model, tmp_path)
    tfdpx.checks.mark_public(model.layers[0])  # The other layer is still undeclared.
    assert not is_complete(model)
    backbone, head = keras.layers.Dense(5), keras.layers.Dense(3)
    model = compiled(keras.Sequential([keras.Input((6,)), backbone, head]))
    for layer in (backbone, head):
        layer.set_weights([np.ones(v.shape) for v in layer.weights])
    tfdpx.checks.mark_public(backbone)
    assert not is_complete(model)
    train(model)  # Now the account is of both.
    tfdpx.checks.mark_public(backbone)
    assert not is_complete(model)
    tfdpx.checks.mark_public(head)
    assert is_complete(model)


@pytest.mark.filterwarnings("ignore:Weights of this model")
def test_what_trains_behind_unknown_weights_becomes_unknown():
    body, head = keras.layers.Dense(5), keras.layers.Dense(3)
    model = compiled(keras.Sequential([keras.Input((6,)), body, head]))
    body.set_weights([np.ones([6, 5]), np.zeros(5)])
    train(model)
    assert not is_complete(compiled(keras.Sequential([keras.Input((5,)), head])))


def test_public_needs_a_layer_with_values():
    with pytest.raises(TypeError, match="keras.Layer"):
        tfdpx.checks.mark_public(np.ones(3))
    with pytest.raises(ValueError, match="no values yet"):
        tfdpx.checks.mark_public(keras.layers.Dense(3))


def test_hdf5_is_refused_for_private_models(trained, tmp_path):
    for name in ("m.h5", "m.hdf5"):
        for arguments in ({}, {"include_optimizer": False}):
            with pytest.raises(ValueError, match=r"no room for the ledger.*model\.keras"):
                trained.save(tmp_path / name, **arguments)
            with pytest.raises(ValueError, match="no room for the ledger"):
                keras.saving.save_model(trained, tmp_path / name, **arguments)
        assert not (tmp_path / name).exists()
    save = keras.callbacks.ModelCheckpoint(tmp_path / "m.h5")
    with pytest.raises(ValueError, match="no room for the ledger"):
        train(copy.deepcopy(trained), callbacks=[save])
    compiled(bare(), "sgd").save(tmp_path / "m.h5")  # The rule is not for other optimizers.
    assert keras.saving.load_model(tmp_path / "m.h5").optimizer.learning_rate == 0.01


def test_hdf5_of_private_models_that_was_saved_before_is_refused(trained, tmp_path):
    with before_import():
        trained.save(tmp_path / "m.h5")
    with pytest.raises(ValueError, match=r"no room for the ledger.*compile=False"):
        keras.saving.load_model(tmp_path / "m.h5")
    loaded = compiled(keras.saving.load_model(tmp_path / "m.h5", compile=False))
    assert not is_complete(loaded)
    loaded = compiled(bare())
    loaded.load_weights(tmp_path / "m.h5")
    assert not is_complete(loaded)
