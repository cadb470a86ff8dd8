"""Every module of `experiments` can be imported, and every program prints its help."""

import importlib
import pathlib
import re
import sys

import pytest
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
# These import libraries that need separate environments, for example Opacus and JAX.
APART = ["of_jax_privacy", "of_opacus", "of_tensorflow_privacy", "compile", "of_diffprivlib"]
APART += ["images", "networks", "simulation"]


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
