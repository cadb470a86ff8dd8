r"""Compares estimated individual epsilons with exact ones, and measures the loss of accuracy.

    python -m experiments.individual.study --data=digits --seeds=5

Trains with `tfdpx.accounting.IndividualAccountant`, and measures the gradient norms of 1,000 random
examples at every update. From these norms exact individual epsilons are computed. The accountant's
epsilons are estimates: its norm of an example is from the last update that drew the example (Figure
3 of Yu et al. 2022). The study also trains with the same clip for all examples, with the same
seeds, and compares the test accuracy (Table 1 of the paper).

With --attack the study also attacks a model without privacy (Figure 7). With --clips it instead
trains with several clips, the listed multiples of the median norm at the start (Figure 8). No
epsilon covers this median.

The last line is one JSON object. The file `private.npz` in --workdir holds epsilons and norms,
which are private.
"""

import argparse
import pathlib
import sys

import keras
import numpy as np
from sklearn import datasets, model_selection

import tfdpx
from experiments.individual import groups
from tfdpx.accounting import IndividualAccountant
from tfdpx.accounting.individual import individual_epsilon
from tfdpx.sampling.examples import as_examples
from tfdpx.train import individual
from tfdpx.train.data import tfds
from tfdpx.train.output import to_json
from tfdpx.training.norms import GradientNorms

_REFRESHES = (0, 1, 2)
# The number of examples with measured norms, as in the paper.
_MEASURED = 1000


def measured_rows(count):
    """Returns the indices of the examples with measured norms, the same on each call."""
    return np.random.default_rng(3).permutation(count)[:_MEASURED]


class ExactNorms(keras.callbacks.Callback):
    """Measures the gradient norms of `measured_rows`, divided by the clip, after every update.

    Attributes:
        norms: List of float arrays [n], one for each update.
    """

    def __init__(self, x, y):
        super().__init__()
        rows = measured_rows(len(y))
        self._examples, self._measure = as_examples(x[rows], y[rows]), None
        self.norms = []

    def on_train_batch_end(self, batch, logs=None):
        """Measures the norms and appends them to `norms`."""
        if self._measure is None:
            engine, size = self.model.optimizer.prepared[self.model].engine, _MEASURED // 2
            self._measure = GradientNorms(self.model, self._examples, size, lambda *_: engine)
        norms = self._measure(np.arange(self._examples.count))
        self.norms.append(np.minimum(norms / self.model.optimizer.l2_norm_clip, 1.0))


def arrays(name):
    """Returns the training data and the test data of a data set, each a pair `(x, y)`."""
    if name == "digits":
        bunch = datasets.load_digits()
        x = (bunch.images[..., np.newaxis] / 16).astype("float32")
        train, test = model_selection.train_test_split(
            np.arange(len(x)),
            test_size=tfds.TEST_EXAMPLES,
            stratify=bunch.target,
            random_state=0,
        )
        return [(x[rows], bunch.target[rows]) for rows in (train, test)]
    generator = np.random.default_rng(0)
    y = generator.choice(5, size=6000, p=[0.4, 0.3, 0.15, 0.1, 0.05])
    centres = generator.normal(size=(5, 20)) * 0.7
    x = (centres[y] + generator.normal(size=(6000, 20))).astype("float32") / 4
    return [(x[:5000], y[:5000]), (x[5000:], y[5000:])]


def model_of(values, data, seed, refreshes=None, private=True):
    """Returns a compiled model, its accountant and its plan."""
    (x, y), _ = data
    keras.utils.set_random_seed(seed)
    plan = tfdpx.PrivacyPlan(
        len(x), batch_size=values.batch_size, steps=values.steps, epsilon=values.epsilon, delta=1e-5
    )
    accountant = None if refreshes is None else IndividualAccountant(plan, 0.01, refreshes)
    shape = x.shape[1:]
    model = (
        tfdpx.models.SmallCNN(int(y.max()) + 1, shape)
        if len(shape) > 1
        else keras.Sequential(
            [keras.Input(shape), keras.layers.Dense(32, "tanh"), keras.layers.Dense(5)]
        )
    )
    optimizer = keras.optimizers.SGD(values.learning_rate / 4)
    if private:
        optimizer = tfdpx.DPSGD(
            values.learning_rate, plan=plan, l2_norm_clip=values.l2_norm_clip, seed=seed,
            individual=accountant,
        )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model, accountant, plan


def train(values, data, seed, refreshes=None, with_norms=False, private=True):
    """Trains once; returns the model, its accountant, exact norms, and the test accuracy."""
    (x, y), test = data
    model, accountant, plan = model_of(values, data, seed, refreshes, private)
    norms = ExactNorms(x, y) if with_norms else None
    if private:
        batches = plan.batches(x, y, optimizer=model.optimizer)
        model.fit(batches, shuffle=False, verbose=0, callbacks=[norms] if with_norms else [])
    else:
        model.fit(x, y, batch_size=32, epochs=60, verbose=0)
    return model, accountant, norms, model.evaluate(*test, verbose=0)[1]


