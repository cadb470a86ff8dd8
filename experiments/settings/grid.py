"""Prints the settings of the study as JSON, with the noise of their plans.

python -m experiments.settings.grid > grid.json
"""

import functools
import json

import tfdpx

# Epsilon, batch size and updates.
BASE, TIGHT, SHORT, LONG, SMALL = (
    (3, 500, 50),
    (1, 500, 50),
    (3, 500, 15),
    (3, 500, 200),
    (3, 250, 50),
)
# Powers of two times today's rule, which moves a weight by 0.18.
FACTORS = [2.0**k for k in range(-6, 2)]
CELLS = [
    *[("dense7k", "digits8", BASE), ("cnn5k", "digits8", BASE), ("cnn5k", "digits8", TIGHT)],
    *[(net, "strokes", BASE) for net in ("linear784", "dense100k", "dense5", "small_tanh")],
    *[("dense100k", "strokes", plan) for plan in (TIGHT, SHORT, LONG)],
    *[(net, "strokes", SMALL) for net in ("resnet_flat", "resnet_gap", "resnet_flat_ws")],
    *[
        (net, data, BASE)
        for net in ("dense100k", "dense5", "small_tanh")
        for data in ("shapes", "shapes_c")
    ],
    *[("dense100k", "strokes_c", BASE), ("dense5", "strokes_c", BASE)],
    *[("dense100k", "digits", BASE), ("dense5", "digits", BASE), ("dense1m", "strokes", BASE)],
    *[("dense1m", "strokes", SHORT), ("dense10m", "strokes", SHORT)],
    *[("text", "tokens", SMALL, True), ("lora", "tokens", SMALL, True)],
]


@functools.cache
def noise_multiplier(epsilon, num_examples, batch_size, steps):
    """Returns the noise of a plan."""
    return tfdpx.PrivacyPlan(
        num_examples, batch_size=batch_size, steps=steps, epsilon=epsilon, delta=1e-5
    ).noise_multiplier


def main():
    """Prints a list of dicts."""
    cells = []
    for net, data, (epsilon, batch, steps), *warm in CELLS:
        num = 1437 if data.startswith("digits") else 4000
        sigma = noise_multiplier(epsilon, num, batch, steps)
        for optimizer, unit in (("sgd", batch / sigma), ("adam", 1)):
            rates = [factor * 0.18 * unit / steps**0.5 for factor in FACTORS]
            cells.append(
                dict(
                    net=net, data=data, n=num, epsilon=epsilon, B=batch, T=steps, sigma=sigma,
                    opt=optimizer, clip="0.1", warm=bool(warm), rates=rates,
                )
            )  # fmt: skip
    print(json.dumps(cells))


if __name__ == "__main__":
    main()
