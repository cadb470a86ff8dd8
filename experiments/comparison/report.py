"""Makes tables and a picture from the results that `python -m experiments.comparison` wrote.

    python -m experiments.comparison.report RESULTS.json PICTURE.png

prints the tables and draws the picture again.
"""

import json
import pathlib
import statistics
import sys

import dp_accounting
import matplotlib.figure

from experiments.comparison import cases

_NAMES = {"tfdpx": "tfdpx", "opacus": "Opacus"}


def figures(results):
    """Returns `{part: {library: {figure: number}}}`: times, memory and ratios.

    A figure of steps is a median over turns, and a figure of epochs is the fastest turn.
    """
    parts = {}
    for part, of in (("digits", _of_digits), *((case, _of_case) for case in cases.CASES)):
        if part in results:
            parts[part] = {name: of(measured) for name, measured in results[part].items()}
    return parts


def _of_digits(runs):
    keys = ("accuracy", "epsilon", "seconds", "first_seconds")
    run = runs[0]
    event, times = dp_accounting.GaussianDpEvent(run["noise_multiplier"]), run["updates"]
    if run["sampling"] == "Poisson":
        event = dp_accounting.PoissonSampledDpEvent(run["sampling_probability"], event)
    else:  # Without Poisson sampling an example is in one batch per epoch.
        times = round(times * run["sampling_probability"])
    exact = dp_accounting.pld.PLDAccountant().compose(event, times)
    return {key: statistics.median(r[key] for r in runs) for key in keys} | {
        "least_accuracy": min(r["accuracy"] for r in runs),
        "largest_accuracy": max(r["accuracy"] for r in runs),
        "epsilon_by_pld": exact.get_epsilon(cases.DELTA),
        **{key: run[key] for key in ("accountant", "sampling", "updates")},
    }


def _of_case(measured):
    if "failure" in measured:
        return {"failure": measured["failure"]}
    figures = {"mode": measured["mode"]}
    # There are few epochs, so the fastest one is taken. Other programs can only add time.
    of_turns = {"step": statistics.median, "cpu_step": statistics.median, "epoch": min}
    memory = {
        "process_memory": lambda of: of["peak_mib"],
        "memory_beyond_imports": lambda of: of["peak_mib"] - of["imported_mib"],
    }
    for what in ("first", "step", "epoch", "cpu_first", "cpu_step", *memory):
        get = memory.get(what) or (lambda of, what=what: of_turns.get(what, float)(of[what]))
        values = [get(measured[kind]) for kind in ("private", "ordinary")]
        figures[what], figures[f"ordinary_{what}"] = values
        figures[f"{what}_ratio"] = values[0] / values[1]
    return figures


def tables(results):
    """Returns all figures in Markdown, with a table for each part."""
    parts = figures(results)
    titles = {"digits": f"digits, epsilon {cases.EPSILON:g}", **cases.CASES}
    return "\n".join(
        _table(titles[part], measured, _DIGITS if part == "digits" else _CASE)
        for part, measured in parts.items()
    )


def summary(results):
    """Returns the most important figures in Markdown, a line for each."""
    parts = figures(results)
    accuracy, ratio, memory = _SHORT
    lines = [
        _table("", parts["digits"], {}).rstrip("\n"),
        _row(f"digits at epsilon {cases.EPSILON:g}: test accuracy", parts["digits"], accuracy),
        *(
            _row(f"{name}: private / ordinary step", parts[case], ratio)
            for case, name in (
                ("wrn_16_4", "WRN-16-4"),
                ("transformer", "transformer"),
                ("transformer_lora", "LoRA of the transformer"),
                ("depthwise", "depthwise convolutions"),
            )
        ),
        _row("WRN-16-4: peak memory", parts["wrn_16_4"], memory),
    ]
    return "\n".join(lines) + "\n"


def draw(results, path):
    """Draws two panels: private step time relative to an ordinary step, and private epoch time."""
    parts = figures(results)
    shown = [case for case in cases.CASES if case in parts]
    if not shown:
        return
    names = list(parts[shown[0]])
    figure = matplotlib.figure.Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, key, title in zip(
        panels,
        ("step_ratio", "epoch"),
        ("private step / ordinary step", "seconds of a private epoch"),
        strict=True,
    ):
        width = 0.8 / len(names)
        for index, name in enumerate(names):
            bars = {
                i + (index - (len(names) - 1) / 2) * width: parts[case][name][key]
                for i, case in enumerate(shown)
                if key in parts[case].get(name, {})
            }
            drawn = panel.bar(bars.keys(), bars.values(), width, label=_NAMES.get(name, name))
            panel.bar_label(drawn, [f"{height:.3g}" for height in bars.values()], fontsize=7)
        panel.set_yscale("log")
        panel.set_xticks(range(len(shown)), [case.replace("_", "\n", 1) for case in shown])
        panel.set_title(title)
    panels[0].axhline(1, color="grey", linewidth=0.8)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


# The rows of a table: from a title to a function that formats a library's figures.
_DIGITS = {
    "test accuracy, median (least to largest)": (
        "{accuracy:.1%} ({least_accuracy:.1%} to {largest_accuracy:.1%})"
    ),
    "sampling, updates": "{sampling}, {updates}",
    "epsilon that it reports": "{epsilon:.3f} ({accountant})",
    "epsilon of its sampling, by one PLD accountant": "{epsilon_by_pld:.3f}",
    "seconds in all, and until the first update": "{seconds:.1f}, {first_seconds:.1f}",
}
_CASE = {
    "mode": "{mode}",
    "private step / ordinary": "**{step_ratio:.2f}** ({step:.3f} s / {ordinary_step:.3f} s)",
    "CPU seconds by one thread": (
        "**{cpu_step_ratio:.2f}** ({cpu_step:.3f} s / {ordinary_cpu_step:.3f} s)"
    ),
    "first step, CPU seconds by one thread": (
        "**{cpu_first_ratio:.2f}** ({cpu_first:.1f} s / {ordinary_cpu_first:.1f} s)"
    ),
    "peak memory, private / ordinary": (
        "**{process_memory_ratio:.2f}** "
        "({process_memory:.0f} MiB / {ordinary_process_memory:.0f} MiB)"
    ),
}
_SHORT = (
    "{accuracy:.1%}",
    "{cpu_step_ratio:.1f} times, {cpu_step:.2f} s",
    "{process_memory:.0f} MiB",
)


def _table(title, columns, rows):
    head = f"| {title} | {' | '.join(_NAMES.get(name, name) for name in columns)} |"
    lines = [head, "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(_row(label, columns, text) for label, text in rows.items()), ""])


def _row(label, columns, text):
    cells = (values.get("failure") or text.format(**values) for values in columns.values())
    return f"| {label} | {' | '.join(cells)} |"


def main():
    """Prints the tables and draws the picture; see the module."""
    results = json.loads(pathlib.Path(sys.argv[1]).read_text())
    draw(results, sys.argv[2])
    print(tables(results))
    print(summary(results))


if __name__ == "__main__":
    main()
