"""The cases of `slow_cases.txt` are cases that exist."""

import pathlib

HERE = pathlib.Path(__file__).parent


def test_each_names_a_test():
    for case in (HERE / "slow_cases.txt").read_text(encoding="utf-8").splitlines():
        path, name = case.split("::")
        source = (HERE.parent / path).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in source, case
