"""What may act on validation metrics: only if the examples are seen, or said, not to be private."""

import collections
import functools
import json

import keras
import numpy as np
import pytest
import small
import tensorflow as tf

import tfdpx

N, B, STEPS = 40, 10, 4


def make_plan(steps):
    return tfdpx.PrivacyPlan(N, batch_size=B, steps=steps, noise_multiplier=2.0, delta=1e-3)


SHORT, PLAN = make_plan(STEPS), make_plan(200)  # For one training, and for all that share a model.
X, Y = small.data(N)
OTHER = X[:20] + 1, Y[:20]
Objective = collections.namedtuple("Objective", "name direction")


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, count=4):
        super().__init__()
        self._x, self._y, self._count = x, y, count

    @property
    def num_batches(self):
        return self._count

    def __getitem__(self, i):
        rows = slice(i * len(self._x) // 4, (i + 1) * len(self._x) // 4)
        return self._x[rows], self._y[rows]


class Source:
    """Counts how often each example is read."""

    def __init__(self, x=X, y=Y):
        self._x, self._y, self.reads = x, y, collections.Counter()

    def __len__(self):
        return len(self._x)

    def __getitem__(self, i):
        self.reads[i] += 1
        return self._x[i], int(self._y[i])


class Acts(keras.callbacks.Callback):
    """With the attributes of Optuna's pruning callback, KerasTuner's `SaveBestEpoch` and others."""

    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)


def dataset(x, y, batch=7):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def make(plan=PLAN, **arguments):
    model = small.model(tfdpx.DPSGD(0.1, plan=plan, **arguments))
    model.build((None, 6))
    return model


@functools.cache
def shared(public_validation=False):
    """A model that is traced once, for all tests that need no other."""
    return make(public_validation=public_validation)


def fit(validation_data=None, callbacks=None, x=None, model=None, **arguments):
    """Trains; whether `fit` refuses or ends, nothing may be half done."""
    model = model or shared()
    before, taken = small.weights(model), model.optimizer.ledger.steps
    callbacks = [keras.callbacks.EarlyStopping("val_loss")] if callbacks is None else callbacks
    arguments = {"steps_per_epoch": STEPS, "verbose": 0, **arguments}
    try:
        model.fit(
            PLAN.batches(X, Y) if x is None else x,
            validation_data=validation_data, callbacks=callbacks, **arguments,
        )  # fmt: skip
    except ValueError:
        assert model.optimizer.ledger.steps == taken
        np.testing.assert_array_equal(small.weights(model), before)
        raise
    assert model.optimizer.ledger.steps == taken + STEPS
    return model


mixed_order = np.random.default_rng(1).permutation(N)
one_of_many = np.concatenate([OTHER[0], X[7:8]]), np.concatenate([OTHER[1], Y[:1]])

PRIVATE = {
    "the same arrays": ((X, Y), 40, 40),
    "a copy": ((X.copy(), Y), 40, 40),
    "a slice": ((X[5:9], Y[5:9]), 4, 4),
    "another order": ((X[mixed_order], Y[mixed_order]), 40, 40),
    "one of many": (one_of_many, 1, 21),
    "one of many, twice": (tuple(np.concatenate([part] * 2) for part in one_of_many), 2, 42),
    "other labels": ((X[:9], (Y[:9] + 1) % 3), 9, 9),
    "float64": ((X.astype("float64"), Y), 40, 40),
    "tensors and weights": ((tf.constant(X), Y, np.zeros(N)), 40, 40),
    "a list": ([X, Y], 40, 40),
    "batches": (dataset(X, Y), 40, 40),
    "batches in another order": (dataset(X, Y).shuffle(9), 40, 40),
    "prefetched": (dataset(X, Y).cache().prefetch(2), 40, 40),
    "batches of the plan": (PLAN.batches(X, Y), 40, 40),
    "a PyDataset": (Batches(X, Y), 40, 40),
}


@pytest.mark.parametrize("how", PRIVATE)
def test_examples_that_are_trained_on(how):
    data, common, total = PRIVATE[how]
    with pytest.raises(ValueError) as error:
        fit(data)
    assert str(error.value) == (
        "EarlyStopping would act on validation metrics that the privacy guarantee does not cover: "
        f"{common} of the {total} examples of `validation_data` are private ones too. Received: "
        "monitor='val_loss'. Validate on public examples alone; or, if these are public, make the "
        "optimizer with `public_validation=True`."
    )


def test_the_word_allows_it_and_measuring_needs_none():
    for data in ((X, Y), dataset(X, Y)):
        fit(data, model=shared(public_validation=True))
        fit(data, callbacks=[])


def test_public_examples_are_acted_on():
    weighted = (*OTHER, np.ones(20))
    for data in (OTHER, weighted, dataset(*OTHER), Batches(*OTHER), None):
        stop = keras.callbacks.EarlyStopping("val_loss", patience=9)
        fit(data, [stop])
        assert (stop.best is not None and np.isfinite(stop.best)) == (data is not None)


