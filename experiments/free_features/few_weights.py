r"""Fine-tunes few or all weights of a small vision transformer, pre-trained on generated images.

    python -m experiments.free_features.few_weights --workdir=runs/fine_tuning_few

Pre-trains on generated strokes and shapes, with a separate class for each image; this spends no
privacy. Then fine-tunes on the digits, at each epsilon. The trained weights are one of the choices
of `tfdpx.layers.trainable`: the last layer; the last layer with biases, with normalization, or with
LoRA; or all weights. All weights are also trained from scratch.

Each choice has one learning rate for every epsilon. It is the best of `RATES` on a held-out quarter
of the training images, at epsilon 3 and one seed. An interrupted study resumes. The results are
`table.md` and `few_weights.png`.
"""

import argparse
import math
import pathlib
import statistics

import keras
import numpy as np
from keras import layers
from sklearn import datasets, model_selection

import tfdpx
from experiments import pictures
from experiments.free_features.drawings import RandomViews, Shapes
from experiments.free_features.pretrain import separate
from tfdpx import _resumable as resumable
from tfdpx.train.data import tfds

WHAT = ("last", "bias", "norm", "lora", "all", "scratch")
EPSILONS = (1.0, 3.0, 8.0)
RATES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
TUNED_AT, RANK, DELTA = 3.0, 4, 1e-5
WIDTH, HEADS, BLOCKS = 32, 4, 2
OF_EACH_KIND = 500  # The number of generated images.


