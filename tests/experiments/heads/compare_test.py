"""The comparison of heads on small data: its table, its picture, and how it resumes."""

import math

import pytest

from experiments.heads import compare


def test_methods_are_compared_and_the_comparison_resumes(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--methods=dp_ls,dp_fc", "--dataset=digits:0-2", f"--workdir={out}"]
    compare.main(["--epsilons=4", *arguments])
    capsys.readouterr()
    compare.main(["--epsilons=4,inf", *arguments])
    assert capsys.readouterr().out.count("epsilon") == 2
    table = (out / "table.md").read_text().splitlines()
    assert table[0] == "| epsilon | dp_ls | dp_fc |" and len(table) == 4
    assert math.isinf(float(table[-1].split("|")[1]))
    assert (out / "heads.png").stat().st_size > 5000
    with pytest.raises(SystemExit, match="no method 'dp_x'"):
        compare.main([*arguments, "--methods=dp_x"])
