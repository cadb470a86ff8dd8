r"""Pre-trains an image classifier on generated images, which cost no privacy.

    python -m experiments.free_features.pretrain --workdir=runs/synthetic
    python -m tfdpx.train.classify --preset=digits_synthetic --epsilon=3 \
        --init_from=runs/synthetic/model.keras

Each image is a separate class, and the network sees turned, scaled and shifted views of the image.
The program reads no data set. --dataset names the images that the network will be used for; only
their public size and normalization matter.
"""

import argparse
import json
import pathlib

import keras
import numpy as np

from experiments.free_features.drawings import RandomViews, Shapes
from tfdpx import noise, synthetic
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.layers.few_weights import last_layer
from tfdpx.report import report
from tfdpx.train import start_from
from tfdpx.train.data import tfds

KINDS = {
    "strokes": synthetic.Strokes,
    "dead_leaves": synthetic.DeadLeaves,
    "shapes": Shapes,
}


def main():
    """Reads the flags, trains, and writes `model.keras` and `record.json`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, required=True, help="Folder for the model and its record.")
    add("--dataset", default="digits", help="The images that it is for.")
    add("--model", default="small_cnn", help="As for tfdpx classify.")
    add("--generator", default="strokes", choices=KINDS, help="Images to learn from.")
    add("--num_images", type=int, default=500, help="Images to generate.")
    add("--steps", type=int, default=1000, help="Updates.")
    add("--batch_size", type=int, default=128, help="Views per update.")
    add("--learning_rate", type=float, default=0.1, help="The largest rate, at update 100.")
    add("--flip", action="store_true", help="Mirror half of the views.")
    add("--seed", type=int, default=0, help="Seed of images, views and initial weights.")
    arguments = parser.parse_args()
    arguments.workdir.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"loss": pretrain(arguments), "workdir": str(arguments.workdir)}))


def pretrain(arguments):
    """Trains, writes the files and returns the last loss.

    Args:
        arguments: Namespace of the flags of `main`.
    """
    keras.utils.set_random_seed(arguments.seed)
    entry = tfds.Name.parse(arguments.dataset).entry
    shape, count = entry.image_shape, arguments.num_images
    images = KINDS[arguments.generator](shape[:2], shape[2], seed=arguments.seed).images(count)
    images = np.rint(255 * images).astype("uint8")
    classifier = start_from.classifier(
        arguments.model,
        shape,
        entry.num_classes,
        entry.centre,
        entry.deviation,
    )
    body = classifier.layers[-1]
    features = keras.Model(body.inputs, last_layer(body).input)
    last_loss = separate(
        keras.Model(classifier.inputs, features(classifier.get_layer("normalise").output)),
        images, arguments.steps, arguments.batch_size,
        lambda rate: keras.optimizers.SGD(rate, momentum=0.9, weight_decay=1e-3),
        arguments.learning_rate, RandomViews(flip=arguments.flip), arguments.seed,
    )  # fmt: skip
    report.write(
        arguments.workdir,
        program="experiments.free_features.pretrain",
        data=records.DatasetId(f"synthetic:{arguments.generator}", count),
        ledger=Ledger(),  # Generated images hold no person's data.
        model=classifier,
        results={"model": arguments.model, "steps": arguments.steps, "loss": last_loss},
    )
    return last_loss


def separate(features, images, steps, batch_size, optimizer, learning_rate, views, seed=0):
    """Trains a model in place, so its features tell the views of an image from other images' views.

    Args:
        features: `keras.Model` from images to features.
        images: uint8 `[count, height, width, channels]`.
        steps: Int, the number of updates.
        batch_size: Int.
        optimizer: Function that takes a schedule of learning rates and returns an optimizer.
        learning_rate: Float, the largest rate of the schedule, a cosine with a warm-up.
        views: `RandomViews`.
        seed: Int, the seed of batches and views.

    Returns:
        Float, the loss of the last update.
    """
    logits = keras.layers.Dense(len(images), dtype="float32", name="exemplars")(features.output)
    model, warmup = keras.Model(features.input, logits), min(100, steps // 2)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - warmup, warmup_target=learning_rate, warmup_steps=warmup
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(rate), loss)
    rng, key = np.random.default_rng(seed), noise.make_seed(seed)
    for step in range(steps):
        rows = rng.permutation(len(images))[:batch_size]
        choices = views.draw(len(rows), 1, noise.fold_in(key, step))
        last_loss = model.train_on_batch(views.apply(images[rows], choices)[:, 0], rows)
    return float(last_loss)


if __name__ == "__main__":
    main()
