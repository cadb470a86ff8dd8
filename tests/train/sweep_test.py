"""The binary: a short sweep of the digits, its table again, and bad input."""

import json

import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx.accounting import record as records
from tfdpx.train import sweep


@pytest.fixture(scope="module", autouse=True)
def parsed_flags():
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["sweep"])


def run(*arguments, **given):
    values = flags.FlagValues()
    sweep.define_flags(values)
    values(["sweep", *arguments])
    with flagsaver.flagsaver(**given):
        sweep.main(["sweep"], values)


@pytest.mark.slow
def test_a_sweep_of_the_digits_and_its_table_again(tmp_path, capsys):
    given = dict(model="small_cnn", steps=2, batch_size=64, epsilon=2.0, accountant="rdp")
    given |= dict(workdir=str(tmp_path / "sweep"), data_dir=str(tmp_path))
    run("--seeds=0", "--grid=l2_norm_clip=0.1", "--jobs=2", **given)
    record = json.loads(capsys.readouterr().out.splitlines()[-1], parse_constant=pytest.fail)
    assert (record["runs"], record["points"], record["failures"]) == (1, 1, {})
    assert record["measured_on"] == "validation" and record["best"] == {"l2_norm_clip": 0.1}
    assert 0 < record["best_median_accuracy"] <= 1
    report = records.read(tmp_path / "sweep/runs/l2_norm_clip=0.1,seed=0/record.json").view()
    assert report["validation_accuracy"] == record["best_median_accuracy"]
    assert 1.9 < report["epsilon"] <= 2.0
    (tmp_path / "sweep/table.csv").unlink()
    run("--table_only", workdir=str(tmp_path / "sweep"))
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (tmp_path / "sweep/table.csv").exists()
    assert again["best_median_accuracy"] == record["best_median_accuracy"]


ERRORS = [
    ([], {}, "--grid says what to sweep"),
    (["--grid=steps=5"], dict(workdir=None), "--workdir names the folder"),
    (["--grid=steps=5"], dict(seed=3), "Use --seeds=3"),
    (["--grid=steps=5", "--seeds=a"], {}, "--seeds=a"),
    (["--grid=steps=5"], dict(steps=7), "--steps=7"),
    (["--grid=color=5"], {}, "--grid=color=5"),
    (["--grid=preset=digits", "--preset=digits"], {}, "Leave one of them out"),
    (["--grid=preset=none"], {}, "no preset 'none'"),
    (["--table_only"], {}, "--table_only needs a sweep"),
]


def test_errors_of_the_user_are_one_line(tmp_path):
    for arguments, given, message in ERRORS:
        with pytest.raises(SystemExit, match=message) as error:
            run(*arguments, **{"workdir": str(tmp_path / "sweep"), **given})
        assert "\n" not in error.value.code
        assert not (tmp_path / "sweep").exists()


def test_a_folder_without_a_finished_run(tmp_path):
    with pytest.raises(SystemExit, match="No run in --workdir"):
        run("--table_only", workdir=str(tmp_path))