UNREADABLE = {
    "generator": lambda: (pair for pair in [OTHER] * 9),
    "_RepeatDataset": lambda: dataset(*OTHER).repeat(),
    "_FilterDataset": lambda: dataset(*OTHER).filter(lambda x, y: True),
    "Batches": lambda: Batches(*OTHER, count=None),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_twice_needs_a_word(kind):
    with pytest.raises(ValueError, match=f"`validation_data` of type {kind} cannot be compared"):
        fit(UNREADABLE[kind]())


def test_a_generator_is_not_used_up():
    left = UNREADABLE["generator"]()
    with pytest.raises(ValueError):
        fit(left)
    assert len(list(left)) == 9
    fit(UNREADABLE["generator"](), model=shared(public_validation=True), validation_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"sample_weight": np.ones(N)}])
def test_arrays_that_fit_itself_is_given(more):
    arguments = {"x": X, "y": Y, "batch_size": B, **more}
    with pytest.raises(ValueError, match="4 of the 4 examples"):
        fit((X[:4], Y[:4]), **arguments)
    fit(OTHER, **arguments)


def test_training_data_that_cannot_be_read_needs_a_word():
    for x in (dataset(X, Y, B), PLAN.batches(X, Y).map(lambda x, y, w: (x, y, w)), Batches(X, Y)):
        with pytest.raises(ValueError, match="what is trained on, which is of type"):
            fit(OTHER, x=x)
    with pytest.raises(ValueError, match="allow_approximate=True"):
        fit(OTHER, x=x, model=shared(public_validation=True))


SPLITS = {
    "of a plan": lambda x, y: {"x": PLAN.batches(x, y, validation_split=0.2)},
    "of fit": lambda x, y: {"x": x, "y": y, "batch_size": B, "validation_split": 0.2},
}


@pytest.mark.parametrize("how", SPLITS)
def test_the_part_that_is_held_out_is_private(how):
    x, y = small.data(50)
    with pytest.raises(ValueError, match="`validation_split` are held out of the private ones"):
        fit(**SPLITS[how](x, y))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=9)
    fit(model=shared(public_validation=True), callbacks=[stop], **SPLITS[how](x, y))
    assert np.isfinite(stop.best)


def test_the_part_that_is_held_out_given_as_arrays():
    x, y = small.data(50)
    with pytest.raises(ValueError, match="3 of the 3 examples"):
        fit((x[47:], y[47:]), x=PLAN.batches(x, y, validation_split=0.2))
    fit(OTHER, x=PLAN.batches(x, y, validation_split=0.2))


ACTING = {
    "EarlyStopping": lambda folder: keras.callbacks.EarlyStopping("val_loss"),
    "ReduceLROnPlateau": lambda folder: keras.callbacks.ReduceLROnPlateau("val_loss"),
    "ModelCheckpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "m.keras", monitor="val_loss", save_best_only=True
    ),
    "in a name": lambda folder: keras.callbacks.ModelCheckpoint(folder / "m-{val_loss:.2f}.keras"),
    "in an attribute": lambda folder: Acts(inner={"a": [keras.callbacks.EarlyStopping()]}),
    "Optuna": lambda folder: Acts(_monitor="val_loss", _trial=None),
    "KerasTuner": lambda folder: Acts(objective=Objective("val_loss", "min")),
    "nested": lambda folder: [[keras.callbacks.EarlyStopping("val_loss")]],
}


@pytest.mark.parametrize("how", ACTING)
def test_whatever_acts_is_refused_before_anything_is_written(how, tmp_path):
    callback = ACTING[how](tmp_path)
    log = [keras.callbacks.CSVLogger(tmp_path / "log.csv"), tfdpx.callbacks.Checkpoint(tmp_path)]
    with pytest.warns(UserWarning, match="CSVLogger writes"):
        with pytest.raises(ValueError, match="40 of the 40 examples"):
            fit((X, Y), [*log, callback], validation_freq=5)
    assert not list(tmp_path.iterdir())
    if how in ("ReduceLROnPlateau", "ModelCheckpoint", "in a name"):
        fit(OTHER, [callback])


def test_what_does_not_act_is_allowed(tmp_path):
    folder = tmp_path / "backup"
    fit((X, Y), [
        keras.callbacks.ModelCheckpoint(tmp_path / "m-{epoch}.keras", monitor="val_loss"),
        keras.callbacks.BackupAndRestore(folder),
        tfdpx.callbacks.PrivacyBudget(PLAN),
        keras.callbacks.EarlyStopping("epsilon", mode="max"),
    ])  # fmt: skip