def tiny_vit():
    """Returns a vision transformer. It maps 8x8 images in [0, 255] to 16 joined tokens."""
    images = keras.Input((8, 8, 1))
    x = layers.Conv2D(WIDTH, 2, strides=2)(layers.Rescaling(1 / 127.5, -1)(images))
    x = layers.Reshape((16, WIDTH))(x)
    # The bias of this layer has an entry for each token, so it is the embedding of positions.
    x = layers.EinsumDense("btd,de->bte", (16, WIDTH), bias_axes="te", name="positions")(x)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)])
        y = layers.Dense(2 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    return keras.Model(images, layers.Flatten()(layers.LayerNormalization()(x)), name="tiny_vit")


def pretrain(path, steps):
    """Trains a `tiny_vit` to tell generated images apart in random views, and writes its file.

    The features of the model are scaled by their statistics on the generated images.

    Args:
        path: `pathlib.Path` of the `.keras` file.
        steps: Int, the number of updates, each on 256 views.
    """
    keras.utils.set_random_seed(0)
    kinds = tfdpx.synthetic.Strokes, Shapes
    generated = [kind((8, 8), 1, seed=seed).images(OF_EACH_KIND) for seed, kind in enumerate(kinds)]
    images = np.rint(255 * np.concatenate(generated)).astype("uint8")
    model, views = tiny_vit(), RandomViews()
    separate(model, images, steps, 256, keras.optimizers.AdamW, 3e-3, views)
    features = model.predict(images, verbose=0)  # Generated images: no privacy is spent.
    scaled = layers.Normalization(mean=features.mean(0), variance=features.var(0) + 1e-3)
    keras.Model(model.inputs, scaled(model.output), name=model.name).save(path)


def accuracy(path, what, epsilon, rate, seed, train, test, steps):
    """Returns the test accuracy of one private training, and the number of weights it trained.

    Args:
        path: `pathlib.Path` of the pre-trained file.
        what: One of `WHAT`, the weights to train.
        epsilon: Float.
        rate: Float, the learning rate.
        seed: Int, the seed of batches, noise and new weights.
        train: Pair of training images and labels.
        test: Pair of test images and labels.
        steps: Int, the number of updates, each on 512 images on average.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    vit = tiny_vit() if what == "scratch" else keras.saving.load_model(path, compile=False)
    body = tfdpx.models.backbone(vit, input_shape=(8, 8, 1))
    model = keras.Sequential([body, layers.Dense(10, kernel_initializer="zeros")])
    if what not in ("all", "scratch"):
        tfdpx.layers.trainable(model, what, RANK)
    tfdpx.checks.mark_public(model)
    plan = tfdpx.PrivacyPlan(
        len(train[0]), batch_size=min(512, len(train[0])), steps=steps, epsilon=epsilon, delta=DELTA
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(rate, plan=plan, l2_norm_clip=0.1, seed=seed), loss)
    model.fit(*train, verbose=0)
    weights = sum(math.prod(v.shape) for v in model.trainable_variables)
    right = model.predict(test[0], verbose=0).argmax(axis=1) == test[1]
    return float(right.mean()), weights


def study(workdir, seeds, steps, pretraining_steps):
    """Computes the missing results, and writes the table and the picture.

    Args:
        workdir: `pathlib.Path`, the folder of all results.
        seeds: List of ints.
        steps: Int, the number of private updates.
        pretraining_steps: Int, the number of updates on generated images.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path, results = workdir / "tiny_vit.keras", workdir / "results.jsonl"
    if not path.exists():
        pretrain(path, pretraining_steps)
    accuracies = {tuple(r["key"]): (r["accuracy"], r["weights"]) for r in resumable.lines(results)}
    data = datasets.load_digits()
    x, y = (data.images * tfds.PIXEL_SCALE).astype("uint8")[..., None], data.target
    split = dict(stratify=y, test_size=tfds.TEST_EXAMPLES, random_state=0)
    train, test = model_selection.train_test_split(np.arange(len(y)), **split)
    fitted, held_out = model_selection.train_test_split(
        train, stratify=y[train], test_size=0.25, random_state=0
    )

    def result(kind, what, epsilon, rate, seed, rows, measured):
        key = kind, what, epsilon, rate, seed
        if key not in accuracies:
            parts = (x[rows], y[rows]), (x[measured], y[measured])
            accuracies[key] = accuracy(path, what, epsilon, rate, seed, *parts, steps)
            line = dict(zip(("accuracy", "weights"), accuracies[key], strict=True), key=key)
            resumable.add_line(results, line)
            print(*key, f"{100 * accuracies[key][0]:.1f}%", flush=True)
        return accuracies[key]

    rates, table, weights = {}, {}, {}
    for what in WHAT:
        tuned = {r: result("held out", what, TUNED_AT, r, 0, fitted, held_out)[0] for r in RATES}
        rates[what] = max(tuned, key=tuned.get)
        for epsilon in EPSILONS:
            runs = [result("test", what, epsilon, rates[what], s, train, test) for s in seeds]
            table[what, epsilon] = sorted(run[0] for run in runs)
            weights[what] = runs[0][1]
    write_table(table, weights, rates, workdir / "table.md")
    lines = {
        f"{what}, {weights[what]:,} weights": {e: table[what, e] for e in EPSILONS} for what in WHAT
    }
    pictures.draw({"": lines}, workdir / "few_weights.png")


def write_table(table, weights, rates, path):
    """Writes a table of medians and ranges.

    It has a row for each choice of trained weights, and a column for each epsilon.
    """
    head = ["trained", "weights", "learning rate", *(f"epsilon {e:g}" for e in EPSILONS)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for what in WHAT:
        cells = [what, f"{weights[what]:,}", f"{rates[what]:g}"]
        for epsilon in EPSILONS:
            runs = [100 * run for run in table[what, epsilon]]
            cells.append(f"{statistics.median(runs):.1f}% ({runs[0]:.1f} to {runs[-1]:.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")


def main(arguments=None):
    """Runs the study that the flags describe."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, required=True, help="Folder for results.")
    add("--seeds", default="1,2,3,4,5", help="Seeds of the private runs.")
    add("--steps", type=int, default=40, help="Private updates.")
    add("--pretraining_steps", type=int, default=1500, help="Updates on generated images.")
    values = parser.parse_args(arguments)
    seeds = [int(seed) for seed in values.seeds.split(",")]
    study(values.workdir, seeds, values.steps, values.pretraining_steps)
    print((values.workdir / "table.md").read_text())


if __name__ == "__main__":
    main()
