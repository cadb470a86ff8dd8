"""The study of tables: its cases train, and generated tables depend on their key alone."""

import numpy as np
import pytest

pytest.importorskip("pyarrow", exc_type=ImportError)

from experiments.comparison import tables  # noqa: E402


@pytest.mark.parametrize("name", ["wine", "diabetes"])
def test_a_case_trains_and_has_arrays_for_peers(name):
    table, settings = tables.case(name, 0, 8.0, None, "public")
    assert tables.score(table, settings) > 0.3
    task = tables.as_arrays(table, settings)
    assert np.all(np.abs(task["x"]) <= 1) and len(task["x"]) == len(table.train)
    assert tables.without_privacy(task) > 0.3
    if task["classes"]:
        accuracies = tables.heads(task, 8.0)
        assert len(accuracies) == len(tables.HEADS) and max(accuracies) > 0.7


def test_generated_tables_are_drawn_from_their_key():
    one, same, other = (tables.make_table(key, 50) for key in (3, 3, 4))
    assert np.array_equal(one.train.target, same.train.target)
    assert one.kinds != other.kinds or not np.array_equal(one.train.target, other.train.target)
