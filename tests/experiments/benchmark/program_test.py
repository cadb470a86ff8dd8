"""Tests of the benchmark's counts, reports and refusals. Speed itself is not tested."""

import contextlib
import io
import json
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from cases import slow

import tfdpx
from experiments.benchmark import __main__ as program
from experiments.benchmark import measures, steps
from tfdpx.per_example.engine import Engine

TINY = ["--model=dense_head", "--images=3", "--repeats=2"]


def run(*arguments):
    """Runs the program in this process; returns its standard output, and the last line as JSON."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        program.main(arguments)
    lines = output.getvalue().splitlines()
    return "\n".join(lines[:-1]), json.loads(lines[-1], parse_constant=pytest.fail)


@pytest.mark.slow
def test_the_report_holds_ratios_of_medians_peaks_layers_and_flags(tmp_path):
    output, record = run(*TINY, "--augmult=2", "--explain", f"--workdir={tmp_path}")
    for kind in ("ordinary", "private", "mapped"):
        assert 0 < record[f"{kind}_seconds"] < 60
        baseline, traced, peak = (
            record[f"{kind}_{name}_mib"] for name in ("baseline", "traced", "peak")
        )
        assert 50 < baseline < traced <= peak
        assert record[f"{kind}_step_mib"] == pytest.approx(peak - baseline)
    assert record["step_ratio"] == record["private_seconds"] / record["ordinary_seconds"]
    assert record["mapped_ratio"] == record["mapped_seconds"] / record["ordinary_seconds"]
    assert record["memory_ratio"] == record["private_step_mib"] / record["ordinary_step_mib"]
    assert record["failures"] == {} and record["tensorflow"] == tf.__version__
    assert json.loads((tmp_path / "benchmark.json").read_text()) == record
    assert set(vars(program.parse([]))) <= record.keys() and record["augmult"] == 2
    (layer,) = record["layers"]
    assert layer["rule"] == "DenseRule" and layer["flops"] > 0
    assert layer["alternatives"].keys() >= {"ghost/ordinary", "instantiate/contract"}
    assert "ghost/ordinary" in output and "private, tfdpx" in output


def test_a_left_out_measurement_is_null_and_no_failure():
    _, record = run(*TINY, "--nomemory", "--nomapped", "--microbatch_size=2")
    assert record["step_ratio"] > 0 and record["microbatch_size"] == 2 and record["failures"] == {}
    for name in ("memory_ratio", "mapped_ratio", "mapped_seconds", "private_peak_mib"):
        assert record[name] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ratio", "above", "below"),
    [
        (["--end_to_end", "--batch_size=4"], "end_to_end", "private", "ordinary"),
        (["--users=3"], "users", "users", "views"),
        (["--individual"], "individual", "individual", "plain"),
    ],
)
def test_other_comparisons(arguments, ratio, above, below):
    images = [] if "--end_to_end" in arguments else ["--images=8"]
    _, record = run("--model=dense_head", "--repeats=1", *images, "--num_examples=100", *arguments)
    quotient = record[f"{above}_seconds"] / record[f"{below}_seconds"]
    assert record[f"{ratio}_ratio"] == pytest.approx(quotient)
    if ratio == "end_to_end":  # Passes hold the drawn examples, and less than one pass more.
        assert 0 <= record["padding_rows"] < record["pass_size"] <= record["capacity"]
        assert 0 < record["drawn_rows"] < record["capacity"]


def test_a_step_that_fails_is_named_and_the_others_are_measured(monkeypatch):
    make_step, traced = steps.make_step, []

    def broken(kind, settings):
        traced.append(kind)
        if kind == "mapped":
            raise tf.errors.ResourceExhaustedError(None, None, "no memory left")
        return make_step(kind, settings)

    def measure(kind, settings):
        if kind == "mapped":
            raise measures.StepFailed("killed by SIGKILL: most likely out of memory")
        return measures.Peak(100.0, 110.0, 120.0 if kind == "ordinary" else 150.0)

    monkeypatch.setattr(steps, "make_step", broken)
    output, record = run(*TINY, "--nomemory")
    assert record["mapped_ratio"] is None and record["step_ratio"] > 0
    assert record["failures"] == {"mapped": "ResourceExhaustedError: no memory left"}
    assert "no memory left" in output
    # A step that was killed on its own is not handled here.
    monkeypatch.setattr(measures, "measure_peak", measure)
    traced.clear()
    _, record = run(*TINY)
    assert traced == ["ordinary", "private"] and record["memory_ratio"] == 2.5
    assert record["mapped_ratio"] is None and "SIGKILL" in record["failures"]["mapped"]
    # A failure of the private step makes the command fail.
    monkeypatch.setattr(Engine, "__call__", lambda *_: 1 / 0)
    with pytest.raises(SystemExit, match="^1$"):
        run(*TINY, "--nomemory", "--nomapped")


def test_timing_interleaves_in_random_order_after_a_warm_up():
    calls, costs = [], {"a": 1.0, "b": 2.0, "c": 4.0}
    timed = {name: lambda name=name: calls.append(name) for name in costs}
    seconds = steps.interleaved(timed, 20, clock=lambda: sum(costs[name] for name in calls))
    assert calls[:6] == ["a", "a", "b", "b", "c", "c"]
    rounds = {tuple(calls[i : i + 3]) for i in range(6, len(calls), 3)}
    assert len(rounds) > 3 and all(set(r) == set(costs) for r in rounds)
    assert seconds == {name: [cost] * 20 for name, cost in costs.items()}


@pytest.mark.parametrize(("kind", "augmult"), [("private", 3), slow("mapped", 1)])
def test_private_and_ordinary_steps_learn_from_the_same_rows(kind, augmult, monkeypatch):
    # The two updates are equal, because there is no noise and no gradient reaches the clip.
    build = tfdpx.DPSGD
    monkeypatch.setattr(
        steps.optimizers,
        "DPSGD",
        lambda _, **arguments: build(
            1e3, **arguments | {"noise_multiplier": 0.0, "l2_norm_clip": 1e3}
        ),
    )
    monkeypatch.setattr(steps, "LEARNING_RATE", 1.0)
    settings = steps.Settings(
        model="small_cnn", images=3, image_size=8, augmult=augmult, microbatch_size=2
    )
    changes = []
    with pytest.warns(UserWarning, match="no noise"):
        for way in ("ordinary", kind):
            model = steps.make_model(way, settings)
            before = np.concatenate([w.ravel() for w in model.get_weights()])
            model.train_step(steps.make_batch(way, settings))
            after = np.concatenate([w.ravel() for w in model.get_weights()])
            changes.append(after - before)
    assert np.mean(changes[0] != 0) > 0.5
    np.testing.assert_allclose(changes[1], changes[0], atol=2e-5)


@pytest.mark.slow
def test_peak_memory_is_that_of_the_step_alone(monkeypatch):
    # Some counters of the kernel inherit the peak of the parent process, which is large here.
    ballast = np.ones([1 << 27])
    settings = steps.Settings(model="small_cnn", images=2, image_size=8)
    small = measures.measure_peak("ordinary", settings)
    del ballast
    assert small.peak_mib < 1024 + small.baseline_mib / 2
    # 512 rows of 32 channels at 32 x 32 are 64 MiB, and there are several such activations.
    large = steps.Settings(model="small_cnn", images=512, image_size=32)
    grown = measures.measure_peak("ordinary", large).step_mib - small.step_mib
    assert 128 < grown < 2048
    object.__setattr__(settings, "norms", "nonsense")
    with pytest.raises(measures.StepFailed, match="KeyError|ValueError"):
        measures.measure_peak("private", settings)
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: killed)
    with pytest.raises(measures.StepFailed, match="SIGKILL.*out of memory"):
        measures.measure_peak("private", settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=resnet"], "--model=resnet.*wrn_16_4.*dense_head, transformer"),
        (["--model=wrn_17_4"], "Argument `depth`.*16 or 22"),
        (["--model=lenet", "--image_size=8"], "Argument `input_shape`"),
        (["--model=dense_head", "--image_size=32"], "--image_size=32.*Leave it out"),
        (["--images=0"], "^experiments.benchmark: Flag --images must be at least 1.*--images=0"),
        (["--microbatch_size=0"], "`microbatch_size` must be an int >= 1"),
        (["--end_to_end"], "needs --batch_size between 1 and --num_examples"),
        (["--end_to_end", "--batch_size=4", "--explain"], "--end_to_end goes without"),
        (["--individual", "--images=9", "--num_examples=8"], "--individual"),
        (["--individual", "--augmult=2"], "--individual"),
    ],
)
def test_errors_of_the_user_are_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message) as error:
        run(*arguments)
    assert "\n" not in error.value.code
