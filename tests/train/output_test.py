"""The JSON line is strictly valid whatever it reports."""

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from tfdpx.train.output import to_json


def strict(text):
    """Parses JSON as the standard has it: Python's own parser takes NaN and Infinity."""

    def refuse(constant):
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


@given(st.dictionaries(st.text(), st.floats() | st.integers() | st.none() | st.text()))
def test_always_one_line_of_strict_json_that_keeps_finite_values(record):
    text = to_json(record)
    assert "\n" not in text
    parsed = strict(text)
    assert parsed.keys() == record.keys()
    for key, value in record.items():
        if not isinstance(value, float) or math.isfinite(value):
            assert parsed[key] == value
