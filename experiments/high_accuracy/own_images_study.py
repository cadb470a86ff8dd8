"""Measures the accuracy on a small folder of images: digits, 200 to 1,437 to train on.

    python -m experiments.high_accuracy.own_images_study --seeds=5

Writes the digits of scikit-learn as folders of images, `train` with this number and `test` with the
same 360, and runs `tfdpx.train.classify --dataset=folder:PATH` on them. Each seed takes different
training images and noise. Prints median, lowest and highest test accuracy of each as rows of a
Markdown table (docs/own_images.md).
"""

import argparse
import contextlib
import io
import json
import pathlib
import statistics
import tempfile

from absl import flags
from absl.testing import flagsaver
from PIL import Image
from sklearn import datasets, model_selection

from tfdpx.train import classify
from tfdpx.train.data.tfds import PIXEL_SCALE, TEST_EXAMPLES


def write(folder, images, labels):
    """Writes images [n, 8, 8] as `folder/CLASS/NUMBER.png`."""
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / f"{label}").mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((image * PIXEL_SCALE).astype("uint8"))
        image.save(folder / f"{label}" / f"{number}.png")


def accuracy(count, epsilon, seed):
    """Returns the test accuracy of a run on `count` training images."""
    bunch = datasets.load_digits()
    split = dict(test_size=TEST_EXAMPLES, stratify=bunch.target, random_state=0)
    train, test, labels, test_labels = model_selection.train_test_split(
        bunch.images, bunch.target, **split
    )
    if count < len(train):
        train, _, labels, _ = model_selection.train_test_split(
            train, labels, train_size=count, stratify=labels, random_state=seed
        )
    with tempfile.TemporaryDirectory() as there:
        path = pathlib.Path(there)
        write(path / "train", train, labels)
        write(path / "test", test, test_labels)
        output, settings = io.StringIO(), dict(epsilon=epsilon, seed=seed)
        with (
            contextlib.redirect_stdout(output),
            flagsaver.flagsaver(dataset=f"folder:{path}", workdir=str(path / "run"), **settings),
        ):
            classify.main(["classify"])
    return json.loads(output.getvalue().splitlines()[-1])["test_accuracy"]


def main():
    """Prints a row for each number of images."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--counts", type=int, nargs="+", default=[200, 500, 1437])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[8.0, 3.0, 1.0])
    parser.add_argument("--seeds", type=int, default=5, help="Runs of each.")
    values = parser.parse_args()
    flags.FLAGS(["own_images_study"])
    print("| images to train on | " + " | ".join(f"epsilon {e:g}" for e in values.epsilons) + " |")
    print("|" + "---|" * (1 + len(values.epsilons)))
    for count in values.counts:
        cells = []
        for epsilon in values.epsilons:
            runs = [100 * accuracy(count, epsilon, seed) for seed in range(values.seeds)]
            cells.append(f"{statistics.median(runs):.1f}% ({min(runs):.1f} to {max(runs):.1f})")
        print(f"| {count:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
