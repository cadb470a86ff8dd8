"""`tfdpx PROGRAM ...`, as an installation puts it on the path."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tfdpx
from tfdpx.train import command

ACCOUNT = "--num_examples=1000 --batch_size=100 --steps=10 --noise_multiplier=2 --delta=1e-5"


def run(*arguments):
    code = "import sys; from tfdpx.train import command; sys.argv[0] = 'tfdpx'; command.main()"
    program = [sys.executable, "-c", code, *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=120)


def test_help_and_version_name_all_programs_without_tensorflow():
    made = pathlib.Path(command.__file__).parent.glob("*.py")
    programs = [path.stem for path in made if "app.run(main)" in path.read_text()]
    assert sorted(programs) == sorted(command.PROGRAMS)
    code = "import sys; from tfdpx.train import command; command.main(); print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert all(re.search(rf"^  {name} +\w.*\.$", said, re.MULTILINE) for name in programs)
    assert "tensorflow" not in said.splitlines()[-1].split()
    assert run("--version").stdout == f"tfdpx {tfdpx.__version__}\n"


@pytest.mark.slow
def test_a_program_says_what_its_module_says():
    both = [sys.executable, "-m", "tfdpx.train.account", *ACCOUNT.split()]
    module = subprocess.run(both, capture_output=True, text=True)
    mine = run("account", *ACCOUNT.split())
    assert mine.returncode == 0, mine.stderr
    assert mine.stdout == module.stdout
    assert json.loads(mine.stdout.splitlines()[-1])["epsilon"] > 0
    assert "--noise_multiplier" in run("account", "--help").stdout


@pytest.mark.parametrize("name, near", [("clasify", "Did you mean 'classify'?"), ("xyz", "")])
def test_other_names_are_refused_in_one_line(name, near):
    found = run(name)
    assert found.returncode == 1 and not found.stdout
    (line,) = found.stderr.splitlines()
    assert repr(name) in line and near in line and "adamix" in line


@pytest.mark.skipif(
    not os.path.exists(os.path.join(os.path.dirname(sys.executable), "tfdpx")),
    reason="another environment's packages",
)
def test_it_is_on_the_path():
    program = os.path.join(os.path.dirname(sys.executable), "tfdpx")
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    assert said.stdout == f"tfdpx {tfdpx.__version__}\n"
