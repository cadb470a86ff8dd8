"""Draws of Keras's random layers depend on a secret, not on a known seed, place or neighbour."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import slow, slow_but
from keras import layers
from scipy import stats

import tfdpx
from tfdpx.per_example import rowwise
from tfdpx.per_example.engine import Engine
from tfdpx.training.views import Views

N = 12
QUIET = {"batch_size": N, "noise_multiplier": 0.0, "microbatch_size": 4}
CLIP = 0.05  # Far below any gradient, so that unbounded changes show.
X = np.random.default_rng(0).random((N, 8, 8, 1)).astype("float32")
Y = np.arange(N) % 3
INSIDE = {
    "Dropout": lambda: layers.Dropout(0.5),
    "GaussianNoise": lambda: layers.GaussianNoise(0.5),
    "RandomCrop": lambda: layers.RandomCrop(6, 6, seed=5),
    "one mask for all": lambda: layers.Dropout(0.5, noise_shape=(1, 8, 8, 1)),
}
AUGMENT = {
    "RandomFlip": lambda: layers.RandomFlip(seed=5),
    "RandomErasing": lambda: layers.RandomErasing(value_range=(0, 1)),
    "RandAugment": lambda: layers.RandAugment(value_range=(0, 1), seed=5),
    "AugMix": lambda: layers.AugMix(value_range=(0, 1), seed=5),
}
CASES = [("inside", name) for name in INSIDE] + [("augment", name) for name in AUGMENT]


class Trained:
    """A model without noise, with its random layer inside, or in front as `augment=`."""

    def __init__(self, where, name, known_seed=0):
        keras.utils.set_random_seed(known_seed)
        inside = [INSIDE[name]()] if where == "inside" else []
        convolution = layers.Conv2D(4, 3, padding="same", kernel_initializer=fixed_kernel)
        ends = [layers.GlobalAveragePooling2D(), layers.Dense(3, kernel_initializer="ones")]
        size = [8, 8] if inside else [None, None]
        self.model = keras.Sequential([keras.Input((*size, 1)), *inside, convolution, *ends])
        augment = AUGMENT[name]() if where == "augment" else None
        optimizer = tfdpx.DPSGD(
            1.0, **QUIET, l2_norm_clip=CLIP, augment=augment, augmult=1 if augment else 0
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer, loss, jit_compile=False)
        self._step = tf.function(self.model.train_step, autograph=False)

    def update(self, secret=None, absent=()):
        """Returns the clipped sum of an update from the initial weights, in units of the clip.

        Args:
            secret: Int, a fixed secret; None for a fresh one, by `train_on_batch`.
            absent: Rows of weight zero; all keep their places.
        """
        model, weights = self.model, np.ones(N, "float32")
        weights[list(absent)] = 0
        before = [np.array(v) for v in model.trainable_variables]
        if secret is None:
            model.train_on_batch(X, Y, sample_weight=weights)
        else:
            model.optimizer.state.begin((secret, 7), 0)
            self._step((X, Y, weights))
        after = [np.array(v) for v in model.trainable_variables]
        for variable, value in zip(model.trainable_variables, before, strict=True):
            variable.assign(value)
        return N * np.concatenate([(a - b).ravel() for a, b in zip(before, after, strict=True)])


def fixed_kernel(shape, dtype=None):
    return tf.constant(np.random.default_rng(1).normal(size=shape), dtype or "float32")


def distance(first, second):
    return np.linalg.norm(first - second)


@pytest.mark.parametrize("where, name", slow_but(CASES, ("inside", "Dropout")))
def test_a_secret_decides_every_draw_and_one_example_moves_the_clip_at_most(where, name):
    trained = Trained(where, name)
    whole = trained.update(secret=3)
    # An attack: without row 1 every later row got another mask, so it moved by the clip too.
    for absent in (1, N - 1):
        assert distance(whole, trained.update(3, [absent])) <= 1 + 1e-5
    assert distance(whole, trained.update(3, [0, 5])) <= 2 * (1 + 1e-5)
    np.testing.assert_allclose(trained.update(secret=3), whole, atol=1e-5)
    # Each secret gives other draws, and the known seed does not matter.
    assert distance(whole, trained.update(secret=4)) > 1e-3
    if (where, name) in (("inside", "Dropout"), ("augment", "RandAugment")):
        other = Trained(where, name, known_seed=1).update(secret=3)
        np.testing.assert_allclose(other, whole, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("where, name", [("inside", "Dropout"), ("augment", "RandomFlip")])
def test_seeds_of_keras_are_not_advanced(where, name):
    """A saved counter would reveal the number of microbatches, and so of the examples drawn.

    The draws still differ from update to update.
    """
    trained = Trained(where, name)
    augment = trained.model.optimizer.augment
    owners = [*trained.model.layers, *([augment.layer] if augment else [])]
    states = [v for layer in owners for v in layer.variables if "seed" in v.path]
    before = [np.array(v) for v in states]
    assert states and distance(trained.update(), trained.update()) > 1e-3
    for state, value in zip(states, before, strict=True):
        np.testing.assert_array_equal(state, value)


class Signs(layers.Layer):
    """Multiplies each row, or the whole microbatch, by a random sign from a draw or the seed."""

    def __init__(self, shared=False, of_the_seed=False):
        super().__init__()
        self.shared, self.seed_generator = shared, keras.random.SeedGenerator(0)
        self.of_the_seed = of_the_seed

    def call(self, x, training=False):
        if not training:
            return x
        if self.of_the_seed:
            return x * tf.cast(1 - 2 * (self.seed_generator.next()[0] // 3 % 2), x.dtype)
        rows = 1 if self.shared else tf.shape(x)[0]
        signs = keras.random.randint((rows, 1), 0, 2, seed=self.seed_generator)
        return x * tf.cast(2 * signs - 1, x.dtype)


def sums_of_signs(layer, rows, times):
    """Returns sums of `rows` signs, each with a fresh secret; a row's gradient is its sign."""
    model = keras.Sequential([keras.Input((1,)), layer, layers.Dense(1, use_bias=False)])
    optimizer = tfdpx.DPSGD(1.0, **QUIET, l2_norm_clip=2.0)
    model.compile(optimizer, lambda y, y_pred: -y_pred, jit_compile=False)
    x, y = np.full((rows, 1), 2.0, "float32"), np.zeros((rows, 1), "float32")
    sums = []
    for _ in range(times):
        before = model.get_weights()[0].item()
        model.train_on_batch(x, y)
        sums.append(N * (model.get_weights()[0].item() - before))
    return np.array(sums)


