"""Measures the automatic settings of a private linear classifier on fixed features.

    python -m experiments.high_accuracy.fit_choice

The rule of `tfdpx.train.defaults` was fitted on such problems. All images are generated, so the fit
spent no privacy. In some problems, a class is a stroke or a shape that is distorted in each image.
In others, a class has a mean colour and a direction of stripes; there the protected unit is an
image or a person with several images. Prints a row per problem: the accuracy at each epsilon, with
the learning rate of the rule and with multiples of this rate.
"""

import argparse
import dataclasses
import functools
import itertools

import keras
import numpy as np
import scipy.ndimage

import tfdpx
from experiments.free_features.drawings import Shapes
from tfdpx import synthetic
from tfdpx.models import ScatterLinear
from tfdpx.train import defaults, settings

CLASSES, TEST = 10, 2000
EPSILONS = (0.5, 1.0, 3.0, 8.0, 20.0)
FACTORS = (1.0, 0.25, 4.0)
_CANVAS = 48  # Prototypes are distorted on a canvas with at least this height in pixels.
# Arguments of `scenes`. Without clutter the features of all images are nearly the same.
SCENES = {
    "gray": dict(side=28, channels=1, classes=10, colour=0.0, stripes=0.15, clutter=0.3, noise=0.1),
    "smooth": dict(side=16, colour=0.05, stripes=0.06, clutter=0.1),
    "colours": dict(side=32, colour=0.1, stripes=0.0, clutter=0.1),
    "cluttered": dict(side=32, colour=0.12, stripes=0.12, clutter=0.3, noise=0.05),
    "twenty": dict(side=16, classes=20, colour=0.12, stripes=0.1, clutter=0.3, noise=0.1),
}


