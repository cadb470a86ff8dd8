"""Trains networks privately at many learning rates in JAX, and writes a row per training.

    python -m experiments.settings.grid > grid.json
    pip install jax && python -m experiments.settings.simulation --grid=grid.json --out=rows.csv

The mechanism is simulated: Poisson draws of `batch_size / num_examples`, gradients divided by their
clipped norm, Gaussian noise on the sum, division by the expected batch size, and an average of the
weights with the warm-up of tfdpx. All rates of a seed share draws and noise. On a GPU all trainings
of a setting run at once.
"""

import argparse
import csv
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from experiments.settings import images, networks
from experiments.settings.networks import dense, resnet, small

IMAGE, ROWS = (28, 28, 1), 4000
_RESNET = dict(widths=(16, 32, 64), stem_stride=2)
# A network, the shape of its input, the most examples, seeds, and examples of a microbatch.
NETWORKS = {
    "linear784": (networks.linear, IMAGE, ROWS, 2, 256),
    "cnn5k": (networks.cnn5k, (8, 8, 1), 1437, 1, 64),
    "dense7k": (dense(100), (8, 8, 1), 1437, 2, 256),
    "dense100k": (dense(128), IMAGE, ROWS, 2, 256),
    "dense5": (dense(100, 100, 100, 100), IMAGE, ROWS, 1, 256),
    "dense1m": (dense(800, 400, 100), IMAGE, ROWS, 1, 256),
    "dense10m": (dense(4000, 1500, 400), IMAGE, ROWS, 1, 256),
    "small_tanh": (small(jnp.tanh), IMAGE, ROWS, 1, 64),
    "small_relu": (small(jax.nn.relu), IMAGE, ROWS, 1, 64),
    "resnet_gap": (resnet(**_RESNET), IMAGE, ROWS, 1, 32),
    "resnet_flat": (resnet("flat", **_RESNET), IMAGE, ROWS, 1, 32),
    "resnet_flat_ws": (resnet("flat", ws=True, **_RESNET), IMAGE, ROWS, 1, 32),
    "text": (networks.transformer(64, 2, 2), (16,), ROWS, 1, 64),
    "lora": (networks.transformer(64, 2, 2, lora=True), (16,), ROWS, 1, 64),
}
_COLUMNS = "net weights data n epsilon B T sigma opt clip warm seed rate last ema09 ema signal norm"


