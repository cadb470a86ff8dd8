"""Passes whose number of rows varies: taken only where a proof holds for every number."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from mixers import mean

import tfdpx
from tfdpx import checks
from tfdpx.augment import LayerViews, MixViews, RandomCropFlip, ResizeCropFlip, is_own
from tfdpx.memory import pass_size

layers = keras.layers


class Between(layers.Layer):
    """A function of the rows and of how many of them Python is told of."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x, x.shape[0])

    def compute_output_shape(self, shape):
        return shape


def in_groups(x, rows):
    """A slip: where the number is unknown, all rows are one group."""
    groups = tf.reshape(x, [rows or 1, -1, x.shape[1]])
    return tf.reshape(groups - tf.reduce_mean(groups, axis=1, keepdims=True), tf.shape(x))


def model(function=None, **arguments):
    def stack():
        return [*([] if function is None else [Between(function)]), layers.Dense(3)]

    return small.model(layers=stack, **arguments)


def fitted(made):
    """A `fit` whose batches may hold padding; returns the `PassSize`s."""
    x, y = small.data()
    made.fit(x, y, sample_weight=np.ones(len(x), "float32"), verbose=0)
    return pass_size.chosen(made)


def test_what_is_proved_for_every_number_varies():
    made = model()
    assert fitted(made) == [pass_size.PassSize(16, 1)]
    assert str(made.optimizer.separations[0]) == "proved, for any number of rows"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, rows: x - mean(x) if rows is None else x,
        lambda x, rows: in_groups(x, rows) if rows is None else x,
        lambda x, rows: tf.reshape(x, [rows, -1]),
        lambda x, rows: tf.reverse_sequence(x, tf.ones_like(x[:, 0], "int32"), seq_axis=1),
    ],
    ids=["mixes", "groups", "needs the number", "unknown operation"],
)
def test_what_is_not_proved_has_passes_of_one_size(function):
    """It is checked for that size, and what it does for an unknown one never runs."""
    made, plain = model(function), model()
    made(small.data()[0])
    [size] = fitted(made)
    assert not size.varies
    assert made.optimizer.separations[0].rows == size.examples
    fitted(plain)
    np.testing.assert_allclose(small.weights(made), small.weights(plain), rtol=1e-4, atol=1e-6)


def test_the_slip_is_refused_for_the_number_that_runs():
    """Where the number is known, groups of one row leave nothing of it."""
    made = model(lambda x, rows: x - mean(x))
    with pytest.raises(checks.UnfitForPrivacy, match="other examples"):
        fitted(made)


def test_mixing_in_passes_of_known_size_does_not_run_in_others():
    """What a pass that varies would do is proved; a pass of all rows is another graph."""
    made, plain = model(in_large_passes), model()
    for each in (made, plain):
        assert fitted(each)[0].varies
    np.testing.assert_allclose(small.weights(made), small.weights(plain), rtol=1e-4, atol=1e-6)
    with pytest.raises(checks.UnfitForPrivacy, match="other examples"):
        made.train_on_batch(*small.data())


def in_large_passes(x, rows):
    return x - mean(x) if rows and rows > 8 else x


@pytest.mark.parametrize("way", ["train_step", "run_eagerly", "run_functions_eagerly"])
def test_what_is_proved_for_a_graph_says_nothing_of_eager_mode(way):
    """There Python is told the number of rows of each pass."""
    made, (x, y) = model(in_large_passes), small.data()
    assert fitted(made)[0].varies
    before = small.weights(made)
    with pytest.raises(checks.UnfitForPrivacy, match="other examples"):
        if way == "train_step":
            made.train_step((tf.constant(x), tf.constant(y), tf.ones(len(x))))
        if way == "run_eagerly":
            made.compile(made.optimizer, made.loss, run_eagerly=True)
        tf.config.run_functions_eagerly(way == "run_functions_eagerly")
        try:
            fitted(made)
        finally:
            tf.config.run_functions_eagerly(False)
    np.testing.assert_array_equal(small.weights(made), before)


def test_a_model_that_is_compiled_again_for_xla_has_passes_of_one_size():
    made = model()
    fitted(made)
    made.compile(made.optimizer, made.loss, jit_compile=True)
    assert [size.varies for size in fitted(made)] == [True, False]


def test_without_the_proof_nothing_varies(monkeypatch):
    """A planted bug: the proof is taken for granted. The sizes above depend on it."""
    monkeypatch.setattr(checks, "separation_of_pass", lambda *_: checks.Separation())
    assert fitted(model(lambda x, rows: x - mean(x) if rows is None else x))[0].varies


@pytest.mark.parametrize("compile_arguments", [{"jit_compile": True}, {"run_eagerly": True}])
def test_compiled_and_eager_passes_are_of_one_size(compile_arguments):
    made = model(compile_arguments=compile_arguments)
    assert [size.varies for size in fitted(made)] == [False]


class Subclass(RandomCropFlip):
    """Mixes images where their number is unknown."""

    def apply(self, images, choices):
        views = super().apply(images, choices)
        return views - tf.reduce_mean(views) if images.shape[0] is None else views


def test_the_augmentations_of_others_have_passes_of_one_size():
    assert is_own(RandomCropFlip()) and is_own(ResizeCropFlip(8))
    assert is_own(MixViews(RandomCropFlip(), 2))
    flip = LayerViews(layers.RandomFlip())
    assert not any(map(is_own, [flip, MixViews(flip, 2), Subclass(), MixViews(Subclass(), 2)]))


@pytest.mark.parametrize("augment", [RandomCropFlip(1), Subclass(1)])
def test_views_of_another_do_not_run_for_an_unknown_number(augment):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 6, 6, 1)).astype("float32"), rng.integers(0, 3, 16)
    made = small.model(
        tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0, augment=augment, augmult=2, seed=1),
        layers=[layers.Flatten(), layers.Dense(3)],
    )
    made.fit(x, y, sample_weight=np.ones(16, "float32"), verbose=0)
    assert [size.varies for size in pass_size.chosen(made)] == [type(augment) is RandomCropFlip]