def problem(kind, count, side, distortion, seed=0):
    """Returns images [count, side, side, 1] of distorted prototypes, one per class, and labels."""
    rng, pixel = np.random.default_rng(seed), -(-_CANVAS // side)
    canvas = side * pixel
    prototypes = kind(canvas, seed=1000).images(CLASSES)[..., 0]
    labels, images = rng.integers(0, CLASSES, count), []
    grid = np.mgrid[:canvas, :canvas]
    for label in labels:
        turn, shear = 0.12 * distortion * rng.normal(size=2)
        matrix = [[np.cos(turn), shear - np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        matrix = matrix @ np.diag(np.exp(0.1 * distortion * rng.normal(size=2)))
        centre = np.full(2, (canvas - 1) / 2)
        offset = centre - matrix @ centre + 1.5 * distortion * rng.normal(size=2)
        image = scipy.ndimage.affine_transform(prototypes[label], matrix, offset, order=1)
        bend = 2.0 * distortion * rng.normal(size=(2, 4, 4))
        bend = scipy.ndimage.zoom(bend, (1, canvas // 4, canvas // 4), order=1)
        image = scipy.ndimage.map_coordinates(image, grid + bend, order=1)
        image = image.reshape(side, pixel, side, pixel).mean(axis=(1, 3))
        images.append(image + 0.03 * distortion * rng.normal(size=image.shape))
    return np.clip(images, 0, 1)[..., np.newaxis].astype("float32"), labels


def scenes(people, side, colour, stripes, clutter, channels=3, classes=4, noise=0.01, seed=0):
    """Returns images of striped scenes, mixed with dead leaves (`tfdpx.synthetic.DeadLeaves`).

    Each class has a mean colour and a direction of the stripes.

    Args:
        people: Int, the number of people. Each person has an individual colour and one to twelve
            images, about four on average, mostly of one class.
        side: Int, the height and width in pixels.
        colour: Float, the standard deviation of the classes' colours.
        stripes: Float, the contrast of the stripes.
        clutter: Float in [0, 1], the weight of the leaves in an image.
        channels: Int.
        classes: Int.
        noise: Float, the standard deviation of each pixel's noise.
        seed: Int.

    Returns:
        Images `[count, side, side, channels]`, labels `[count]`, and numbers of people `[count]`.
    """
    rng = np.random.default_rng(seed)
    colours, turns = colour * rng.normal(size=(classes, channels)), rng.uniform(0, np.pi, classes)
    owners = np.repeat(np.arange(people), np.clip(rng.geometric(0.22, people), 1, 12))
    labels = np.where(
        rng.random(len(owners)) < 0.8,
        rng.integers(0, classes, people)[owners],
        rng.integers(0, classes, len(owners)),
    )
    shades = colours[labels] + 0.04 * rng.normal(size=(people, channels))[owners]
    shades += 0.1 * colour * rng.normal(size=shades.shape)
    row, column = np.mgrid[:side, :side]
    images = synthetic.DeadLeaves(side, channels, seed).images(len(owners))
    for image, label, shade in zip(images, labels, shades, strict=True):
        turn = turns[label] + 0.15 * rng.normal()
        wave = (row * np.sin(turn) + column * np.cos(turn)) / rng.uniform(0.7, 1)
        striped = 0.5 + shade + stripes * np.sin(wave + rng.uniform(0, 2 * np.pi))[..., np.newaxis]
        image[:] = (1 - clutter) * striped + clutter * image + noise * rng.normal(size=image.shape)
    return np.clip(images, 0, 1), labels, owners


def features(images):
    """Returns the features that `classify` uses, `[count, features]`.

    If there are more features than images, the features are rotated to `count` axes, to save time.
    """
    model = ScatterLinear(2, images.shape[1:])
    rows = keras.Model(model.input, model.get_layer("unit_norm").output)
    rows = rows.predict(images, batch_size=100, verbose=0)
    # Noise is the same in all directions, so only inner products of the rows matter.
    return rows if len(rows) > rows.shape[1] else np.linalg.qr(rows.T, mode="r").T


@functools.cache
def noise_multiplier(epsilon, steps, delta=1e-5):
    """Returns the noise multiplier for full batches, which does not depend on the batch size."""
    return tfdpx.PrivacyPlan(
        100, batch_size=100, steps=steps, epsilon=epsilon, delta=delta
    ).noise_multiplier


def train(rows, labels, values, seed, owners=None):
    """Trains a linear classifier privately from zero, with the updates of `tfdpx.DPSGD` in NumPy.

    Every update uses all images, or all people.

    Args:
        rows: Features `[count, features]` of the training images.
        labels: Ints `[count]`.
        values: `settings.Settings` of the run.
        seed: Int.
        owners: Ints `[count]`, the person of each image. Defaults to one image per person.

    Returns:
        The moving average of the weights, `[features, classes]`.
    """
    rng = np.random.default_rng(seed)
    owners = np.arange(len(rows)) if owners is None else np.unique(owners, return_inverse=True)[1]
    most = min(values.examples_per_user, np.bincount(owners).max())
    people = owners.max() + 1
    targets = np.eye(labels.max() + 1, dtype="float32")[labels]
    weights = average = np.zeros([rows.shape[1], targets.shape[1]], "float32")
    noise = noise_multiplier(values.epsilon, values.steps, values.delta)
    for step in range(values.steps):
        chosen = _draw(owners, most, rng)
        shares = (chosen >= 0) / np.sum(chosen >= 0, axis=1, keepdims=True, dtype="float32")
        logits = rows @ weights
        exponentials = np.exp(logits - logits.max(1, keepdims=True))
        errors = exponentials / exponentials.sum(1, keepdims=True) - targets
        errors = shares[..., np.newaxis].astype("float32") * errors[chosen]
        products = np.ones([people, 1, 1], "float32")
        if most > 1:
            products = rows[chosen] @ rows[chosen].transpose(0, 2, 1)
        norms = np.einsum("pab,pak,pbk->p", products, errors, errors) ** 0.5
        errors /= np.maximum(norms, np.float32(values.l2_norm_clip))[:, np.newaxis, np.newaxis]
        total = rows[chosen.ravel()].T @ errors.reshape(-1, targets.shape[1])
        total += np.float32(noise) * rng.standard_normal(weights.shape, "float32")
        weights = weights - np.float32(values.learning_rate / people) * total
        momentum = min(values.ema_momentum, (1 + step) / (10 + step)) if step else 0.0
        average = momentum * average + (1 - momentum) * weights
    return average


def accuracy(rows, labels, test, *settings_seed_and_owners):
    """Calls `train` and returns the accuracy on `test`, a pair of features and labels."""
    weights = train(rows, labels, *settings_seed_and_owners)
    return float(np.mean((test[0] @ weights).argmax(1) == test[1]))


def _draw(owners, most, rng):
    """Draws up to `most` images of each person. Returns ints `[people, most]`, -1 for none."""
    if most == 1 and len(owners) == owners.max() + 1:
        return np.arange(len(owners))[:, np.newaxis]
    order = np.lexsort([rng.random(len(owners)), owners])
    counts = np.bincount(owners)
    place = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen = np.full([len(counts), most], -1)
    is_drawn = place < most
    chosen[owners[order][is_drawn], place[is_drawn]] = order[is_drawn]
    return chosen


def automatic(epsilon, num_protected, factor=1.0, **flags):
    """Returns the settings that `classify` chooses, with `factor` times its learning rate."""
    values = settings.resolve("digits", {"epsilon": epsilon, **flags})
    values, _ = defaults.complete(values, num_protected)
    return dataclasses.replace(values, learning_rate=factor * values.learning_rate)


def problems():
    """Yields problems: name, features, labels, owners (or None), and number of test examples."""
    for kind, side, distortion, count in (
        (synthetic.Strokes, 8, 1.3, 300),
        (synthetic.Strokes, 8, 1.3, 6000),
        (synthetic.Strokes, 24, 1.5, 4000),
        (Shapes, 8, 1.3, 400),
    ):
        images, labels = problem(kind, count + TEST, side, distortion)
        yield f"{kind.__name__} {side}x{side}", features(images), labels, None, TEST
    for name, arguments in SCENES.items():
        images, labels, owners = scenes(700, **arguments)
        rows, held_out = features(images), int(np.sum(owners >= 548))
        yield f"{name}, people", rows, labels, owners, held_out
        yield f"{name}, images", rows, labels, None, held_out


def main(arguments=None):
    """Prints a table of accuracies in percent; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="Trainings of each setting.")
    parser.add_argument("--problems", type=int, help="Only as many of the problems.")
    values = parser.parse_args(arguments)
    print(f"| problem | protected | rate | {' | '.join(f'epsilon {e:g}' for e in EPSILONS)} |")
    for name, rows, labels, owners, held_out in itertools.islice(problems(), values.problems):
        train, test = slice(-held_out), (rows[-held_out:], labels[-held_out:])
        owners = owners if owners is None else owners[train]
        protected = len(rows) - held_out if owners is None else int(owners.max()) + 1
        for factor in FACTORS:
            cells = []
            for epsilon in EPSILONS:
                chosen = automatic(epsilon, protected, factor)
                reached = [
                    accuracy(rows[train], labels[train], test, chosen, seed, owners)
                    for seed in range(values.seeds)
                ]
                cells.append(f"{100 * np.mean(reached):.1f}")
            print(f"| {name} | {protected} | {factor:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