def test_without_noise_there_is_nothing_to_guard():
    with pytest.warns(UserWarning, match="epsilon is infinite"):
        model = small.model(batch_size=B, noise_multiplier=0.0)
    model.fit(X, Y, B, validation_data=(X, Y), callbacks=[keras.callbacks.EarlyStopping()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [lambda x, y: (x, y), dataset])
def test_several_inputs(kind):
    a, b = keras.Input([3], name="a"), keras.Input([3], name="b")
    model = keras.Model({"a": a, "b": b}, keras.layers.Dense(3)(keras.layers.concatenate([a, b])))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN), loss)
    named = {"a": X[:, :3], "b": X[:, 3:]}
    part = {name: values[3:5] for name, values in named.items()}
    with pytest.raises(ValueError, match="2 of the 2 examples"):
        fit(kind(part, Y[3:5]), x=PLAN.batches(named, Y), model=model)
    half = {"a": named["a"][:9], "b": named["b"][:9] + 1}  # One of two inputs is another.
    fit(kind(half, Y[:9]), x=PLAN.batches(named, Y), model=model)


@pytest.mark.slow
def test_images_of_bytes_and_of_floats():
    x = np.random.default_rng(0).integers(0, 256, [N, 4, 4, 1]).astype("uint8")

    layers = [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN), layers)
    model.build((None, 4, 4, 1))
    for same in (x, x.astype("float32"), x.astype("int64"), x[..., 0]):
        with pytest.raises(ValueError, match="40 of the 40 examples"):
            fit((same, Y), x=PLAN.batches(x, Y), model=model)
    fit((x[:5] ^ 1, Y[:5]), x=PLAN.batches(x, Y), model=model)


def test_strings():
    words, known = np.array([f"word {i}" for i in range(N)]), [f"word {i}" for i in range(60)]
    lookup = keras.layers.StringLookup(vocabulary=known)
    stack = [keras.Input([1], dtype="string"), lookup, keras.layers.Embedding(61, 3)]
    stack += [keras.layers.Flatten(), keras.layers.Dense(3)]
    model = small.model(tfdpx.DPSGD(0.1, plan=PLAN), stack)
    with pytest.raises(ValueError, match="2 of the 3 examples"):
        data = np.array([["word 1"], ["word 50"], ["word 9"]]), Y[:3]
        fit(data, x=PLAN.batches(words[:, None], Y), model=model)


def test_views_that_were_made_before():
    """With augmult and no augmentation an example is K views, each as the model sees it."""
    views = np.stack([X, X + 5], axis=1)
    model = make(augmult=2)
    with pytest.raises(ValueError, match="6 of the 6 examples"):
        fit((X[:6] + 5, Y[:6]), x=PLAN.batches(views, Y), model=model)
    fit(OTHER, x=PLAN.batches(views, Y), model=model)


@pytest.mark.slow
def test_examples_on_disk_are_read_once_and_only_for_what_acts(capsys, tmp_path):
    source = Source()
    batches = SHORT.batches(tfdpx.RandomAccess(source))
    source.reads.clear()
    with pytest.raises(ValueError, match="1 of the 21 examples"):
        fit(one_of_many, x=batches, model=make(SHORT))
    assert set(source.reads.values()) == {1} and len(source.reads) == N
    assert "tfdpx reads the 40 examples of the RandomAccess once" in capsys.readouterr().out
    source.reads.clear()
    model = make(SHORT)
    board = tfdpx.callbacks.TensorBoard(tmp_path)
    model.fit(batches, validation_data=one_of_many, callbacks=[board], verbose=0)
    assert sum(source.reads.values()) < N * STEPS / 2  # BatchSampler alone.
    assert "reads the" not in capsys.readouterr().out
    fit(OTHER, x=batches, model=make(SHORT))


@pytest.mark.slow
def test_the_loop_of_our_own():
    stop = keras.callbacks.EarlyStopping("val_loss", patience=9)
    on_disk = (tfdpx.RandomAccess(Source(X[:9], Y[:9])),)
    model = make(SHORT)
    for data in ((X[:9], Y[:9]), on_disk):
        with pytest.raises(ValueError, match="9 of the 9 examples"):
            tfdpx.distributed.fit(
                model, SHORT, X, Y, validation_data=data, callbacks=[stop], verbose=0
            )
        assert model.optimizer.ledger.steps == 0
    for each, data in ((model, OTHER), (make(SHORT, public_validation=True), on_disk)):
        tfdpx.distributed.fit(each, SHORT, X, Y, validation_data=data, callbacks=[stop], verbose=0)
        assert each.optimizer.ledger.steps == STEPS and np.isfinite(stop.best)


def test_the_word_is_of_the_optimizer_and_of_its_files(tmp_path):
    model = fit((X, Y), model=shared(public_validation=True))
    model.save(tmp_path / "m.keras")
    assert keras.saving.load_model(tmp_path / "m.keras").optimizer.public_validation is True
    config = tfdpx.DPAdam(0.1, plan=PLAN).get_config()
    assert json.loads(json.dumps(config))["public_validation"] is False
    with pytest.raises(ValueError, match="`public_validation` must be True or False"):
        tfdpx.DPSGD(0.1, plan=PLAN, public_validation=1)
    with pytest.raises(AttributeError, match="read-only"):
        model.optimizer.public_validation = False
