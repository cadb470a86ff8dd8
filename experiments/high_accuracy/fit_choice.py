"""Which steps and learning rate are best for a private linear classifier on fixed features.

    python -m experiments.high_accuracy.fit_choice

The rule of `tfdpx.train.defaults` was read off what this prints. The problems are
generated: classes of distorted strokes and of distorted shapes, so that fitting a rule on them
spends no privacy. For each number of images and epsilon, the best products of steps and learning
rate.
"""

import functools
import itertools
import json

import keras
import numpy as np
import scipy.ndimage
import tensorflow as tf

import tfdpx
from experiments.free_features.drawings import Shapes
from tfdpx import synthetic
from tfdpx.models import ScatterLinear

CLASSES, TEST = 10, 2000
SIZES, EPSILONS = (300, 1437, 6000), (0.5, 1.0, 3.0, 8.0)
STEPS, MOVES = (10, 30, 100), (100, 200, 400, 800, 1600, 3200, 6400)
CLIP, DELTA, SEEDS = 0.02, 1e-5, (0, 1)
_CANVAS = 48


def problem(kind, count, side, distortion, seed=0):
    """Images [count, side, side, 1] of distorted prototypes, one a class, and labels [count]."""
    rng = np.random.default_rng(seed)
    prototypes = kind(_CANVAS, seed=1000).images(CLASSES)[..., 0]
    labels, images = rng.integers(0, CLASSES, count), []
    grid = np.mgrid[:_CANVAS, :_CANVAS]
    for label in labels:
        turn, shear = 0.12 * distortion * rng.normal(size=2)
        matrix = [[np.cos(turn), shear - np.sin(turn)], [np.sin(turn), np.cos(turn)]]
        matrix = matrix @ np.diag(np.exp(0.1 * distortion * rng.normal(size=2)))
        centre = np.full(2, (_CANVAS - 1) / 2)
        offset = centre - matrix @ centre + 1.5 * distortion * rng.normal(size=2)
        image = scipy.ndimage.affine_transform(prototypes[label], matrix, offset, order=1)
        bend = 2.0 * distortion * rng.normal(size=(2, 4, 4))
        bend = scipy.ndimage.zoom(bend, (1, _CANVAS // 4, _CANVAS // 4), order=1)
        image = scipy.ndimage.map_coordinates(image, grid + bend, order=1)
        pixel = _CANVAS // side
        image = image.reshape(side, pixel, side, pixel).mean(axis=(1, 3))
        images.append(image + 0.03 * distortion * rng.normal(size=image.shape))
    return np.clip(images, 0, 1)[..., np.newaxis].astype("float32"), labels


@tf.function
def logits(features, targets, test, steps, learning_rate, noise_multiplier, seed):
    """Logits of `test` after private full-batch descent: the update of `tfdpx.DPSGD`.

    For rows of norm one the gradient of an example has the norm of its errors.
    """
    count = tf.cast(tf.shape(features)[0], "float32")
    weights = tf.zeros([features.shape[1], CLASSES])
    for step in tf.range(steps):
        errors = tf.nn.softmax(features @ weights) - targets
        clipped = errors / tf.maximum(tf.norm(errors, axis=1, keepdims=True), CLIP)
        noise = tf.random.stateless_normal(weights.shape, [seed, step])
        total = tf.matmul(features, clipped, transpose_a=True) + noise_multiplier * noise
        weights -= learning_rate / count * total
    return test @ weights


@functools.cache
def noise_multiplier(count, epsilon, steps):
    """What the budget asks for."""
    plan = tfdpx.PrivacyPlan(count, batch_size=count, steps=steps, epsilon=epsilon, delta=DELTA)
    return plan.noise_multiplier


def accuracy(features, labels, count, epsilon, steps, move):
    """Mean accuracy on the last `TEST` rows after training on the first `count`."""
    numbers = [move / steps, noise_multiplier(count, epsilon, steps)]
    numbers = [tf.constant(number, "float32") for number in numbers]
    data = tf.constant(features[:count]), tf.one_hot(labels[:count], CLASSES), features[-TEST:]
    found = [
        np.argmax(logits(*data, tf.constant(steps), *numbers, tf.constant(seed)), axis=1)
        for seed in SEEDS
    ]
    return float(np.mean(np.array(found) == labels[-TEST:]))


def main():
    """Prints the best products for every problem."""
    record = []
    problems = (synthetic.Strokes, 8, 1.3), (Shapes, 8, 1.3), (synthetic.Strokes, 16, 1.5)
    for kind, side, distortion in problems:
        images, labels = problem(kind, max(SIZES) + TEST, side, distortion)
        model = ScatterLinear(CLASSES, images.shape[1:])
        rows = keras.Model(model.input, model.get_layer("unit_norm").output)
        features = rows.predict(images, batch_size=500, verbose=0)
        for count, epsilon in itertools.product(SIZES, EPSILONS):
            tested = [
                (accuracy(features, labels, count, epsilon, steps, move), steps, move)
                for steps, move in itertools.product(STEPS, MOVES)
            ]
            best = sorted(tested, reverse=True)[:3]
            shown = ", ".join(f"{a:.3f} ({steps} steps, {move})" for a, steps, move in best)
            size = epsilon * count
            print(f"{kind.__name__} {side}: epsilon * images = {size:g}: {shown}", flush=True)
            record.append([kind.__name__, side, count, epsilon, *best[0]])
    print(json.dumps({"best": record}))


if __name__ == "__main__":
    main()
