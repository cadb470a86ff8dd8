"""Searches of a head's arguments: reports, privacy costs, and the presets of the paper."""

import itertools
import json
import math

import numpy as np
import pytest

from experiments.heads import methods
from experiments.heads import search as head_search
from experiments.heads.compare import mixture
from tfdpx.accounting import record as records
from tfdpx.report import measure

PRESET = "table10/vit_b16_imagenet1k/cifar10"
METHODS = {
    "table7": ("dp_adam", 100, 200, "learning_rate"),
    "table8": ("dp_ls", None, 200, "alpha"),
    "table9": ("dp_newton", 10, 300, "learning_rate"),
    "table10": ("dp_fc", 10, 200, "learning_rate"),
}


def run(capsys, *arguments):
    capsys.readouterr()
    head_search.main(["--epsilon=4", *arguments])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("search_flag", ["--trials=3", "--private_tuning=2"])
def test_a_head_is_searched_saved_and_reported(tmp_path, capsys, search_flag):
    to = ("--dataset=digits:0-2", f"--workdir={tmp_path / 'head'}")
    record = run(capsys, *to, "--method=dp_ls", search_flag)
    assert record["test_accuracy"] > 0.6 and 3.9 < record["epsilon"] <= 4.0
    saved = records.read(tmp_path / "head" / "record.json")
    assert records.plain(saved.view()).items() <= record.items()
    private = search_flag.startswith("--private")
    assert record["releasable"] is private  # No epsilon includes a search without noise.
    assert ("num_held_out" if private else "searched") in record
    # A preset fills in the flags that were not set.
    preset = run(capsys, *to, f"--preset={PRESET}", "--trials=1")
    assert (preset["method"], preset["delta"]) == ("dp_fc", 1e-5)
    dry = run(capsys, f"--preset={PRESET}", "--dry_run", "--epsilon=1")
    assert dry["noise_multiplier"] == pytest.approx(12.37, abs=5e-3)
    assert (dry["l2_norm_clip"], dry["dimension"]) == (0.005, 768)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([f"--preset={PRESET}", "--method=dp_ls"], "preset is for another method.*dp_fc.*dp_ls"),
        (["--preset=table11"], "no preset 'table11'"),
        (["--method=dp_ls"], "--workdir and --method"),
        (["--method=dp_ls", "--workdir=nowhere"], "one of --trials and --private_tuning"),
        (["--dry_run"], "--dry_run needs --preset"),
    ],
)
def test_errors_of_the_user_are_one_line(arguments, message):
    with pytest.raises(SystemExit, match=message):
        head_search.main(["--epsilon=1", *arguments])


def test_a_preset_is_a_column_of_its_table():
    for name in head_search.preset_names():
        table, backbone, data = name.split("/")
        method, steps, trials, rate = METHODS[table]
        preset = head_search.resolve_preset(name)
        assert (preset["method"], preset["steps"], preset["trials"]) == (method, steps, trials)
        assert preset["ranges"] == {rate: (1e-8, 1e8), "l2_regularization": (1e-8, 1e8)}
        large = (backbone, data) == ("vit_g14_jft", "imagenet")
        assert preset["l2_norm_clip"] == (1.0 if large else 0.005)
        assert preset["delta"] == (8e-7 if data == "imagenet" else 1e-5)
        assert preset["held_out"] == 0.05
    assert len(head_search.preset_names()) == 32
    for method, (_, arguments) in methods.METHODS.items():  # The defaults.
        ranges = head_search.ranges(method)
        assert ranges["l2_norm_clip"][0] <= 0.005 and ranges["l2_norm_clip"][1] >= 1.0
        assert all(low <= arguments.get(n, 1.0) <= high for n, (low, high) in ranges.items())


def test_a_search_keeps_to_the_ranges_and_the_fixed_arguments_of_a_preset(monkeypatch):
    build, built = methods.build, []
    monkeypatch.setattr(
        methods,
        "build",
        lambda *args, **settings: built.append(settings) or build(*args, **settings),
    )
    train, held_out = mixture(200, 8, 3, seed=0), mixture(50, 8, 3, seed=1)
    for table, (method, steps, _, rate) in METHODS.items():
        preset = head_search.resolve_preset(f"{table}/vit_b16_imagenet1k/cifar10")
        fixed = {"l2_norm_clip": preset["l2_norm_clip"], **({"steps": 3} if steps else {})}
        for ends in itertools.product(*preset["ranges"].values()):
            chosen = dict(zip(preset["ranges"], ends, strict=True))
            head = build(method, 3, 1.0, 1e-5, **fixed, **chosen).fit(*train)
            assert math.isfinite(head.evaluate(*train)["accuracy"]), chosen
        budget = dict(num_classes=3, epsilon=4.0, delta=1e-5, **fixed)
        built.clear()
        best, _ = head_search.by_optuna(method, train, held_out, budget, 12, preset["ranges"])
        _, also, *_ = head_search.privately(method, train, held_out, budget, 5.0, preset["ranges"])
        assert set(best) == set(also) == set(preset["ranges"])
        assert all(fixed.items() <= arguments.items() for arguments in built)
        rates = [arguments[rate] for arguments in built if rate in arguments]
        assert 1e-8 <= min(rates) and max(rates) <= 1e8
        assert np.ptp(np.log10(rates)) > 6  # A logarithmic search over 16 powers of ten.


def test_the_score_of_a_private_search_is_noisy():
    x, y = mixture(600, 12, 3, seed=0)
    draws = head_search.draws(b"key", x)
    train, held_out = head_search.split(x, y, draws, 0.5)
    # Leaving one example out moves no other.
    np.testing.assert_array_equal(draws[1:], head_search.draws(b"key", x[1:]))
    assert len(train[1]) + len(held_out[1]) == 600 and 200 < len(train[1]) < 400
    scores = [measure.noisy_count(100.4, 20.0) for _ in range(200)]
    assert np.std(scores) == pytest.approx(20.0, rel=0.2)
    assert np.mean(scores) == pytest.approx(100, abs=6)
