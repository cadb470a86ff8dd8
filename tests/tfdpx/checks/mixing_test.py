"""Models whose examples mix only now and then, or only backwards, are refused before a step."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from mixers import (
    MIXES,
    Between,
    clips_the_gradient_of_the_batch,
    mean,
    only_in_large_batches,
    scaled_by_the_largest,
    sorted_and_back,
)

import tfdpx
from tfdpx import checks, per_example
from tfdpx.augmult import Views
from tfdpx.layers import SkipInit
from tfdpx.memory.pass_size import PassSize

layers = keras.layers
ROWS = 16


def refused(model, x=None, y=None, match="other examples|place in the batch"):
    given_x, given_y = small.data(ROWS)
    with pytest.raises(checks.UnfitForPrivacy, match=match):
        model.fit(given_x if x is None else x, given_y if y is None else y, verbose=0)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("first", [True, False], ids=["first", "hidden"])
@pytest.mark.parametrize("name", MIXES)
def test_mixing_is_refused(name, first):
    mixing = [Between(MIXES[name])]
    if first:
        if name == "gradient clipped over the batch":
            mixing = [layers.Dense(4), *mixing]
        refused(small.model(layers=[*mixing, layers.Dense(3)]))
    else:
        refused(small.model(layers=[layers.Dense(4), *mixing, layers.Dense(3)]))


class Branch(layers.Layer):
    """`x + gain * (x - batch mean)`: a residual branch that starts at zero."""

    def __init__(self):
        super().__init__()
        self.gain = SkipInit()

    def call(self, x):
        return x + self.gain(x - mean(x))


def test_mixing_behind_zero_weights_is_refused():
    zero = layers.Dense(3, kernel_initializer="zeros")
    refused(small.model(layers=[layers.Dense(4), Branch(), zero]))


class InOrder(layers.Layer):
    """Runs a layer on the rows in sorted order: outputs keep apart, but not what is captured."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4, "tanh")

    def call(self, x):
        order = tf.argsort(tf.reduce_sum(x, axis=1))
        return tf.gather(self.inner(tf.gather(x, order)), tf.argsort(order))


def test_rows_that_a_layer_sees_in_sorted_order_are_refused():
    refused(small.model(layers=[layers.Dense(4), InOrder(), layers.Dense(3)]))


def test_the_layer_that_mixes_is_named():
    for function, match in [
        (scaled_by_the_largest, "Layer 'the_culprit'"),
        (clips_the_gradient_of_the_batch, "Layer 'before'"),
    ]:
        stack = [layers.Dense(4, name="before"), Between(function, name="the_culprit")]
        refused(small.model(layers=[*stack, layers.Dense(3, name="behind")]), match=match)


def test_mixing_in_training_of_a_random_layer_is_refused():
    class Mixes(layers.Layer):
        def __init__(self):
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(1)

        def call(self, x, training=False):
            return x - mean(x) if training and x.shape[0] and x.shape[0] > 8 else x

    model = small.model(layers=[layers.Dropout(0.1), Mixes(), layers.Dense(3)])
    with pytest.raises(checks.UnfitForPrivacy, match="other examples"):
        model.train_on_batch(*small.data(ROWS))  # `fit` does not tell the layer how many there are.


def test_a_patched_call_that_mixes_is_refused():
    model = small.model()
    dense = model.layers[0]
    original = dense.call
    dense.call = lambda x, **kwargs: original(x - mean(x), **kwargs)
    refused(model)


def test_mixing_in_the_call_of_the_model_is_refused():
    class Mixes(keras.Sequential):
        def call(self, x, training=None, mask=None):
            return super().call(scaled_by_the_largest(x), training=training, mask=mask)

    model = Mixes([layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, batch_size=ROWS, noise_multiplier=1.0), loss)
    refused(model)


def test_mixing_of_integers_of_a_larger_vocabulary_is_refused():
    def largest_token(x):
        rare = tf.cast(tf.reduce_max(x) > 5, x.dtype)
        return tf.minimum(x + rare, 49)

    tokens = np.random.default_rng(0).integers(0, 50, (ROWS, 4))
    stack = [layers.Lambda(largest_token), layers.Embedding(50, 3), layers.Flatten()]
    refused(small.model(layers=[*stack, layers.Dense(3)]), tokens)


def test_a_pass_of_another_size_is_checked_again():
    model = small.model(layers=[Between(only_in_large_batches), layers.Dense(3)])
    x, y = small.data(ROWS)
    model.run_eagerly = True
    model.train_on_batch(x[:4], y[:4])
    with pytest.raises(checks.UnfitForPrivacy, match="other examples"):
        model.train_on_batch(x, y)


@pytest.mark.parametrize("size, mixes", [(None, True), (12, True), (8, False)])
def test_the_size_of_a_microbatch_counts(size, mixes):
    stack = [Between(only_in_large_batches), layers.Dense(3)]
    model = small.model(layers=stack, microbatch_size=size)
    if mixes:
        refused(model)
    else:
        model.train_on_batch(*small.data(ROWS))


class MixesLargeBatches(layers.Layer):
    def call(self, x):
        return tf.sort(x, axis=0) if x.shape[0] is None or x.shape[0] > 8 else x


def test_an_augmentation_that_mixes_large_batches_makes_each_view_alone():
    x = np.random.default_rng(0).normal(size=(ROWS, 4, 4, 1)).astype("float32")
    steps = []
    for augment in ({"augment": MixesLargeBatches(), "augmult": 1}, {}):
        model = small.model(layers=lambda: [layers.Flatten(), layers.Dense(3)], **augment)
        steps.append(small.step(model, x, np.arange(ROWS) % 3))
    np.testing.assert_allclose(*steps, atol=1e-6)


def by_the_hardest(y, y_pred):
    loss = keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True)
    many = loss.shape[0] is None or loss.shape[0] > 8
    return loss / tf.stop_gradient(tf.reduce_max(loss)) if many else loss


def test_a_loss_that_mixes_large_batches_is_refused():
    refused(small.model(loss=by_the_hardest), match="loss of one example depends")


def test_a_model_that_mixes_nothing_in_spite_of_wide_data_trains():
    stack = [layers.LayerNormalization(), layers.Dense(4), layers.GroupNormalization(2)]
    model = small.model(layers=[*stack, layers.Dense(3, kernel_initializer="zeros")])
    model.fit(*small.data(ROWS), verbose=0)
    assert int(model.optimizer.iterations) == 1


def test_the_weights_come_back_bit_for_bit_also_after_a_refusal():
    for stack in ([layers.Dense(4)], [layers.Dense(4), Between(sorted_and_back)]):
        model = small.model(layers=[*stack, layers.Dropout(0.5), layers.Dense(3)])
        x, y = (tf.constant(array) for array in small.data(ROWS))
        model.build(x.shape)
        before = [v.numpy() for v in model.variables]
        engine = per_example.LayerwiseEngine(model, x, 1)
        try:
            checks.check_step(model, engine, Views(None, 0, x), x, y, None, [PassSize(ROWS, ROWS)])
        except checks.UnfitForPrivacy:
            assert len(stack) == 2
        for variable, value in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(variable, value)
