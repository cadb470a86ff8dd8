"""Checks that the programs accept every command of README, docs and experiments."""

import importlib
import pathlib
import re
import shlex

import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx.train import presets, settings, sweep
from tfdpx.train.command import PROGRAMS

ROOT = pathlib.Path(__file__).parents[1]
_PLACEHOLDER = re.compile(r"\.\.\.|=(NAME|HEAD|[A-Za-z])(?= |$|`|\))")
_OF_SWEEP = re.compile("--(grid|seeds|jobs|private_tuning)")
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").exists(), reason="needs a checkout")
_COMMAND = re.compile(r"(?:python -m tfdpx\.train\.|\btfdpx )(\w+)((?: +(?:--|\\)[^`]*)?)")


def commands():
    """Yields pairs of a program and its arguments from all code in the pages."""
    folders = ROOT / "docs", ROOT / "experiments"
    pages = [ROOT / "README.md", *(page for folder in folders for page in folder.rglob("*.md"))]
    for page in sorted(pages):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [
            line.partition("  # ")[0] for line in text.splitlines() if not _PLACEHOLDER.search(line)
        ]
        for match in filter(None, map(_COMMAND.search, lines)):
            if match[1] not in PROGRAMS or "--" not in match[2]:
                continue
            yield match[1], match[2].partition(" # ")[0]


def check(program, arguments):
    """Parses the flags of a command and resolves its settings."""
    importlib.import_module("tfdpx.train.classify")  # Defines --preset.
    module = importlib.import_module(f"tfdpx.train.{program}")
    if hasattr(module, "define_flags") and program != "sweep":
        values = flags.FlagValues()
        module.define_flags(values)
        values([program, *(a for a in arguments if "--workdir" not in a)])
        return
    of_sweep = [a for a in arguments if program == "sweep" and _OF_SWEEP.match(a)]
    with flagsaver.flagsaver():
        flags.FLAGS([program, *(a for a in arguments if a not in of_sweep)])
        set_flags, preset = settings.flag_values(), flags.FLAGS["preset"].value
        if program == "classify":
            settings.resolve(preset, set_flags)
        else:
            set_flags = {name: value for name, value in set_flags.items() if value is not None}
            grids = [a.partition("=")[2] for a in of_sweep if a.startswith("--grid")]
            grid = sweep.parse(*grids or ["seed=0"])
            shared = set_flags if "preset" in grid else {"preset": preset or "digits", **set_flags}
            assert sweep.grid_runs(grid, shared)


def test_every_command_of_the_pages_is_understood():
    pairs = list(commands())
    assert len(pairs) > 20 and {program for program, _ in pairs} >= {"classify", "account", "sweep"}
    for program, text in pairs:
        try:
            check(program, shlex.split(text))
        except Exception as error:
            raise AssertionError(f"tfdpx {program} {text}") from error


def test_every_preset_has_its_section():
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    assert all(f"\n## {group}\n" in page for group in presets.COMMON)
