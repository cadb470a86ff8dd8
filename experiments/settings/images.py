"""Generated data sets of the study, and scikit-learn's digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

TEST, LENGTH = 2000, 16
# Classes, and seed and strength of the distortions.
_PROTOTYPES = {"strokes": (2, 1000, 1.6), "strokes2": (3, 2000, 1.9), "shapes": (1, 1000, 1.3)}


@functools.cache
def load(name, most):
    """Returns training images [most, ...], labels, their true number, test images and labels.

    Args:
        name: "strokes" or "shapes" (28 x 28 pixels in [0, 1]; ten classes), "digits" (of
            scikit-learn, scaled to 28 x 28), "digits8" (8 x 8 in [-1, 1]), "tokens" (sequences of
            words in four classes), or one of the images with "_c", for pixels in [-1, 1].
        most: Int. Digits are repeated up to this number.
    """
    if name.endswith("_c"):
        x, y, num, x_test, y_test = load(name[:-2], most)
        return 2 * x - 1, y, num, 2 * x_test - 1, y_test
    if name.startswith("digits"):
        return _digits(name == "digits8", most)
    if name == "tokens":
        x, y = (jnp.asarray(v) for v in tokens(13, most + TEST))
    else:
        styles, seed, strength = _PROTOTYPES[name]
        x, y = _views(
            jax.random.PRNGKey(11), _prototypes(name, styles, seed), most + TEST, strength
        )
    return x[:most], y[:most], most, x[most:], y[most:]


def _prototypes(name, styles, seed):
    from experiments.free_features.drawings import Shapes
    from tfdpx import synthetic

    kind = Shapes if name == "shapes" else synthetic.Strokes
    drawings = kind(48, seed=seed).images(10 * styles)
    return jnp.asarray(drawings, jnp.float32).reshape(10, styles, 48, 48)


def _digits(is_small, most):
    from sklearn import datasets

    digits = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = jnp.asarray(digits.data[order] / 16, jnp.float32).reshape(-1, 8, 8, 1)
    y = jnp.asarray(digits.target[order], jnp.int32)
    x = 2 * x - 1 if is_small else jax.image.resize(x, (len(x), 28, 28, 1), "linear")
    num = len(x) - 360
    rows = jnp.arange(most) % num
    return x[rows], y[rows], num, x[num:], y[num:]


@functools.partial(jax.jit, static_argnums=2)
def _views(key, prototypes, count, strength):
    """Returns bent and turned prototypes [classes, styles, 48, 48], and labels."""
    of_label, of_views = jax.random.split(key)
    labels = jax.random.randint(of_label, (count,), 0, len(prototypes))
    axis = (jnp.arange(56) + 0.5) / 56 * 48 - 24
    grid = jnp.stack(jnp.meshgrid(axis, axis, indexing="ij"))

    def view(key, label):
        keys = jax.random.split(key, 5)
        style = jax.random.randint(keys[0], (), 0, prototypes.shape[1])
        angle, shear = 0.12 * strength * jax.random.normal(keys[1], (2,))
        sine, cosine = jnp.sin(angle), jnp.cos(angle)
        matrix = jnp.array([[cosine, shear - sine], [sine, cosine]])
        matrix *= jnp.exp(0.1 * strength * jax.random.normal(keys[2], (2,)))
        shift = 1.5 * strength * jax.random.normal(keys[3], (2, 1, 1))
        bend = 2.0 * strength * jax.random.normal(keys[4], (2, 4, 4))
        bend = jax.image.resize(bend, (2, 56, 56), "linear")
        places = jnp.einsum("ij,jhw->ihw", matrix, grid) + 23.5 + shift + bend
        image = jax.scipy.ndimage.map_coordinates(prototypes[label, style], list(places), 1)
        return image.reshape(28, 2, 28, 2).mean((1, 3))

    images = jax.vmap(view)(jax.random.split(of_views, count), labels)
    noise = 0.03 * strength * jax.random.normal(jax.random.fold_in(key, 7), images.shape)
    return jnp.clip(images + noise, 0, 1)[..., None], labels


def tokens(seed, count, is_fine=False):
    """Returns sequences [count, LENGTH] of 1,000 words, and the classes, int32 arrays.

    A fifth of the words is from the cluster of a sequence, one of 16 with 40 words; a private class
    is four clusters.
    """
    rng = np.random.default_rng(seed)
    clusters = rng.integers(0, 16, count)
    words = np.minimum(rng.zipf(1.3, (count, LENGTH)) - 1, 999)
    own = 300 + 40 * clusters[:, None] + rng.integers(0, 40, (count, LENGTH))
    other = 300 + rng.integers(0, 640, (count, LENGTH))
    part = rng.random((count, LENGTH))
    words = np.where(part < 0.2, own, np.where(part < 0.35, other, words))
    classes = clusters if is_fine else clusters * 7 % 16 // 4
    return words.astype("int32"), classes.astype("int32")