def closeness(accountant, norms):
    """Returns figures of how close the accountant's epsilons are to the exact epsilons."""
    plan = accountant.plan
    # For the first update no norms were measured. Both methods assume that they equal the clip.
    before = [np.ones_like(norms[0]), *norms[:-1]]
    exact = np.minimum(individual_epsilon(np.stack(before), plan), plan.epsilon)
    estimated = accountant.epsilon()[measured_rows(plan.num_examples)]
    error = np.abs(estimated - exact)
    return exact, {
        "pearson": float(np.corrcoef(estimated, exact)[0, 1]),
        "mean_error": float(error.mean()),
        "worst_error": float(error.max()),
        "mean_epsilon": float(estimated.mean()),
        "least_epsilon": float(estimated.min()),
        "plan_epsilon": plan.epsilon,
    }


def by_clips(values):
    """Returns two dicts for Figure 8: accuracies and quantiles for each clip, and all epsilons."""
    data, figures, private = arrays(values.data), {}, {}
    median = float(np.median(tfdpx.gradient_norms(model_of(values, data, 0)[0], *data[0])))
    for factor in map(float, values.clips.split(",")):
        clipped = argparse.Namespace(**{**vars(values), "l2_norm_clip": factor * median})
        _, accountant, _, accuracy = train(clipped, data, 0, refreshes=2)
        private[f"clip_{factor:g}"] = epsilons = accountant.epsilon()
        quantiles = np.quantile(epsilons, (0.0, 0.1, 0.5, 0.9, 1.0))
        figures[f"clip_{factor:g}"] = {"accuracy": accuracy, "quantiles": quantiles.tolist()}
        print(f"clip {factor:g} * {median:.3g}: {to_json(figures[f'clip_{factor:g}'])}", flush=True)
    return figures, private


def study(values):
    """Returns the figures to print as JSON, and the private arrays to write to the workdir."""
    data, figures, private = arrays(values.data), {}, {}
    (x, y), (test_x, test_y) = data
    for refreshes in _REFRESHES:
        model, accountant, exact, _ = train(values, data, 0, refreshes, with_norms=True)
        private[f"exact_{refreshes}"], close = closeness(accountant, exact.norms)
        private[f"estimated_{refreshes}"] = accountant.epsilon()[measured_rows(len(y))]
        private["norms"] = np.stack(exact.norms)
        figures[f"refreshes_{refreshes}"] = close
        print(f"{refreshes} refreshes an epoch: {to_json(close)}", file=sys.stderr, flush=True)
    losses = individual.losses_and_labels(model, (x, y))[0]
    if values.attack:
        other = train(values, data, 0, private=False)[0]
        losses = individual.losses_and_labels(other, (x, y))[0]
        model = other
    held_out, _ = individual.losses_and_labels(model, (test_x, test_y))
    report = groups.group_report(accountant.epsilon(), losses, y, held_out, test_y)
    names = ("mean_epsilon", "mean_loss", "attack_success")
    figures["groups"] = {
        str(group["name"]): [round(group[name], 4) for name in names] for group in report["groups"]
    }
    figures["correlation"] = report["correlation"]
    figures["group_correlation"] = report["group_correlation"]
    for name, refreshes in (("individual_clips", 0), ("one_clip", None)):
        figures[name] = [train(values, data, 1 + s, refreshes)[3] for s in range(values.seeds)]
    return figures, private


def main(arguments=None):
    """Runs the study that the flags describe."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    add = parser.add_argument
    add("--data", default="digits", choices=("digits", "synthetic"), help="What to train on.")
    add("--seeds", type=int, default=5, help="Trainings of each kind for the accuracy.")
    add("--batch_size", type=int, default=128, help="Expected examples per update.")
    add("--steps", type=int, default=80, help="Updates.")
    add("--epsilon", type=float, default=8.0, help="Epsilon of the plan, at delta=1e-5.")
    add("--learning_rate", type=float, default=2.0, help="Learning rate of DP-SGD.")
    add("--l2_norm_clip", type=float, default=1.0, help="The largest clip.")
    add("--attack", action="store_true", help="Attack a model without privacy too.")
    add("--clips", help="Multiples of the median norm at the start, for example 0.1,0.5,1,2.")
    add("--workdir", type=pathlib.Path, help="Folder for the individual epsilons.")
    values = parser.parse_args(arguments)
    figures, private = by_clips(values) if values.clips else study(values)
    if values.workdir is not None:
        values.workdir.mkdir(parents=True, exist_ok=True)
        np.savez(values.workdir / "private.npz", **private)
    print(to_json(figures), flush=True)


if __name__ == "__main__":
    main()
