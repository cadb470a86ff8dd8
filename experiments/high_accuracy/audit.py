r"""Computes a lower bound on epsilon from attacks on many small models (De et al. 2022, A.2).

    python -m experiments.high_accuracy.audit --workdir=/tmp/audit
    python -m experiments.high_accuracy.audit --workdir=/tmp/audit --batch_size=0

Trains models of two kinds: on --num_examples images, and on these images with one more image, the
target. All models are LeNets with the same initial weights; only batches and noise differ. A
model's score is its logit for the label of the target.

Phase I (Table 7) chooses a setting for each epsilon: the target, learning rate, clip and number of
updates. With each setting it trains --sweep_models models of each kind and fits a normal
distribution to the scores of each kind. The chosen setting has the largest total variation distance
between the two distributions.

Phase II (Table 8) trains --models models of each kind with the chosen setting. Thresholds are
chosen on a fifth of these models. The errors on the other models give two lower bounds on epsilon.
The first, by Clopper-Pearson, is valid for any mechanism. The second is valid for Gaussian DP, that
is, for --batch_size=0, which uses all examples in every update; for sampled batches it is only an
estimate. `--augmult=16` trains on 16 views of each image.

Each score is a line of `scores.jsonl` in --workdir, so an interrupted audit continues, and a later
audit can add models. `table.md` is Table 8. The last line of the standard output is one JSON
object.
"""

import argparse
import itertools
import json
import math
import pathlib

import keras
import numpy as np
import scipy.special
import scipy.stats

import tfdpx
from experiments.trainer import Trainer
from tfdpx import _resumable as resumable
from tfdpx import audit
from tfdpx.train.data import images
from tfdpx.train.errors import checking_flags, in_one_line

# Targets that are test images of a digit with the label of another digit, as in Table 7.
WRONG = {f"{digit}_as_{label}": (digit, label) for digit, label in ((7, 8), (6, 7), (0, 1))}
TARGETS = ("blank", "noise", *WRONG)
BOUNDS = {"any": audit.epsilon_lower_bound, "gdp": audit.gdp_epsilon_lower_bound}
_LEAST = 12  # The least height and width that LeNet takes.
_RESERVED = 0.2
_CHUNK = 50


