"""Models that mix the examples of a batch: each is computed alone, said so, or refused by name."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow, slow_but
from mixers import MIXES, Between, mean, only_in_large_batches

import tfdpx
from tfdpx import checks

layers = keras.layers
ROWS, CLIP = 6, 0.5


class InOrder(layers.Layer):
    """Runs a layer on the rows in sorted order: outputs are in order, but not what is captured."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4, "tanh")

    def call(self, x):
        order = tf.argsort(tf.reduce_sum(x, axis=1))
        return tf.gather(self.inner(tf.gather(x, order)), tf.argsort(order))


def model(stack, **arguments):
    optimizer = tfdpx.DPSGD(
        1.0, batch_size=ROWS, noise_multiplier=0.0, l2_norm_clip=CLIP, **arguments
    )
    made = small.model(optimizer, layers=stack)
    made.build((None, 6))
    return made


def clipped(made, x, y):
    """The clipped gradient of a batch of one, as Keras takes it, in units of the clip."""
    with tf.GradientTape() as tape:
        loss = made.compute_loss(y=y, y_pred=made(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in made.trainable_variables])
    flat = np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in gradients])
    return flat / max(np.linalg.norm(flat), CLIP)


def assert_is_that_of_batches_of_one(made):
    """Each example adds what it adds as a batch of one, at most 1/B."""
    x, y = small.data(ROWS)
    wanted = sum(clipped(made, x[i : i + 1], y[i : i + 1]) for i in range(ROWS))
    np.testing.assert_allclose(-small.step(made, x, y), wanted / ROWS, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but(MIXES, *list(MIXES)[::4]))
def test_examples_of_a_model_that_mixes_are_computed_alone(name):
    made = model([layers.Dense(4), Between(MIXES[name]), layers.Dense(3)])
    assert_is_that_of_batches_of_one(made)
    [found] = made.optimizer.independence
    assert found.verdict == ("proved" if name == "large batches" else "alone")


@pytest.mark.filterwarnings("ignore")
def test_rows_that_a_layer_sees_in_sorted_order_are_computed_alone():
    assert_is_that_of_batches_of_one(model([layers.Dense(4), InOrder(), layers.Dense(3)]))


def test_the_operation_and_the_cost_are_said_and_a_proof_can_be_required():
    stack = [layers.Dense(4), Between(lambda x: x - mean(x), name="culprit"), layers.Dense(3)]
    made = model(stack)
    with pytest.warns(UserWarning, match="computed alone.*culprit.*twice the time"):
        made.fit(*small.data(ROWS), batch_size=ROWS, verbose=0)
    strict = model(stack, require_proof=True)
    with pytest.raises(checks.UnfitForPrivacy, match="not proved.*culprit"):
        strict.fit(*small.data(ROWS), batch_size=ROWS, verbose=0)
    assert int(strict.optimizer.iterations) == 0
    proved = model([layers.Dense(3)], require_proof=True)
    proved.fit(*small.data(ROWS), batch_size=ROWS, verbose=0)
    assert proved.optimizer.independence[0].verdict == "proved"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("eager", [slow(False), True])
def test_what_is_proved_for_one_number_trains_at_that_number(eager):
    """A model that mixes from eight rows on: Python looks at the number."""
    optimizer = tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0)
    stack = [Between(only_in_large_batches), layers.Dense(3)]
    made = small.model(optimizer, layers=stack, compile_arguments={"run_eagerly": eager})
    x, y = small.data(16)
    made.train_on_batch(x[:4], y[:4])
    assert str(optimizer.independence[0]) == "proved, for microbatches of 4 rows"
    made.train_on_batch(x, y)
    assert optimizer.independence[1].verdict == "alone"


def test_positions_that_are_looked_up_are_computed_alone():
    """As in Keras's own tutorial: a variable whose rows are no examples."""

    class Positions(layers.Layer):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(6, 4)

        def call(self, x):
            return x[..., None] + self.table(keras.ops.arange(6))

    made = model([Positions(), layers.Flatten(), layers.Dense(3)])
    with pytest.warns(UserWarning, match="computed alone"):
        assert_is_that_of_batches_of_one(made)


def test_pixels_of_colour_images_train():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (8, 8, 8, 3)).astype("uint8")
    made = keras.Sequential(
        [
            keras.Input((8, 8, 3), dtype="uint8"),
            layers.Rescaling(1 / 127.5, -1),
            tfdpx.layers.WSConv2D(8, 3),
            tfdpx.layers.GroupNorm(4),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(tfdpx.DPSGD(0.1, batch_size=8, noise_multiplier=1.0), loss)
    made.fit(x, np.arange(8) % 3, batch_size=8, verbose=0)
    assert made.optimizer.independence[0].verdict == "proved"
