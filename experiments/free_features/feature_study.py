r"""Measures fixed features on small real images: accuracy against epsilon, for docs/features.md.

    python -m experiments.free_features.feature_study --out=/tmp/features --seeds=5

For each kind of features, a linear classifier is trained privately. The number of updates, the
learning rate and the clip are from `tfdpx.train.defaults`. Writes `features.json` and
`features.png`.
"""

import argparse
import json
import pathlib

import keras
import numpy as np
from sklearn import datasets, model_selection

import tfdpx
from experiments import pictures
from tfdpx.layers import Scattering2D, UnitNormWithConstant
from tfdpx.models import ScatterLinear
from tfdpx.train import defaults, settings

EPSILONS = (1.0, 3.0, 8.0)
DELTA = 1e-5
SIDE, STRIP, PATCHES = 8, 16, 1500


def digits():
    """Returns scikit-learn's digits in [0, 1] and labels, split as in `--dataset=digits`."""
    bunch = datasets.load_digits()
    images = (bunch.images[..., np.newaxis] / 16).astype("float32")
    return model_selection.train_test_split(
        images, bunch.target, test_size=360, stratify=bunch.target, random_state=0
    )


def altered(change):
    """Returns the digits with `change(images, rng)` in place of their images."""
    train, test, *labels = digits()
    rng = np.random.default_rng(0)
    return [np.clip(change(x, rng), 0, 1).astype("float32") for x in (train, test)] + labels


def patches():
    """Returns gray patches from scikit-learn's two photographs, in eight classes.

    Each quarter of a photograph is a class. A quarter is cut into vertical strips. Training and
    test patches come from alternate strips.
    """
    sets = {}
    for split, start in (("train", 0), ("test", 1)):
        rng, images, labels = np.random.default_rng(start), [], []
        for number, photograph in enumerate(datasets.load_sample_images().images):
            gray = photograph.mean(axis=-1) / 255
            height, width = (n // 2 for n in gray.shape)
            for quarter in range(4):
                top, left = (quarter // 2) * height, (quarter % 2) * width
                rows = rng.integers(top, top + height - SIDE, PATCHES // 8)
                strips = 2 * rng.integers(0, width // (2 * STRIP), len(rows)) + start
                columns = left + STRIP * strips + rng.integers(0, STRIP - SIDE + 1, len(rows))
                images += [
                    gray[r : r + SIDE, c : c + SIDE] for r, c in zip(rows, columns, strict=True)
                ]
                labels += [4 * number + quarter] * len(rows)
        sets[split] = np.array(images, "float32")[..., np.newaxis], np.array(labels)
    (x, y), (test_x, test_y) = sets["train"], sets["test"]
    return x, test_x, y, test_y


DATA = {
    "digits": digits,
    "inverted digits": lambda: altered(lambda x, rng: 1 - x),
    "low contrast": lambda: altered(lambda x, rng: 0.4 + 0.2 * x),
    "noisy digits": lambda: altered(lambda x, rng: x + 0.2 * rng.normal(size=x.shape)),
    "photographs": patches,
}


def pixels():
    """Returns a model from images to pixels, scaled to norm one."""
    inputs = keras.Input((SIDE, SIDE, 1))
    return keras.Model(inputs, UnitNormWithConstant()(inputs))


def scattering():
    """Returns a model from images to their scattering transform, scaled to norm one."""
    inputs = keras.Input((SIDE, SIDE, 1))
    x = keras.layers.Resizing(2 * SIDE, 2 * SIDE)(inputs)
    return keras.Model(inputs, UnitNormWithConstant()(Scattering2D(2, padding="zeros")(x)))


def whitened():
    """Returns a model from images to the features of `tfdpx.models.ScatterLinear`."""
    model = ScatterLinear(2, (SIDE, SIDE, 1))
    return keras.Model(model.input, model.get_layer("unit_norm").output)


FEATURES = {
    "pixels": pixels,
    "scattering": scattering,
    "scattering, root, whitened by dead leaves": whitened,
}


def accuracy(data, epsilon, seed):
    """Returns the test accuracy of a linear classifier trained privately on features."""
    x, test_x, y, test_y = data
    chosen, _ = defaults.complete(settings.resolve("digits", {"epsilon": epsilon}), len(x))
    plan = chosen.privacy_plan(len(x))
    model = keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            keras.layers.Dense(int(y.max()) + 1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(
        tfdpx.DPSGD(chosen.learning_rate, plan=plan, l2_norm_clip=chosen.l2_norm_clip, seed=seed),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(plan.batches(x, y, optimizer=model.optimizer, seed=seed), verbose=0)
    return float(np.mean(np.argmax(model.predict(test_x, verbose=0), axis=1) == test_y))


def main():
    """Measures all features on all data, prints a table, and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=".", help="Folder to write to.")
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=DATA, help="Data sets.")
    parser.add_argument("--seeds", type=int, default=5, help="Runs of each point.")
    arguments = parser.parse_args()
    record = {}
    for name in arguments.data:
        images = DATA[name]()
        for kind, build in FEATURES.items():
            features = build()
            x, test_x = (features.predict(i, batch_size=500, verbose=0) for i in images[:2])
            for epsilon in EPSILONS:
                runs = [
                    accuracy((x, test_x, *images[2:]), epsilon, seed)
                    for seed in range(arguments.seeds)
                ]
                record.setdefault(name, {}).setdefault(kind, {})[f"{epsilon:g}"] = runs
            shown = [f"{100 * np.median(record[name][kind][f'{e:g}']):.1f}" for e in EPSILONS]
            print(f"| {name} | {kind} | {' | '.join(shown)} |", flush=True)
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    pictures.draw(
        {
            name: {k: {float(e): r for e, r in points.items()} for k, points in kinds.items()}
            for name, kinds in record.items()
        },
        out / "features.png",
    )
    (out / "features.json").write_text(json.dumps(record))
    print(json.dumps({name: {k: v for k, v in kinds.items()} for name, kinds in record.items()}))


if __name__ == "__main__":
    main()
