"""The JSON line is strictly valid whatever it reports, and the table shows every entry."""

import io
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.train.report.record import print_table, to_json


def strict(text):
    """Parses JSON as the standard has it: Python's own parser takes NaN and Infinity."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


VALUES = [
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (math.nan, None),
    (np.float32("inf"), "inf"),
    (np.float64("nan"), None),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (None, None),
    ("digits", "digits"),
    (300, 300),
]


def test_values():
    for value, written in VALUES:
        assert strict(to_json({"key": value})) == {"key": written}


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.none() | st.text()))
def test_always_one_line_of_strict_json_that_keeps_finite_values(record):
    text = to_json(record)
    assert "\n" not in text
    parsed = strict(text)
    assert parsed.keys() == record.keys()
    for key, value in record.items():
        if not isinstance(value, float) or math.isfinite(value):
            assert parsed[key] == value


def test_values_that_json_cannot_hold_are_refused():
    with pytest.raises(TypeError):
        to_json({"key": object()})


def test_what_is_nested_is_strict_too():
    record = {"list": [math.inf, {"deep": (np.float32("nan"), 1)}], "text": "größe"}
    assert strict(to_json(record)) == {"list": ["inf", {"deep": [None, 1]}], "text": "größe"}


def test_table_shows_every_entry():
    text = io.StringIO()
    record = {
        "test_accuracy": np.float32(0.98765),
        "epsilon": math.inf,
        "seed": None,
        "steps": 1234,
    }
    print_table(record, title="small_cnn on digits", file=text)
    for shown in ("small_cnn on digits", "test accuracy", "0.98765", "inf", "seed", "1,234"):
        assert shown in text.getvalue()


def test_names_that_look_like_markup_are_shown_as_they_are():
    text = io.StringIO()
    print_table({"workdir": "w[/a]", "dataset": "[bold]"}, title="m on [/x]", file=text)
    for shown in ("w[/a]", "[bold]", "m on [/x]"):
        assert shown in text.getvalue()
