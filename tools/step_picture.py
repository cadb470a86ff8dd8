"""Draws docs/step.png, the four parts of a private update in two dimensions.

.venv/bin/python tools/step_picture.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "step.png"
BLUE, RED, GREY = "#2563a8", "#c0392b", "#9aa4ae"
CLIP, SIGMA = 1.0, 1.1


def arrows(axes, vectors, colors, **arguments):
    """Arrows from the origin."""
    zeros = np.zeros(len(vectors))
    options = dict(angles="xy", scale_units="xy", scale=1, width=0.01, zorder=3) | arguments
    axes.quiver(zeros, zeros, *np.transpose(vectors), color=colors, **options)


def main():
    """Writes the picture."""
    plt.rcParams.update({"font.size": 12})
    rng = np.random.default_rng(1)
    figure, ((draw, raw), (clipped, noisy)) = plt.subplots(2, 2, figsize=(7.4, 7.8))
    places = np.stack(np.meshgrid(range(10), range(10)), -1).reshape(-1, 2)
    drawn = rng.random(100) < 0.08
    draw.scatter(*places[~drawn].T, s=60, facecolors="none", edgecolors=GREY)
    colors = np.full(drawn.sum(), BLUE)
    colors[0] = RED
    draw.scatter(*places[drawn].T, s=80, c=colors)
    draw.set(title="1. Draw each example by chance", xlim=(-1, 10), ylim=(-1, 10))

    gradients = rng.normal(size=(drawn.sum(), 2)) * 0.7 + [0.7, 0.3]
    gradients[0] = [-1.9, 2.1]  # One that is unlike all others.
    factors = np.minimum(1, CLIP / np.linalg.norm(gradients, axis=1))[:, np.newaxis]
    for axes, vectors in ((raw, gradients), (clipped, gradients * factors)):
        arrows(axes, vectors, colors)
        axes.add_patch(plt.Circle((0, 0), CLIP, fill=False, linestyle="--", color="black"))
        axes.text(0.75, -0.85, "C")
        axes.set(xlim=(-2.3, 2.5), ylim=(-2.2, 2.6))
    raw.set_title("2. A gradient for each, alone")
    clipped.set_title("3. Clip each to the length C")

    total, without = ((gradients * factors)[part:].sum(0) for part in (0, 1))
    for centre, color in ((total, RED), (without, BLUE)):
        cloud = centre + rng.normal(size=(300, 2)) * SIGMA
        noisy.scatter(*cloud.T, s=7, color=color, alpha=0.35, linewidths=0)
        arrows(noisy, [centre], [color])
    noisy.plot([], [], color=RED, label="with the red example")
    noisy.plot([], [], color=BLUE, label="without it")
    noisy.legend(loc="upper left", frameon=False)
    noisy.set(title="4. Add noise to the sum", xlim=total[0] + np.array([-6, 4]))
    noisy.set(ylim=total[1] + np.array([-5, 5]))
    for axes in figure.axes:
        axes.set(aspect="equal", xticks=[], yticks=[])
        for side in axes.spines.values():
            side.set_color(GREY)
    figure.tight_layout()
    figure.savefig(PAGE, dpi=100)


if __name__ == "__main__":
    main()
