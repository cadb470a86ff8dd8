"""Mixed views against numpy; mixing of examples is refused, and mixing of views is not."""

import keras
import numpy as np
import pytest
import scipy.stats
import small
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdpx import checks
from tfdpx.augment import MixViews, RandomCropFlip
from tfdpx.training.views import Views

SEED = tf.constant([1, 2], "int64")


def images(count=5, dtype="uint8", size=6):
    values = np.random.default_rng(0).integers(0, 256, (count, size, size, 2))
    return tf.constant(values.astype(dtype))


def drawn(count, mixer, views=5, seed=SEED):
    """Returns the choices, and as numpy arrays both mixed views and the weights of the first."""
    choices = mixer.draw(count, views, seed)
    mixing = choices[1].numpy()
    return choices, mixing[..., 0], mixing[..., 1], mixer._weights[mixing[..., 2]]


@given(
    st.sampled_from(["uint8", "int16", "float32", "float16"]),
    st.integers(2, 5),
    st.integers(1, 5),
    st.sampled_from([0.2, 1.0, 3.0]),
)
def test_views_are_those_of_the_augmentation_and_mixtures_of_two_of_them(dtype, base, mixed, alpha):
    x, crops = images(dtype=dtype), RandomCropFlip(2)
    mixer = MixViews(crops, mixed, alpha)
    choices, first, second, weights = drawn(5, mixer, base + mixed)
    views = mixer.apply(x, choices)
    assert views.dtype == x.dtype
    assert views.shape == (5, base + mixed, 6, 6, 2)
    views = views.numpy()
    np.testing.assert_array_equal(views[:, :base], crops.apply(x, crops.draw(5, base, SEED)))
    rounding = 0.5 + 1e-4 if x.dtype.is_integer else 1e-4 if dtype == "float32" else 0.1
    for i, j in np.ndindex(5, mixed):
        a, b, w = first[i, j], second[i, j], weights[i, j]
        assert a != b and 0 <= min(a, b) and max(a, b) < base
        pair = views[i, [a, b]].astype("float64")
        mixture = views[i, base + j].astype("float64")
        assert np.abs(mixture - (w * pair[0] + (1 - w) * pair[1])).max() <= rounding
        slack = 0 if x.dtype.is_integer else rounding
        assert (pair.min(0) - slack <= mixture).all() and (mixture <= pair.max(0) + slack).all()


@pytest.mark.parametrize("alpha", [1e-3, 0.2, 5.0])
def test_weights_have_the_beta_distribution(alpha):
    weights = drawn(3000, MixViews(RandomCropFlip(0), 3, alpha))[3].ravel()
    assert ((weights >= 0) & (weights <= 1)).all()
    if alpha > 0.1:
        assert scipy.stats.kstest(weights, scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3
        planted = scipy.stats.beta(1.5 * alpha, 1.5 * alpha).cdf
        assert scipy.stats.kstest(weights, planted).pvalue < 1e-6
    else:
        assert ((weights < 0.01) | (weights > 0.99)).mean() > 0.98


def model(augment, augmult=4, **arguments):
    def stack():
        return [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3)]

    arguments = {"augment": augment, "augmult": augmult, "batch_size": 8, **arguments}
    return small.model(layers=stack, compile_arguments={"jit_compile": False}, **arguments)


LABELS = np.arange(8) % 3


class MixesExamples(MixViews):
    """A planted bug: the second view of a mixture comes from the next example."""

    def apply(self, images, choices):
        views = super().apply(images, choices)
        other = tf.roll(views, 1, axis=0)
        half = views[:, -self.mixed_views :] // 2 + other[:, -self.mixed_views :] // 2
        return tf.concat([views[:, : -self.mixed_views], half], axis=1)


def test_a_subclass_that_mixes_examples_makes_the_views_of_each_alone():
    x = tf.cast(images(8), "float32")
    mixer = Views(MixesExamples(RandomCropFlip(2), 2), 4, x)
    choices = mixer.draw(8, tf.constant([1, 2], tf.int64))
    rows = mixer.rows(x, choices)
    other_rows = mixer.rows(tf.concat([x[:1], 0 * x[1:]], axis=0), choices)
    np.testing.assert_array_equal(rows[:4], other_rows[:4])


def test_a_layer_that_would_mix_examples_makes_each_view_alone():
    class AddsTheMean(keras.layers.Layer):
        def call(self, x):
            return 0.5 * x + 0.5 * tf.reduce_mean(x, axis=0, keepdims=True)

    mixer = MixViews(AddsTheMean(), 1)
    views = mixer.apply(images(8), mixer.draw(8, 3, tf.zeros([2], tf.int64)))
    np.testing.assert_array_equal(views[:, 0], images(8))
    for layer in (MixViews(keras.layers.CutMix(), 2), keras.layers.MixUp()):
        with pytest.raises(checks.UnfitForPrivacy, match="depend on another"):
            small.step(model(layer), images(8).numpy(), LABELS)


def test_unfit_arguments_are_refused():
    crops = RandomCropFlip(2)
    for views, alpha, message in [
        (0, 1.0, "`mixed_views`"),
        (True, 1.0, "`mixed_views`"),
        (2, 0, "`alpha`"),
        (2, float("nan"), "`alpha`"),
        (2, "0.2", "`alpha`"),
    ]:
        with pytest.raises(ValueError, match=message):
            MixViews(crops, views, alpha)
    with pytest.raises(ValueError, match="`augment`"):
        MixViews(None, 2)
    with pytest.raises(ValueError, match=r"mixed_views=3, augmult=4"):
        small.step(model(MixViews(crops, 3)), images(8).numpy(), LABELS)
