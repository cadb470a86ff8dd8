"""The tables that the benchmark prints."""

import sys

from rich import box, console, markup, table

from experiments.benchmark import comparison, steps

_MIB = 2**20


def results(medians, peaks, failures, title):
    """Prints time and memory of each step, each with its ratio to the ordinary one.

    Args:
        medians: `{kind: seconds}`, kinds as in `steps.KINDS`.
        peaks: `{kind: memory.Peak}`.
        failures: `{kind: text}`, why a step could not be measured.
        title: Heading.
    """
    rows = _table(title, "step")
    for heading in ("median s", "/ ordinary", "peak MiB", "of the step", "/ ordinary"):
        rows.add_column(heading, justify="right")
    needs = {kind: peak.step_mib for kind, peak in peaks.items()}
    for kind, name in steps.KINDS.items():
        if not any(kind in found for found in (medians, peaks, failures)):
            continue
        cells = (
            _number(medians.get(kind), ".4g"),
            _number(comparison.ratio(medians, kind), ".2f"),
            _number(peaks[kind].peak_mib if kind in peaks else None, ",.0f"),
            _number(needs.get(kind), ",.0f"),
            _number(comparison.ratio(needs, kind), ".2f"),
        )
        rows.add_row(name, *cells)
        if kind in failures:
            rows.add_row(f"[red]  failed: {markup.escape(failures[kind])}[/red]")
    _print(rows)


def layers(choices):
    """Prints how each layer's norm and clipped sum are formed, and what each way would take.

    Args:
        choices: List of `tfdpx.per_example.cost_model.LayerChoice`.
    """
    ways = list(dict.fromkeys(way for choice in choices for way in choice.alternatives))
    rows = _table("norm / clipped sum of each layer, chosen and predicted", "layer")
    rows.add_column("rule", overflow="fold")
    rows.add_column("chosen", no_wrap=True)
    predicted = ["ms if\n" + way.replace("/", "/\n") for way in ways]
    for heading in ("GFLOP", "MiB\nmoved", *predicted):
        rows.add_column(heading, justify="right")
    for choice in choices:
        rows.add_row(
            choice.layer,
            choice.rule.removesuffix("Rule"),
            f"{choice.norm}/{choice.sum}",
            f"{choice.flops / 1e9:.3g}",
            f"{choice.bytes / _MIB:.3g}",
            *(_number(_milliseconds(choice.alternatives.get(way)), ".3g") for way in ways),
        )
    flops = sum(choice.flops for choice in choices) / 1e9
    moved = sum(choice.bytes for choice in choices) / _MIB
    rows.add_section()
    rows.add_row("all", "", "", f"{flops:.3g}", f"{moved:.3g}")
    _print(rows)


def phases(seconds, ordinary):
    """Prints where the time of a private step goes.

    Args:
        seconds: `{phase: seconds}`.
        ordinary: Seconds of an ordinary step.
    """
    whole = sum(seconds.values())
    rows = _table("where the private step's time goes", "phase")
    for heading in ("seconds", "% of the step", "/ ordinary step"):
        rows.add_column(heading, justify="right")
    for phase, value in seconds.items():
        rows.add_row(phase, f"{value:.4f}", f"{100 * value / whole:.1f}", f"{value / ordinary:.3f}")
    rows.add_section()
    rows.add_row("whole private step", f"{whole:.4f}", "100.0", f"{whole / ordinary:.3f}")
    rows.add_row("ordinary step", f"{ordinary:.4f}", "", "1.000")
    _print(rows)


def figures(record, title):
    """Prints a dict of numbers by name."""
    rows = _table(title, "figure")
    rows.add_column("value", justify="right")
    for name, value in record.items():
        rows.add_row(name, f"{value:,.4g}")
    _print(rows)


def _table(title, first):
    rows = table.Table(title=title, box=box.SIMPLE_HEAD)
    rows.add_column(first, overflow="fold")
    return rows


def _milliseconds(seconds):
    return None if seconds is None else 1e3 * seconds


def _number(value, form):
    return "-" if value is None else format(value, form)


def _print(rows):
    # Into a file or a pipe rich would print 80 columns, which layers do not fit.
    width = None if sys.stdout.isatty() else 128
    console.Console(width=width).print(rows)