def is_independent(sums, rows):
    """Tests for the variance of `rows` independent signs, at a level of 1e-6."""
    statistic, count = np.sum(sums**2) / rows, len(sums)
    return min(stats.chi2.cdf(statistic, count), stats.chi2.sf(statistic, count)) > 5e-7


@pytest.mark.slow
def test_over_secrets_a_row_left_out_leaves_the_law_of_the_others():
    # Signs of different rows are independent, so leaving a row out does not change the others.
    for rows in (N, N - 1):
        assert is_independent(sums_of_signs(Signs(), rows, 150), rows)
    # One draw for all rows of a microbatch becomes one for each example: it is mapped.
    for layer in (Signs(shared=True), Signs(of_the_seed=True)):
        assert is_independent(sums_of_signs(layer, N, 150), N)


@pytest.mark.planted("a draw is shared by a microbatch")
def test_the_law_of_signs_rejects_a_shared_draw(monkeypatch):
    monkeypatch.setattr(rowwise, "find_obstacle", lambda model: None)
    assert not is_independent(sums_of_signs(Signs(shared=True), N, 150), N)


class DrawsInALoop(layers.Layer):
    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(0)

    def call(self, x, training=False):
        if not training:
            return x

        def body(i, y):
            return i + 1, y * keras.random.normal(tf.shape(x), seed=self.seed_generator)

        return tf.while_loop(lambda i, y: i < 2, body, (0, x))[1]