def pixels(x):
    """Returns images with float32 values in [0, 1], padded to LeNet's least size if necessary.

    `x` is uint8 `[n, height, width, channels]`.
    """
    missing = [max(0, _LEAST - size) for size in x.shape[1:3]]
    border = [(size // 2, size - size // 2) for size in missing]
    return np.pad(x.astype("float32") / 255, [(0, 0), *border, (0, 0)])


def target(data, name):
    """Returns the target called `name`: an image `[1, height, width, channels]` and its label."""
    image = pixels(data.eval_x[:1])
    if name == "blank":
        return np.zeros_like(image), 0
    if name == "noise":
        return np.random.default_rng(0).uniform(size=image.shape).astype("float32"), 0
    digit, label = WRONG[name]
    return pixels(data.eval_x[data.eval_y == digit][:1]), label


def total_variation(first, second):
    """Returns the total variation distance of two normal distributions, fitted to the arrays."""
    laws = [scipy.stats.norm(np.mean(s), max(np.std(s), 1e-12)) for s in (first, second)]
    (m, n), (a, b) = ([law.mean() for law in laws], [law.std() ** -2 for law in laws])
    # The difference of the densities' logarithms is a quadratic. Its roots are where they are
    # equal.
    roots = np.roots([a - b, 2 * (n * b - m * a), m**2 * a - n**2 * b + np.log(b / a)])
    points = np.sort(roots[np.isreal(roots)].real)
    masses = [np.diff([0.0, *law.cdf(points), 1.0]) for law in laws]
    return float(np.abs(masses[0] - masses[1]).sum() / 2)


def advantage_upper_bound(epsilon, delta):
    """Returns the largest possible mean advantage of an attack on an (epsilon, delta)-DP mechanism.

    See Humphries et al. 2020.
    """
    return (math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1)


def chosen_threshold(members, others, value):
    """Returns the threshold with the largest value. It lies halfway between two scores.

    Args:
        members: Array `[n]`, scores of models with the target.
        others: Array `[n]`, scores of models without the target.
        value: Function that takes the numbers of false positives and of false negatives, and
            returns the value of a threshold with these errors.
    """
    scores = np.union1d(members, others)
    thresholds = np.append((scores[1:] + scores[:-1]) / 2, scores[-1])
    values = [value(np.sum(others > t), np.sum(members <= t)) for t in thresholds]
    return thresholds[int(np.argmax(values))]


def attacked(members, others, delta, confidence):
    """Returns a row of Table 8: a dict of lower bounds, AUC and advantage.

    Args:
        members: Array `[n]`, scores of models with the target.
        others: Array `[n]`, scores of models without the target.
        delta: Float in (0, 1).
        confidence: Float, the confidence of each lower bound.
    """
    count = max(1, int(_RESERVED * len(members)))
    reserved = members[:count], others[:count]
    members, others = members[count:], others[count:]

    def errors(value):
        threshold = chosen_threshold(*reserved, value)
        return int(np.sum(others > threshold)), int(np.sum(members <= threshold))

    row = {"models": len(members)}
    for name, bound in BOUNDS.items():
        false, missed = errors(lambda f, m, b=bound: b(int(f), count, int(m), count, delta))
        value = bound(false, len(others), missed, len(members), delta, confidence)
        row[f"epsilon_lower_bound_{name}"] = value
    false, missed = errors(lambda f, m: -int(f) - int(m))
    row["auc"] = audit.membership_report(members, others).auc
    row["advantage"] = 1 - missed / len(members) - false / len(others)
    return row


class Scores:
    """Trains models with one epsilon, and stores their scores in the file."""

    def __init__(self, values, data, epsilon):
        self._values, self._data, self._epsilon = values, data, epsilon
        self._path, self._trainers = values.workdir / "scores.jsonl", {}
        rows = np.random.default_rng(0).permutation(len(data.train_y))[: values.num_examples]
        self._x, self._y = pixels(data.train_x[rows]), data.train_y[rows].astype("int64")

    def plan(self, steps):
        """Returns the plan of a training. Its `num_examples` always includes the target."""
        count = len(self._y) + 1
        return tfdpx.PrivacyPlan(
            count, batch_size=self._values.batch_size or count, steps=steps,
            epsilon=self._epsilon, delta=1 / len(self._y),
        )  # fmt: skip

    def pair(self, setting, models):
        """Returns two arrays `[models]`: scores of models with the target, and without the target.

        Args:
            setting: Tuple of target, learning rate, clip and number of updates.
            models: Int, the number of models of each kind.
        """
        values = self._values
        about = ("dataset", "num_examples", "batch_size", "augmult")
        key = [self._epsilon, *setting, *(getattr(values, name) for name in about)]
        pair = {True: [], False: []}
        for line in resumable.lines(self._path):
            if line["key"] == key:
                pair[line["with_target"]] += line["scores"]
        for with_target, scores in pair.items():
            while len(scores) < models:
                count = min(_CHUNK, models - len(scores))
                new = [self._score(setting, with_target) for _ in range(count)]
                line = {"key": key, "with_target": with_target, "scores": new}
                resumable.add_line(self._path, line)
                scores += new
        return [np.array(scores[:models]) for scores in pair.values()]

    def _score(self, setting, with_target):
        name, rate, clip, steps = setting
        image, label = target(self._data, name)
        if (name, clip, steps) not in self._trainers:
            self._trainers = {(name, clip, steps): self._trainer(image, label, clip, steps)}
        trainer = self._trainers[name, clip, steps]
        trainer.train(None, rate, absent=() if with_target else [len(self._y)])
        logits = trainer.logits(image)[0].astype("float64")
        return float(logits[label] - scipy.special.logsumexp(np.delete(logits, label)))

    def _trainer(self, image, label, clip, steps):
        keras.utils.set_random_seed(0)
        model, plan = tfdpx.models.LeNet(self._data.num_classes, image.shape[1:]), self.plan(steps)
        views = {}
        if self._values.augmult:
            crops = tfdpx.augment.RandomCropFlip(padding=1, flip=False)
            views = dict(augment=crops, augmult=self._values.augmult)
        optimizer = tfdpx.DPSGD(
            1.0, batch_size=plan.batch_size, noise_multiplier=plan.noise_multiplier,
            l2_norm_clip=clip, **views,
        )  # fmt: skip
        data = np.concatenate([self._x, image]), np.append(self._y, label)
        return Trainer(model, optimizer, plan, data)


def audited(values, data, epsilon):
    """Runs both phases for an epsilon, and returns a row of Table 8, a dict."""
    scores = Scores(values, data, epsilon)
    grid = itertools.product(
        values.targets.split(","), _floats(values.learning_rates), _floats(values.l2_norm_clips),
        map(int, values.steps.split(",")),
    )  # fmt: skip
    distances = {}
    for setting in grid:
        distances[setting] = total_variation(*scores.pair(setting, values.sweep_models))
        print(
            f"epsilon {epsilon:g}, {setting}: total variation {distances[setting]:.3f}", flush=True
        )
    best = max(distances, key=distances.get)
    delta = scores.plan(best[-1]).delta
    names = ("target", "learning_rate", "l2_norm_clip", "steps")
    row = {"epsilon": epsilon, **dict(zip(names, best, strict=True))}
    row |= attacked(*scores.pair(best, values.models), delta, values.confidence)
    bounds = ["any"] + ["gdp"] * (values.batch_size == 0)
    row["passed"] = all(row[f"epsilon_lower_bound_{name}"] <= epsilon for name in bounds)
    return {**row, "advantage_upper_bound": advantage_upper_bound(epsilon, delta)}


def table(rows):
    """Returns Table 8 in Markdown."""
    names = [name for name in rows[0] if name not in ("passed", "models")]
    lines = [[name.replace("_", " ") for name in names], ["---"] * len(names)]
    lines += [
        [row[name] if isinstance(row[name], str) else f"{row[name]:.3g}" for name in names]
        for row in rows
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _floats(text):
    return [float(part) for part in text.split(",")]


def main(arguments=None):
    """Runs the audit that the flags describe. A `UserError` is printed as one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, required=True, help="Folder for scores and the table.")
    add("--dataset", default="digits", help="Images; the paper's are mnist.")
    add("--epsilons", default="1,2,4,8", help="Nominal epsilons.")
    add("--num_examples", type=int, default=100, help="Images of D; delta is one over it.")
    add("--batch_size", type=int, default=64, help="Expected images of an update; 0: all.")
    add("--augmult", type=int, default=0, help="Views of each image.")
    add("--models", type=int, default=1000, help="Models of each kind in phase II.")
    add("--sweep_models", type=int, default=30, help="Models of each kind in phase I.")
    add("--targets", default="blank,noise,7_as_8", help=f"Of {', '.join(TARGETS)}.")
    add("--learning_rates", default="0.1,0.5,1", help="Among which phase I chooses.")
    add("--l2_norm_clips", default="0.1,1,10", help="Among which phase I chooses.")
    add("--steps", default="50,100", help="Updates among which phase I chooses.")
    add("--confidence", type=float, default=0.999, help="Of each lower bound.")
    values = parser.parse_args(arguments)
    values.workdir.mkdir(parents=True, exist_ok=True)
    with in_one_line("experiments.high_accuracy.audit"), checking_flags():
        data = images.load(values.dataset)
        rows = [audited(values, data, epsilon) for epsilon in _floats(values.epsilons)]
    (values.workdir / "table.md").write_text(table(rows))
    print(json.dumps({"passed": all(row["passed"] for row in rows), "rows": rows}))


if __name__ == "__main__":
    main()
