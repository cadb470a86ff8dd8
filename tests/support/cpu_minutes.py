"""Minutes of CPU that tests take, by folder and test, and the order of files: the dearest first.

`tests/durations.csv` has the seconds of each file of the last measured run of all tests;
`DURATIONS=tests/durations.csv make test-all` writes it again.
"""

import collections
import csv
import os
import pathlib

import pytest

FILE = pathlib.Path(__file__).parents[1] / "durations.csv"
_BEGAN = pytest.StashKey[float]()


def cpu_seconds():
    """Returns the seconds of CPU of this process and of its children that ended."""
    return sum(os.times()[:4])


def last_measured():
    """Returns a dict from the files of the last measured run to their seconds of CPU."""
    if not FILE.exists():
        return {}
    with FILE.open(newline="", encoding="utf-8") as file:
        return {row["file"]: float(row["cpu_seconds"]) for row in csv.DictReader(file)}


class CpuMinutes:
    """A plugin that measures tests, and lists the dearest at the end.

    A fixture counts for the test that comes to it first. The start of each worker is not counted.
    """

    def __init__(self):
        self.seconds = collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        item.stash[_BEGAN] = cpu_seconds()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        if call.when == "teardown":
            seconds = cpu_seconds() - item.stash.get(_BEGAN, cpu_seconds())
            outcome.get_result().user_properties.append(("cpu_seconds", seconds))

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.seconds[report.nodeid] += dict(report.user_properties).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        if len(self.seconds) < 100 or "PYTEST_XDIST_WORKER" in os.environ:
            return
        folders, files = collections.Counter(), collections.Counter()
        for test, seconds in self.seconds.items():
            files[test.partition("::")[0]] += seconds
            folders["/".join(test.partition("::")[0].split("/")[:-1])] += seconds
        terminalreporter.section("minutes of CPU")
        for name, seconds in folders.most_common():
            terminalreporter.line(f"{seconds / 60:6.1f}  {name}")
        terminalreporter.line(f"{sum(folders.values()) / 60:6.1f}  in all; the dearest tests:")
        for test, seconds in self.seconds.most_common(20):
            terminalreporter.line(f"{seconds / 60:6.2f}  {test}")
        if path := os.environ.get("DURATIONS"):
            with open(path, "w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file, lineterminator="\n")
                rows.writerow(["file", "cpu_seconds"])
                rows.writerows((name, f"{seconds:.1f}") for name, seconds in files.most_common())
