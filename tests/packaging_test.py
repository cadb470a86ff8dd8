"""An installed copy has every file, and imports in any order change nothing else."""

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import keras
import pytest
from cases import slow

import tfdpx
from tfdpx import _import_hook
from tfdpx.accounting.ledger import Entry, Ledger

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORE = pathlib.Path(tfdpx.__file__).parent
FOLDERS = {"tfdpx": "tfdpx", "layers": "tfdpx.layers", "models": "tfdpx.models"}
FOLDERS["train"] = "tfdpx.train"

# An editable installation would lend its `tfdpx.layers` to any `tfdpx`; a wheel does not.
FORGET_EDITABLE = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""


def python(code, folder=None, **environment):
    """Runs `code` in a new interpreter, with its current folder first on the path."""
    without = ("KERAS_BACKEND", *["PYTHONPATH"] * (folder is not None), *environment)
    inherited = {key: value for key, value in os.environ.items() if key not in without}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def said(code, **environment):
    """Returns the standard output of `code` in a new interpreter, or the end of its error."""
    completed = python(code, **environment)
    return completed.stdout if completed.returncode == 0 else last_error(completed)


def last_error(completed):
    assert completed.returncode != 0, completed.stdout
    return completed.stderr.strip().splitlines()[-1]


def test_shadowing_checkout_is_named_with_its_fix(tmp_path):
    shutil.copytree(CORE, tmp_path / "tfdpx", ignore=shutil.ignore_patterns("layers", "models"))
    message = last_error(python("import tfdpx", tmp_path))
    assert message.startswith("ImportError: tfdpx was imported from the folder")
    assert str(tmp_path / "tfdpx") in message
    assert "`tfdpx.layers`" in message
    assert "`pip install -e .`" in message


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="needs a checkout")
@pytest.mark.parametrize("forget_editable", [False, True])
def test_the_folder_that_contains_a_checkout_imports_all_of_it(tmp_path, forget_editable):
    (tmp_path / "tfdpx").symlink_to(ROOT)
    code = (FORGET_EDITABLE if forget_editable else "") + (
        "import tfdpx, tfdpx.train\n"
        "print(tfdpx.PrivacyPlan.__name__, tfdpx.__file__, tfdpx.train.__file__)"
    )
    completed = python(code, tmp_path)
    files = [str(tmp_path / "tfdpx" / folder / "__init__.py") for folder in ("tfdpx", "train")]
    assert completed.stdout.split() == ["PrivacyPlan", *files], completed.stderr


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


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A saved model with a layer and an optimizer of tfdpx."""
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model = keras.Sequential([keras.Input((4, 4, 2)), tfdpx.layers.GroupNorm(1)])
    optimizer = tfdpx.DPSGD(0.1, batch_size=4, noise_multiplier=1.0)
    model.compile(optimizer, loss="mse")
    model.save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import tfdpx, keras; assert 'tfdpx.layers' not in sys.modules",
        # Keras is imported while a module of tfdpx is.
        slow("from tfdpx.mechanism import PrivateGradient; import keras"),
    ],
)
def test_keras_imported_after_tfdpx_loads_private_models(file, imports):
    code = f"""
import sys
{imports}
assert not any(type(finder).__module__.startswith("tfdpx") for finder in sys.meta_path)
model = keras.models.load_model({str(file)!r})
from tfdpx._keras import hook
print(type(model.layers[0]).__module__, type(model.optimizer).__module__, hook.is_installed())
"""
    assert said(code).split() == ["tfdpx.layers.blocks", "tfdpx.training.optimizers", "True"]


def test_importing_and_accounting_touch_neither_tensorflow_nor_the_process():
    code = """
import os, sys
before = dict(os.environ), sys.orig_argv[:], set(vars(sys))
import tfdpx
assert before == (dict(os.environ), sys.orig_argv, set(vars(sys)))
import tfdpx.accounting
plan = tfdpx.PrivacyPlan(
    num_examples=60, batch_size=6, steps=1, noise_multiplier=1.0, delta=1e-5, accountant="rdp"
)
assert plan.epsilon > 0
print(sorted({"keras", "tensorflow"} & set(sys.modules)))
"""
    assert said(code) == "[]\n"


def test_the_program_of_accounts_runs_without_tensorflow(tmp_path):
    Ledger((Entry(1.0, 1.0, 1),), delta=1e-5).save(tmp_path / "ledger")
    code = f"""
import runpy, sys
sys.argv = ["account", "--delta=1e-5", "--workdir={tmp_path}"]
try: runpy.run_module("tfdpx.train.account", run_name="__main__", alter_sys=True)
except SystemExit as end: assert not end.code, end.code
print({{"tensorflow", "keras", "sklearn", "matplotlib"}} & set(sys.modules))
"""
    assert said(code).endswith("set()\n")


PRETEND_JAX = "import keras; keras.backend.backend = lambda: 'jax'; "


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        # Keras alone would fail because jax is missing.
        ("import tfdpx; tfdpx.DPSGD", {"KERAS_BACKEND": "jax"}),
        slow(PRETEND_JAX + "import tfdpx; tfdpx.DPSGD", {}),
    ],
)
def test_other_backends_are_refused_by_name(code, environment):
    message = said(code, **environment)
    assert message.startswith("ImportError: tfdpx needs the TensorFlow backend")
    assert "Received: backend='jax'" in message
    assert "KERAS_BACKEND=tensorflow before importing keras" in message


@pytest.mark.parametrize("folder", ["tfdpx", "layers", "models"])
def test_registered_classes_are_found_by_their_name_in_a_file(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        if "register_keras_serializable" in path.read_text(encoding="utf-8"):
            home = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("tfdpx.")
            assert f"{home}.".startswith(tuple(f"{n}." for n in _import_hook._REGISTERED)), path


@pytest.mark.slow
def test_the_fast_rules_of_our_own_layers_are_there_after_a_plain_import():
    """A lost rule is silent: the generic rule takes over, at twice the time, with equal norms."""
    code = """
import numpy as np, keras, tfdpx
layers = [tfdpx.layers.WSConv2D(2, 3), tfdpx.layers.GroupNorm(1), tfdpx.layers.SkipInit()]
model = keras.Sequential([keras.Input((5, 5, 3)), *layers])
print(*(choice.rule for choice in tfdpx.per_example.explain(model, np.zeros((2, 5, 5, 3)))))
"""
    rules = said(code).split()
    assert len(rules) == 3 and rules[0] == "WSConv2DRule" and "GenericRule" not in rules
