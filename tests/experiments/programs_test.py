"""Programs of `experiments`: all print their help, and at night each command of the README runs."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
# These import libraries that need separate environments, for example Opacus and JAX.
APART = ["of_jax_privacy", "of_opacus", "of_tensorflow_privacy", "compile", "of_diffprivlib"]
README = (ROOT / "experiments" / "README.md").read_text("utf-8")
COMMANDS = re.search(r"## Tiny sizes.*?```bash\n(.*?)```", README, re.DOTALL)[1]
COMMANDS = [line for line in COMMANDS.replace("\\\n", " ").splitlines() if line]


@pytest.mark.slow
def test_modules_are_imported_and_print_their_help(monkeypatch, capsys):
    programs = 0
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        if path.stem in APART:
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        monkeypatch.setattr(sys, "argv", [path.stem, "--help"])
        if hasattr(module, "main") and "argparse" in path.read_text("utf-8"):
            with pytest.raises(SystemExit) as ended:
                module.main()
            assert not ended.value.code and "usage: " in capsys.readouterr().out, path
            programs += 1
        elif hasattr(module, "define_flags"):
            values = flags.FlagValues()
            module.define_flags(values)
            assert re.search(r"--\w+:", values.get_help()), path
            programs += 1
    assert programs >= 10


@pytest.mark.nightly
def test_every_command_of_the_readme_runs_at_a_tiny_size(tmp_path):
    failed = []
    for command in COMMANDS:
        arguments = command.replace("=W", f"={tmp_path}").split()
        assert arguments[0] == "python"
        done = subprocess.run(
            [sys.executable, *arguments[1:]], cwd=ROOT, capture_output=True, text=True, timeout=900
        )
        if done.returncode:
            failed.append(f"{command}: {done.stderr.splitlines()[-1:]}")
    assert not failed
