"""Pictures of individual epsilons, as Figures 1, 2, 5, 6 and 7 of Yu et al. 2022.

All of them show private data.
"""

import numpy as np
from matplotlib import figure

from tfdpx.train.report.pictures import readable

_STRATA, _TENTHS = 5, 10


def histogram(epsilons, worst, path):
    """Figure 1: how many examples have which epsilon.

    Args:
        epsilons: Float array [n].
        worst: Float, the plan's epsilon.
        path: PNG file to write.
    """
    fig, axes = _axes()
    axes.hist(epsilons, bins=np.linspace(0, worst, 41))
    axes.axvline(np.mean(epsilons), color="black", linestyle="--", label="mean")
    axes.axvline(worst, color="black", label="of the plan")
    axes.set_xlabel(r"individual $\varepsilon$")
    axes.set_ylabel("examples")
    axes.legend()
    _save(fig, axes, path)


def strata(steps, norms, path):
    """Figure 2: the norms of five groups of examples, by the mean of each over the training.

    Args:
        steps: Int array [t].
        norms: Float array [t, n], fractions of the clip.
        path: PNG file to write.
    """
    order = np.argsort(norms.mean(axis=0), kind="stable")
    fig, axes = _axes()
    for number, part in enumerate(np.array_split(order, _STRATA)):
        label = f"{20 * number} to {20 * (number + 1)}%"
        axes.plot(steps, norms[:, part].mean(axis=1), marker="o", markersize=3, label=label)
    axes.set_xlabel("model updates")
    axes.set_ylabel("mean gradient norm over the clip")
    axes.set_ylim(0, 1.03)
    axes.legend(title="examples, by mean norm")
    _save(fig, axes, path)


def loss_against_epsilon(epsilons, losses, path):
    """Figure 5: mean epsilon of tenths of the examples, by loss.

    Args:
        epsilons: Float array [n].
        losses: Dict from a name, such as "at the end", to a float array [n].
        path: PNG file to write.
    """
    fig, axes = _axes()
    for name, each in losses.items():
        parts = np.array_split(np.argsort(each, kind="stable"), _TENTHS)
        axes.plot(
            [each[part].mean() for part in parts],
            [epsilons[part].mean() for part in parts],
            marker="o",
            label=f"loss {name}; r = {np.corrcoef(epsilons, each)[0, 1]:.2f}",
        )
    axes.set_xscale("log")
    axes.set_xlabel("mean loss of a tenth of the examples")
    axes.set_ylabel(r"mean individual $\varepsilon$")
    axes.legend()
    _save(fig, axes, path)


def groups(report, path):
    """Figure 6: mean epsilon and mean loss (over the training) of each group, by loss.

    Args:
        report: `tfdpx.accounting.GroupReport`.
        path: PNG file to write.
    """
    found = report.groups
    _bars_and_line(
        [str(group.name) for group in found],
        [group.mean_epsilon for group in found],
        [group.mean_loss for group in found],
        f"mean loss (correlation {report.group_correlation:.2f})",
        path,
    )


def attacks(report, path):
    """Figure 7: mean epsilon and success of the membership attack of each group, by epsilon.

    Args:
        report: `tfdpx.accounting.GroupReport`, with attacks.
        path: PNG file to write.
    """
    found = [group for group in report.groups if group.attack_success is not None]
    found.sort(key=lambda group: group.mean_epsilon)
    _bars_and_line(
        [str(group.name) for group in found],
        [group.mean_epsilon for group in found],
        [100 * group.attack_success for group in found],
        "membership attack, % right",
        path,
    )


def _bars_and_line(names, bars, line, label, path):
    fig, axes = _axes()
    places = np.arange(len(names))
    axes.bar(places, bars, color="tab:blue", alpha=0.6)
    axes.set_ylim(0.9 * min(bars), 1.05 * max(bars))
    axes.set_ylabel(r"mean individual $\varepsilon$ (bars)")
    rotation = 45 if max(map(len, names)) > 3 else 0
    shown, fonts = readable(names)
    axes.set_xticks(places, shown, rotation=rotation, fontfamily=fonts)
    second = axes.twinx()
    second.plot(places, line, color="tab:red", marker="o")
    second.set_ylabel(label, color="tab:red")
    _save(fig, axes, path)


def _axes():
    fig = figure.Figure(figsize=(6, 4), layout="constrained")
    return fig, fig.add_subplot()


def _save(fig, axes, path):
    axes.grid(alpha=0.3)
    axes.set_title("private data: not to be published", fontsize=8, color="grey")
    fig.savefig(path, dpi=120)
