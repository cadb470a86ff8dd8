"""Settings that all tests share: workers, quiet logs, fixed seeds, reproducible hypothesis runs."""

import contextlib
import ctypes
import gc
import os

import cpu_minutes
import hypothesis
import pytest
import seeds

# TensorFlow reads both when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

hypothesis.settings.register_profile(
    "tfdpx",
    deadline=None,  # The first example of a test traces and compiles.
    max_examples=25,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tfdpx")


def pytest_xdist_auto_num_workers(config):
    """Uses no workers for single files: TensorFlow's import takes longer than they do."""
    names = config.option.file_or_dir
    return 0 if names and all(".py" in name for name in names) else None


def pytest_sessionstart(session):
    """Imports TensorFlow, except in the process that only hands tests to workers."""
    if "PYTEST_XDIST_WORKER" in os.environ or not session.config.option.numprocesses:
        _import_tensorflow()


def _import_tensorflow():
    # Some notices of TensorFlow's start have no log level, and pytest would print them last.
    with _without_stderr():
        import tensorflow as tf

    gc.freeze()  # Imported modules stay, so no collection has to visit them.
    gc.set_threshold(50_000, 20, 50)  # A trace allocates much and leaves little garbage.
    tf.get_logger().setLevel("ERROR")
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The workers share the cores, so a thread pool in each would only make them compete.
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def pytest_configure(config):
    config.pluginmanager.register(cpu_minutes.CpuMinutes())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks planted bugs as nightly, and puts the dearest files first.

    So the workers end together. A file that was never measured comes first of all.
    """
    seconds = cpu_minutes.last_measured()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], float("inf")))
    for item in items:
        if item.get_closest_marker("planted"):
            item.add_marker(pytest.mark.nightly)


def pytest_terminal_summary(terminalreporter):
    """Lists the tests that found each planted bug."""
    bugs = {
        report.nodeid: dict(report.user_properties).get("planted")
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        if report.when == "call"
    }
    passed = {report.nodeid for report in terminalreporter.getreports("passed")}
    bugs = {test: bug for test, bug in bugs.items() if bug}
    if bugs:
        terminalreporter.section("planted bugs")
    for test, bug in sorted(bugs.items(), key=lambda row: row[1]):
        terminalreporter.line(f"{'found ' if test in passed else 'MISSED'} {bug}: {test}")


@pytest.fixture(autouse=True)
def _planted_bug(request, record_property):
    marker = request.node.get_closest_marker("planted")
    if marker:
        case = getattr(request.node, "callspec", None)
        record_property("planted", f"{marker.args[0]}{f' [{case.id}]' if case else ''}")


@contextlib.contextmanager
def _without_stderr():
    """Discards all output to file descriptor 2: C++ writes there too."""
    stderr, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(sink)


@pytest.fixture(autouse=True)
def _fixed_seeds():
    seeds.fix(20_220_428)


@pytest.fixture(autouse=True, scope="module")
def _models_are_freed():
    """Frees models after each test: uncollected graphs would fill the workers' memory."""
    yield
    gc.collect()
    getattr(ctypes.CDLL(None), "malloc_trim", id)(0)


@pytest.fixture(scope="session")
def finished_runs(tmp_path_factory):
    """A function from the name of a kind to its finished run, for tests of programs."""
    from finished_runs import FinishedRuns

    return FinishedRuns.of_session(tmp_path_factory)


@pytest.fixture(scope="session")
def run(finished_runs):
    """A function from a program and its flags to the record in its last line, and the output."""
    return finished_runs.run


@pytest.fixture(scope="session")
def refusal(run):
    """A function from a program and its flags to its one-line error message."""

    def refuse(program, **arguments):
        with pytest.raises(SystemExit) as error:
            run(program, **arguments)
        text = error.value.code
        assert text.startswith(f"{program.__name__}: ") and "\n" not in text
        return text

    return refuse
