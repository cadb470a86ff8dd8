"""What `benchmark --individual` says."""

import contextlib
import io
import json

import pytest
from absl import flags

from experiments.benchmark import program


def run(*arguments):
    values, output = flags.FlagValues(), io.StringIO()
    program.define_flags(values)
    values(["benchmark", "--individual", "--model=dense_head", *arguments])
    with contextlib.redirect_stdout(output):
        program.main(["benchmark"], values)
    return json.loads(output.getvalue().splitlines()[-1])


def test_it_times_a_step_with_and_without():
    record = run("--images=8", "--num_examples=1000", "--repeats=2")
    ratio = record["individual_seconds"] / record["plain_seconds"]
    assert record["individual_ratio"] == pytest.approx(ratio)
    assert record["individual_mib"] == pytest.approx(4 * 1001 * 104 / 2**20)


@pytest.mark.parametrize("arguments", [["--images=9", "--num_examples=8"], ["--augmult=2"]])
def test_unfit_flags_are_refused(arguments):
    with pytest.raises(SystemExit, match="--individual"):
        run(*arguments)
