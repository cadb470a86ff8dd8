"""Checks that `import tfdpx` makes, its exports and lazy imports, and an installed copy's files."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import tfdpx

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORE = pathlib.Path(tfdpx.__file__).parent
FOLDERS = {"tfdpx": "tfdpx", "layers": "tfdpx.layers", "models": "tfdpx.models"}
FOLDERS["train"] = "tfdpx.train"

# An editable installation would lend its `tfdpx.layers` to any `tfdpx`; a wheel does not.
FORGET_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""


def python(code, folder, **environment):
    """Runs `code` in a new interpreter, with its current folder first on the path."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def last_error(completed):
    assert completed.returncode != 0, completed.stdout
    return completed.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("forget_editable", [False, True])
def test_shadowing_checkout_is_named_with_its_fix(tmp_path, forget_editable):
    shutil.copytree(CORE, tmp_path / "tfdpx", ignore=shutil.ignore_patterns("layers", "models"))
    code = (FORGET_EDITABLE if forget_editable else "") + "import tfdpx"
    message = last_error(python(code, tmp_path))
    assert message.startswith("ImportError: tfdpx was imported from the folder")
    assert str(tmp_path / "tfdpx") in message
    assert "`tfdpx.layers`" in message
    assert "`pip install -e .`" in message


def test_version_is_that_of_the_installed_package():
    assert re.fullmatch(r"\d+\.\d+\.\d+", tfdpx.__version__)
    assert importlib.metadata.version("tfdpx") == tfdpx.__version__


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a checkout")
def test_wheel_holds_every_file_and_imports_anywhere(tmp_path):
    checkout, installed = tmp_path / "checkout", tmp_path / "installed"
    for folder in (*FOLDERS, "experiments"):
        shutil.copytree(ROOT / folder, checkout / folder)
    for file in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, checkout)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, checkout], check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in FOLDERS.items():
        for path in (checkout / folder).rglob("*.py"):
            inside = package.replace(".", "/") / path.relative_to(checkout / folder)
            assert inside.as_posix() in names
    assert "tfdpx/py.typed" in names
    not_packages = ("layers/", "models/", "train/", "tests/", "experiments/")
    assert not any(name.startswith(not_packages) for name in names)

    subprocess.run([*pip, "install", "--no-deps", "--target", installed, wheel], check=True)
    code = FORGET_EDITABLE + (
        "import tfdpx, tfdpx.layers, tfdpx.models, tfdpx.train\n"
        "print(tfdpx.models.LeNet().count_params(), tfdpx.__file__)"
    )
    completed = python(code, tmp_path, PYTHONPATH=str(installed))
    assert completed.stdout.split() == ["61706", str(installed / "tfdpx" / "__init__.py")]
    # The folder of a checkout shadows the wheel, which must be an error.
    assert "`pip install -e .`" in last_error(python(code, checkout, PYTHONPATH=str(installed)))
