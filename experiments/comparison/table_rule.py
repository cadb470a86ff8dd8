"""Fits the rule for model, updates and learning rate of tables, on generated ones.

    python -m experiments.tables.fit_rule --tables=6 [--task=regression]

The preprocessing is that of the program; the private updates of the two models are simulated in
NumPy, which takes milliseconds where a `fit` takes seconds. Prints, for each epsilon times rows,
what each setting loses in accuracy (or R2) against the best one, averaged over tables.
"""

import argparse
import collections
import itertools

import numpy as np

import tfdpx
from experiments.tables import generated
from tfdpx.train.tables import models
from tfdpx.train.tables.preprocessing import Preprocessing, predict
from tfdpx.train.tables.settings import TableSettings

BUDGETS = ((150, 1.0), (500, 1.0), (1_000, 3.0), (4_000, 1.0), (4_000, 8.0), (20_000, 3.0))
MODELS, STEPS = ("linear", "network"), (60, 180)
RATES = (0.005, 0.02, 0.1, 0.5, 2.0, 8.0)
DELTA = 1e-5


def main():
    """Tries the grid on so many tables at each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=int, default=6)
    parser.add_argument("--task", default="classification")
    arguments = parser.parse_args()
    lost = collections.defaultdict(list)
    for (num_rows, epsilon), key in itertools.product(BUDGETS, range(arguments.tables)):
        table = generated.table(key, num_rows, arguments.task)
        found = tried(table, epsilon)
        best = max(found.values())
        print(num_rows, epsilon, key, f"rule {found['rule',]:.3f}", f"best {best:.3f}", flush=True)
        for setting, value in found.items():
            lost[(epsilon * num_rows, *setting)].append(best - value)
    print("epsilon * rows, model, updates; percent lost at learning rates", *RATES)
    for budget in sorted({setting[0] for setting in lost}):
        print(f"{budget:8.0f} rule {100 * np.mean(lost[budget, 'rule']):5.1f}")
        for model, steps in itertools.product(MODELS, STEPS):
            losses = [f"{100 * np.mean(lost[budget, model, steps, r]):5.1f}" for r in RATES]
            print(f"{budget:8.0f} {model:8} {steps:4}", *losses, flush=True)


def tried(table, epsilon):
    """Accuracy or R2 by model, updates and learning rate; one preprocessing for all."""
    rows = len(table.train)
    prepared = Preprocessing(table.kinds, generated.ranges(table), rows, epsilon, DELTA)
    layers, spent = prepared.adapt(table.train.columns)
    x, test_x = (predict(layers, each.columns) for each in (table.train, table.test))
    goal = dict(target="target", task="classification" if table.class_names else "regression")
    goal |= {} if table.class_names else dict(target_lower=-4.0, target_upper=4.0)
    settings = TableSettings(dataset="", epsilon=epsilon, delta=DELTA, accountant="gdp", **goal)
    rule = models.choose(settings, rows, spent)
    found = {}
    for steps in STEPS:
        plan = tfdpx.PrivacyPlan(
            rows, rows, steps, epsilon=epsilon, delta=DELTA, accountant="gdp", spent=spent
        )
        tries = [(model, rate, (model, steps, rate)) for model in MODELS for rate in RATES]
        if steps == rule.plan.steps:
            tries.append((rule.model, rule.learning_rate, ("rule",)))
        for model, rate, name in tries:
            output = simulated(x, table, model, rate, plan)(test_x)
            if table.class_names:
                value = np.mean(output.argmax(axis=1) == table.test.target)
            else:
                error = np.mean((4 * output[:, 0] - table.test.target) ** 2)
                value = max(1 - error / np.var(table.test.target), -1.0)
            found[name] = float(value)
    return found


def simulated(x, table, model, rate, plan):
    """The function of features that private updates with the automatic clip would learn."""
    rng = np.random.default_rng(0)
    outputs = len(table.class_names) or 1
    y = (
        np.eye(outputs)[table.train.target]
        if table.class_names
        else table.train.target[:, None] / 4
    )
    x, y = np.pad(x, ((0, 0), (0, 1)), constant_values=1.0), y.astype("float32")
    sizes = [x.shape[1], *([models.HIDDEN] if model == "network" else []), outputs]
    limit = np.sqrt(6 / (sizes[0] + sizes[1]))
    weights = [rng.uniform(-limit, limit, (sizes[0], sizes[1]))] if len(sizes) == 3 else []
    weights.append(np.zeros((sizes[-2] + (len(sizes) == 3), outputs)))
    weights = [w.astype("float32") for w in weights]

    def forward(features):
        hidden = [features]
        if len(weights) == 2:
            hidden.append(
                np.pad(np.tanh(features @ weights[0]), ((0, 0), (0, 1)), constant_values=1)
            )
        output = hidden[-1] @ weights[-1]
        if table.class_names:
            output = np.exp(output - output.max(axis=1, keepdims=True))
            output /= output.sum(axis=1, keepdims=True)
        return hidden, output

    for _ in range(plan.steps):
        hidden, output = forward(x)
        deltas = [output - y]
        if len(weights) == 2:
            deltas.insert(0, ((deltas[0] @ weights[1].T) * (1 - hidden[1] ** 2))[:, :-1])
        squares = [(h**2).sum(1) * (d**2).sum(1) for h, d in zip(hidden, deltas, strict=True)]
        scale = (1 / (np.sqrt(sum(squares)) + 0.01))[:, None]
        for w, h, d in zip(weights, hidden, deltas, strict=True):
            noise = plan.noise_multiplier * rng.normal(size=w.shape)
            w -= (rate * (h.T @ (d * scale) + noise) / len(x)).astype("float32")
    return lambda features: forward(np.pad(features, ((0, 0), (0, 1)), constant_values=1.0))[1]


if __name__ == "__main__":
    main()
