"""Writes the model card of a run, a file with the header that model hubs read."""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import markupsafe

from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import is_unknown
from tfdpx.report import words

FILE = "model_card.md"
_METRICS = ("accuracy", "auc", "average_precision", "f1", "macro_f1", "r2", "mean_absolute_error")
_TASKS = {"image": "image", "row": "tabular", "text": "text"}


def text(record: Record) -> str:
    """Returns the model card, Markdown with a YAML header. The text depends only on the record.

    Metrics of private examples are left out, as a card is made to be published.

    Args:
        record: `tfdpx.accounting.record.Record`.
    """
    model = record.results.get("model") or record.results.get("method") or record.program
    header = [f"{key}: {_yaml(value)}" for key, value in _header(record, model).items()]
    return words.template("card.md", _escaped).render(
        header=markupsafe.Markup("\n".join(header)),
        model=model,
        record=record,
        # The statement is indented, so Markdown shows it as code, and names stay unchanged.
        statement=markupsafe.Markup(textwrap.indent(words.statement(record), "    ")),
    )


def _header(record: Record, model: str) -> dict[str, Any]:
    """Returns the metadata in the card's header, a dict of JSON values."""
    scores = {} if record.results.get("not_protected") else record.results
    metrics = [
        {"type": metric, "name": f"test {metric}", "value": scores[f"test_{metric}"]}
        for metric in _METRICS
        if scores.get(f"test_{metric}") is not None
    ]
    header: dict[str, Any] = {"library_name": "keras", "tags": ["keras", "tfdpx"]}
    if record.ledger.steps and record.is_private and not is_unknown(record.ledger):
        header["tags"].append("differential-privacy")
    kind = "regression" if "test_r2" in record.results else "classification"
    if record.unit in _TASKS:
        header["pipeline_tag"] = f"{_TASKS[record.unit]}-{kind}"
    if metrics and "pipeline_tag" in header:
        measured = {"task": {"type": header["pipeline_tag"]}, "metrics": metrics}
        measured["dataset"] = dict.fromkeys(("name", "type"), words.data_name(record))
        header["model-index"] = [{"name": model, "results": [measured]}]
    return header


def _yaml(value: Any) -> str:
    """Returns a value as JSON, which is valid YAML. Quotes in names are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _escaped(value: Any) -> str:
    """Returns a value as a line of Markdown, with markup and HTML escaped."""
    if isinstance(value, markupsafe.Markup):
        return value
    return re.sub(r"([\\`*_\[\]<>&|])", r"\\\1", " ".join(str(value).split()))
