"""What an audit found: a table like Table 8 of De et al. 2022, and the losses with and without."""

import numpy as np
from matplotlib import figure

_COLUMNS = (
    ("nominal epsilon", "epsilon", "{:g}"),
    ("lower bound", "epsilon_lower_bound", "{:.3f}"),
    ("GDP lower bound", "gdp_epsilon_lower_bound", "{:.3f}"),
    ("AUC", "auc", "{:.3f}"),
    ("true positives at 1% false", "tpr_at_1%_fpr", "{:.1%}"),
    ("advantage", "advantage", "{:.3f}"),
    ("its upper bound", "advantage_upper_bound", "{:.3f}"),
    ("target", "target", "{}"),
    ("learning rate", "learning_rate", "{:g}"),
    ("clip", "l2_norm_clip", "{:g}"),
    ("models", "models", "2 x {}"),
)


def write_table(rows, path):
    """Writes a row an epsilon, in Markdown.

    Args:
        rows: List of dicts.
        path: `pathlib.Path`.
    """
    lines = [
        "| " + " | ".join(title for title, *_ in _COLUMNS) + " |",
        "|---" * len(_COLUMNS) + "|",
    ]
    for row in rows:
        cells = ["-" if row[name] is None else form.format(row[name]) for _, name, form in _COLUMNS]
        lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n")


def draw_losses(scores, rows, path):
    """Histograms of the target's loss over models trained on D and on D', a panel an epsilon.

    Args:
        scores: List of pairs of arrays of scores, with the target and without.
        rows: List of dicts, as for `write_table`.
        path: PNG file to write.
    """
    fig = figure.Figure(figsize=(3.6 * len(rows), 3.2), layout="constrained")
    panels = np.atleast_1d(fig.subplots(1, len(rows)))
    for panel, pair, row in zip(panels, scores, rows, strict=True):
        # The loss of a class of logit s is log(1 + exp(-s)).
        losses = [np.logaddexp(0, -np.asarray(s)) for s in pair]
        bins = np.histogram_bin_edges(np.concatenate(losses), 40)
        for values, name in zip(losses, ("D', with the target", "D, without"), strict=True):
            panel.hist(values, bins, alpha=0.55, label=name)
        panel.axvline(np.logaddexp(0, -row["gdp_threshold"]), color="black", ls=":", lw=1)
        bound = f"at least {row['gdp_epsilon_lower_bound']:.2f}"
        panel.set_title(f"epsilon {row['epsilon']:g}, {bound}", fontsize="medium")
        panel.set_xlabel("loss of the target")
        panel.set_yticks([])
    panels[0].set_ylabel("models")
    panels[0].legend(fontsize="small")
    fig.savefig(path, dpi=110)
