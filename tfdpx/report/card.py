"""Writes the model card of a run, a file with the header that model hubs read."""

from __future__ import annotations

import json
import math
import re
import textwrap
from typing import Any

from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import why_unknown
from tfdpx.report import words

FILE = "model_card.md"
_METRICS = ("accuracy", "auc", "average_precision", "f1", "macro_f1", "r2", "mean_absolute_error")
_TASKS = {"image": "image", "row": "tabular", "text": "text"}


def text(record: Record) -> str:
    """Returns the card, Markdown with a YAML header. It is a function of the record.

    Metrics of private examples are left out, because a card is made to be published.

    Args:
        record: `tfdpx.accounting.record.Record`.
    """
    name, unit = words.data_name(record), record.unit
    model = record.results.get("model") or record.results.get("method") or record.program
    protected, caution = words.protected(record)
    if record.results.get("not_protected"):
        measured = f"Measured on private {unit}s, without noise: the results are not on this card."
    else:
        measured = words.measured(record)
    parts = [
        f"# {_escaped(model)} on {_escaped(name)}",
        *(f"**{_escaped(warning)}**" for warning in words.reasons_against_release(record)),
        f"A Keras model that tfdpx trained on the {unit}s of {_escaped(name)}.",
        "## Intended use",
        f"For {unit}s of the kind that it was trained on. Measure it on {unit}s of your own before "
        "decisions rest on it: privacy says nothing about accuracy or fairness.",
        "## Privacy",
        *map(_escaped, (protected, caution, words.attack(record))),
        "What undoes this, or is not protected:",
        "\n".join(f"- {_escaped(limit)}" for limit in words.limits(record)),
        "## Results",
        _escaped(measured),
        "## How to check this",
        _escaped(words.check(record)),
        "## Statement",
        textwrap.indent(record.statement(), "    "),  # As code, which shows any name unchanged.
    ]
    header = [f"{key}: {_yaml(value)}" for key, value in _header(record, model, name).items()]
    return "\n".join(["---", *header, "---", "", "\n\n".join(parts)])


def _header(record: Record, model: str, name: str) -> dict[str, Any]:
    """Returns the metadata, a dict of JSON values."""
    scores = {} if record.results.get("not_protected") else record.results
    metrics = [
        {"type": metric, "name": f"test {metric}", "value": scores[f"test_{metric}"]}
        for metric in _METRICS
        if scores.get(f"test_{metric}") is not None
    ]
    header: dict[str, Any] = {"library_name": "keras", "tags": ["keras", "tfdpx"]}
    if record.ledger.steps and record.epsilon < math.inf and not why_unknown(record.ledger):
        header["tags"].append("differential-privacy")
    kind = "regression" if "test_r2" in record.results else "classification"
    if record.unit in _TASKS:
        header["pipeline_tag"] = f"{_TASKS[record.unit]}-{kind}"
    if metrics and "pipeline_tag" in header:
        measured = {"task": {"type": header["pipeline_tag"]}, "metrics": metrics}
        measured["dataset"] = {"name": name, "type": name}
        header["model-index"] = [{"name": model, "results": [measured]}]
    return header


def _yaml(value: Any) -> str:
    """Returns a value as JSON. That is valid YAML, and no name can end its strings."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _escaped(text: str) -> str:
    """Returns text as a line of Markdown, with markup and HTML escaped."""
    return re.sub(r"([\\`*_\[\]<>&|])", r"\\\1", " ".join(str(text).split()))
