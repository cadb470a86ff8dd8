"""A picture of the trade-off: epsilon against steps, and noise against batch size."""

import dataclasses

import numpy as np
from matplotlib import figure

from tfdpx.train.accounts import question
from tfdpx.train.errors import UserError

_POINTS = 9


def draw(answer, path):
    """Draws both for the neighbourhood of an answer, which is marked.

    Args:
        answer: `Answer`.
        path: PNG file to write.
    """
    fig = figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = fig.subplots(1, 2)
    steps = np.unique(
        np.geomspace(max(1, answer.steps / 10), 4 * answer.steps, _POINTS).astype(int)
    )
    left.plot(steps, epsilons(answer, steps), marker=".", label=answer.accountant)
    asked = dict(marker="o", color="black", linestyle="", label=f"answer, by {answer.accountant}")
    left.plot(answer.steps, answer.epsilon, **asked)
    left.set_xlabel("model updates")
    left.set_ylabel(r"$\varepsilon$")
    left.set_title(f"noise multiplier {answer.noise_multiplier:.4g}")

    rates = np.geomspace(
        answer.sampling_probability / 10, min(1.0, 4 * answer.sampling_probability), _POINTS
    )
    scale = 1 if answer.num_examples is None else answer.num_examples
    right.plot(scale * rates, noises(answer, rates), marker=".", label="rdp")
    right.plot(scale * answer.sampling_probability, answer.noise_multiplier, **asked)
    right.set_xlabel("sampling probability" if scale == 1 else "expected batch size")
    right.set_ylabel("noise multiplier")
    right.set_title(rf"$\varepsilon$ = {answer.epsilon:.4g} after {answer.steps} updates")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
    fig.suptitle(rf"$\delta$ = {answer.delta:g}, {answer.sampling.name} sampling")
    fig.savefig(path, dpi=120)


def epsilons(answer, steps):
    """List of floats: epsilon after each number of updates, all else being as it is."""
    found = [dataclasses.replace(answer, steps=int(step)) for step in steps]
    return [each.epsilon_by(answer.accountant) for each in found]


def noises(answer, rates):
    """List of floats: the noise that keeps `epsilon` at each rate; NaN where none does.

    By RDP, which is the quicker: a search an entry.
    """
    return [_noise(answer, float(rate)) for rate in rates]


def _noise(answer, rate):
    given = {name: getattr(answer, name) for name in ("steps", "delta", "epsilon")}
    given["sampling_probability"] = rate
    try:
        return question.answer(given, answer.sampling, "rdp").noise_multiplier
    except UserError:  # Less noise than accountants resolve.
        return float("nan")
