"""The notebooks of docs/tutorials run from start to end, and each asserts its epsilon."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "tutorials"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
pytestmark = pytest.mark.nightly


def cells(name):
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_has_outputs_and_asserts_its_epsilon(name):
    code = "".join("".join(cell["source"]) for cell in cells(name))
    assert re.search(r"assert .*epsilon.* <= \d", code)
    outputs = json.dumps([cell["outputs"] for cell in cells(name)])
    assert "epsilon" in outputs
    assert '"error"' not in outputs and '"stderr"' not in outputs


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_runs_from_start_to_end(name, tmp_path):
    code = "\n\n".join("".join(cell["source"]) for cell in cells(name))
    (tmp_path / "tutorial.py").write_text(f"import matplotlib\n\nmatplotlib.use('Agg')\n{code}\n")
    command = [sys.executable, "tutorial.py"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