class DrawsBy(layers.Layer):
    """Multiplies by draws of a function of a shape and a `SeedGenerator`."""

    def __init__(self, draw):
        super().__init__()
        self.seed_generator, self.draw = keras.random.SeedGenerator(3), draw

    def call(self, x, training=None):
        return x * tf.cast(self.draw((1, 6), self.seed_generator), "float32") if training else x


@pytest.mark.parametrize(
    "draw",
    [
        lambda shape, g: keras.random.gamma(shape, 1.0, seed=g),
        slow(lambda shape, g: keras.random.beta(shape, 1.0, 2.0, seed=g)),
        slow(lambda shape, g: tf.random.experimental.stateless_shuffle(tf.range(9), g.next())[:6]),
        slow(lambda shape, g: tf.random.stateless_uniform(shape, g.next(), None, None, "int32")),
        slow(lambda shape, g: keras.random.uniform(shape, seed=g)),
    ],
)
def test_draws_differ_by_row_and_step(draw):
    model = keras.Sequential([keras.Input((6,)), DrawsBy(draw)])
    model.compile(loss="mse")
    x = tf.ones([8, 6])
    engine = Engine(model, x, 1)

    @tf.function(autograph=False)
    def rows(key):
        return engine(x, x, None, key=key).y_pred

    first, second = (rows(tf.constant([0, n], tf.int64)).numpy() for n in (1, 2))
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 16


class OwnViews:
    """Turns images at random, with or without its seed by `draw`."""

    def __init__(self, draw):
        self.draw = draw

    def apply(self, images, choices):
        return images[:, tf.newaxis] * tf.where(choices < 0.5, -1.0, 1.0)[..., tf.newaxis]

    def get_config(self):
        return {}


@pytest.mark.parametrize(
    "draw, varies",
    [
        (lambda b, k, seed: tf.random.stateless_uniform([b, k], seed), True),
        (lambda b, k, seed: tf.random.uniform([b, k]), True),
        (lambda b, k, seed: tf.ones([b, k]), False),
        (lambda b, k, seed: tf.random.stateless_uniform([b, k], [1, 2]), False),
        (lambda b, k, seed: tf.constant(np.random.random((b, k)), "float32"), False),
    ],
)
def test_an_augmentation_of_ones_own_draws_for_each_example_alone(draw, varies):
    """Random draws differ between examples; others are the same for all examples and steps."""
    augmentation = Views(OwnViews(lambda b, k, seed: draw(int(b), k, seed)), 2, tf.ones([64, 2]))
    views = [
        augmentation.rows(tf.ones([64, 2]), augmentation.draw(64, tf.constant([0, n])))
        for n in (1, 2)
    ]
    rows = [np.unique(view.numpy().reshape(64, -1), axis=0) for view in views]
    assert all((len(view) > 1) == varies for view in rows)
    assert varies or np.array_equal(*views)


class GlobalSeed(layers.Layer):
    def call(self, x, training=False):
        return x + keras.random.normal(tf.shape(x)) if training else x


def uniform_loss(y, y_pred):
    return keras.random.uniform(()) * (y - y_pred) ** 2


@pytest.mark.parametrize(
    "make, loss, message",
    [
        (DrawsInALoop, "mse", "draws_in_a_loop.*would repeat in every round"),
        (GlobalSeed, "mse", "global seed generator"),
        (lambda: layers.Dropout(0.5), uniform_loss, "global seed generator"),
        (AUGMENT["AugMix"], "mse", "aug_mix.*augment="),  # It draws by Python.
    ],
)
def test_draws_that_no_secret_can_decide_are_refused_by_name(make, loss, message):
    layer = make()
    shape = (8, 8, 1) if "aug_mix" in layer.name else (2,)
    stack = [keras.Input(shape), layer, layers.Flatten(), layers.Dense(1)]
    model = keras.Sequential(stack)
    optimizer = tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0)
    model.compile(optimizer, loss, jit_compile=False)
    with pytest.raises(ValueError, match=message):
        model.train_on_batch(np.ones((4, *shape), "float32"), np.ones((4, 1), "float32"))