def trainer(name, num_rates):
    """Returns a jitted function that trains a network at all rates and seeds.

    It returns an array [5, seeds, rates]: test accuracies of the last and of two averaged weights,
    the mean norm of an update without noise, and the mean norm of a gradient.
    """
    net, _, most, seeds, size = NETWORKS[name]
    runs, padded = seeds * num_rates, -(-most // size) * size

    def each(function, params, *of_seed):
        """Maps over runs; XLA multiplies single matrices faster than batches of them on CPUs."""
        seed = jnp.arange(runs) // num_rates
        if jax.default_backend() != "cpu":
            return jax.vmap(lambda p, i: function(p, *(v[i] for v in of_seed)))(params, seed)
        return jax.lax.map(lambda a: function(a[0], *(v[a[1]] for v in of_seed)), (params, seed))

    def train(start, frozen, x, y, tests, num, batch, sigma, steps, rates, is_adam, is_automatic):
        params = [jnp.repeat(v, num_rates, 0) for v in start]
        zeros = [jnp.zeros_like(v) for v in params]
        keys = jax.vmap(lambda s: jax.random.fold_in(jax.random.PRNGKey(5), s))(jnp.arange(seeds))

        def scaled(values):
            return [jnp.tile(rates, seeds).reshape(-1, *([1] * (v.ndim - 1))) * v for v in values]

        def drawn(key):
            chosen = (jax.random.uniform(key, (most,)) < batch / num) & (jnp.arange(most) < num)
            return jnp.pad(jnp.argsort(~chosen), (0, padded - most)), chosen.sum()

        def sums(p, images, labels, valid):
            return networks.clipped_sum(net, p, frozen, images, labels, valid, is_automatic)

        def update(t, state):
            params, first, second, short, long, signal, norms = state
            key = jax.vmap(lambda k: jax.random.split(jax.random.fold_in(k, t)))(keys)
            rows, counts = jax.vmap(drawn)(key[:, 0])

            def add(i, total):
                part = jax.lax.dynamic_slice_in_dim(rows, i * size, size, 1)
                valid = (i * size + jnp.arange(size))[None] < counts[:, None]
                new = each(sums, params, x[part], y[part], valid.astype("float32"))
                return jax.tree.map(jnp.add, total, new)

            start = (zeros, jnp.zeros(runs))
            total, norm = jax.lax.fori_loop(0, -(-counts.max() // size), add, start)
            squares = sum((g * g).sum(tuple(range(1, g.ndim))) for g in total)
            noisy = []
            for i, g in enumerate(total):
                of = jax.vmap(
                    lambda k, i=i, g=g: jax.random.normal(jax.random.fold_in(k, i), g.shape[1:])
                )
                noisy.append((g + sigma * jnp.repeat(of(key[:, 1]), num_rates, 0)) / batch)
            first = [0.9 * m + 0.1 * g for m, g in zip(first, noisy, strict=True)]
            second = [0.999 * v + 0.001 * g * g for v, g in zip(second, noisy, strict=True)]
            by_adam = [
                m / (1 - 0.9 ** (t + 1.0)) / (jnp.sqrt(v / (1 - 0.999 ** (t + 1.0))) + 1e-7)
                for m, v in zip(first, second, strict=True)
            ]
            moves = [jnp.where(is_adam, a, g) for a, g in zip(by_adam, noisy, strict=True)]
            params = [p - m for p, m in zip(params, scaled(moves), strict=True)]
            averages = []
            for average, momentum in ((short, 0.9), (long, 0.9999)):
                decay = jnp.minimum(momentum, (1.0 + t) / (10.0 + t))
                pairs = zip(average, params, strict=True)
                averages.append([decay * a + (1 - decay) * p for a, p in pairs])
            signal += jnp.sqrt(squares) / batch / steps
            return params, first, second, *averages, signal, norms + norm / (batch * steps)

        state = (params, zeros, zeros, params, params, jnp.zeros(runs), jnp.zeros(runs))
        params, _, _, short, long, signal, norms = jax.lax.fori_loop(0, steps, update, state)

        def accuracy(params):
            def correct(p):
                logits = jax.lax.map(
                    lambda v: net(networks.Tape(p, None, frozen), v[None])[0],
                    tests[0],
                    batch_size=100,
                )
                return (logits.argmax(-1) == tests[1]).mean()

            return each(correct, params)

        values = jnp.stack([accuracy(params), accuracy(short), accuracy(long), signal, norms])
        return values.reshape(5, seeds, num_rates)

    return jax.jit(train)


def start(name, pretrained):
    """Returns the first weights, arrays [seeds, ...], and the frozen ones."""
    net, shape, _, seeds, _ = NETWORKS[name]
    specs = networks.specs_of(net, shape)
    draws = [networks.initial(specs, seed) for seed in range(seeds)]
    if pretrained and name != "lora":
        draws = [[*pretrained, *draw[len(pretrained) :]] for draw in draws]
    weights = [np.stack(values) for values in zip(*draws, strict=True)]
    return weights, pretrained if name == "lora" else []


def pretrained(name, steps=400):
    """Trains a network on public classes, without noise; returns all but its last layer."""
    net, shape, most, _, _ = NETWORKS[name]
    if len(shape) == 1:
        x, y = (jnp.asarray(v) for v in images.tokens(14, 40_000, True))
        y = (y * 5 + 3) % 16 % 4  # Not the private classes.
    else:
        x, y, *_ = images.load("strokes2", most)
    params = [jnp.asarray(v) for v in networks.initial(networks.specs_of(net, shape), 77)]
    first, second = ([jnp.zeros_like(v) for v in params] for _ in range(2))

    def loss(params, rows):
        logs = jax.nn.log_softmax(net(networks.Tape(params), x[rows]))
        return -jnp.take_along_axis(logs, y[rows][:, None], 1).mean()

    @jax.jit
    def update(t, params, first, second, rows):
        grads = jax.grad(loss)(params, rows)
        first = [0.9 * m + 0.1 * g for m, g in zip(first, grads, strict=True)]
        second = [0.99 * v + 0.01 * g * g for v, g in zip(second, grads, strict=True)]
        params = [
            p - 2e-3 * m / (1 - 0.9 ** (t + 1.0)) / (jnp.sqrt(v / (1 - 0.99 ** (t + 1.0))) + 1e-7)
            for p, m, v in zip(params, first, second, strict=True)
        ]
        return params, first, second

    rng = np.random.default_rng(3)
    for t in range(steps):
        params, first, second = update(
            np.float32(t), params, first, second, rng.integers(0, len(x), 128)
        )
    return [np.asarray(v) for v in params][:-2]


def main():
    """Runs the settings of a grid in order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", required=True, help="File that experiments.settings.grid prints.")
    parser.add_argument("--out", default="rows.csv", help="File of the rows.")
    parser.add_argument("--only", help="Networks, joined by commas.")
    values = parser.parse_args()
    trainers, bases = {}, {}
    with open(values.grid) as file, open(values.out, "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_COLUMNS.split())
        for cell in json.load(file):
            name, began = cell["net"], time.perf_counter()
            if values.only and name not in values.only.split(","):
                continue
            x, y, num, *tests = images.load(cell["data"], NETWORKS[name][2])
            base = "text" if name == "lora" else name
            if cell["warm"] and base not in bases:
                bases[base] = pretrained(base)
            weights, frozen = start(name, bases[base] if cell["warm"] else [])
            train = trainers.setdefault(name, trainer(name, len(cell["rates"])))
            result = train(
                weights, frozen, x, y, tests, float(min(num, cell["n"])), float(cell["B"]),
                cell["sigma"], cell["T"], np.float32(cell["rates"]), cell["opt"] == "adam",
                cell["clip"] == "auto",
            )  # fmt: skip
            result = np.asarray(result)
            size = sum(v[0].size for v in weights)
            facts = [cell[k] for k in ("epsilon", "B", "T")] + [f"{cell['sigma']:.4f}"]
            about = [name, size, cell["data"], cell["n"], *facts, cell["opt"], cell["clip"]]
            for seed in range(result.shape[1]):
                for i, rate in enumerate(cell["rates"]):
                    last = [f"{v:.4g}" for v in result[:, seed, i]]
                    writer.writerow([*about, int(cell["warm"]), seed, f"{rate:.5g}", *last])
            out.flush()
            curve = " ".join(f"{100 * v:.0f}" for v in result[2].mean(0))
            print(*about, curve, f"({time.perf_counter() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
