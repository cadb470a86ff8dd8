"""Imports tfdpx and Keras in either order: the hook is in place, and nothing else is changed."""

import os
import pathlib
import subprocess
import sys

import keras
import pytest
from cases import slow

import tfdpx
from tfdpx import _import_hook
from tfdpx.accounting.ledger import Entry, Ledger


def python(code, **environment):
    """Runs `code` in a new interpreter; returns its standard output, or the end of its error."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("KERAS_BACKEND", *environment)}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return process.stdout if process.returncode == 0 else process.stderr.strip().splitlines()[-1]


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
    assert python(code).split() == ["tfdpx.layers.blocks", "tfdpx.training.optimizers", "True"]


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
    assert python(code) == "[]\n"


def test_the_program_of_accounts_runs_without_tensorflow(tmp_path):
    Ledger((Entry(1.0, 1.0, 1),), delta=1e-5).save(tmp_path / "ledger")
    code = f"""
import runpy, sys
sys.argv = ["account", "--delta=1e-5", "--workdir={tmp_path}"]
try: runpy.run_module("tfdpx.train.account", run_name="__main__", alter_sys=True)
except SystemExit as end: assert not end.code, end.code
print({{"tensorflow", "keras", "sklearn", "matplotlib"}} & set(sys.modules))
"""
    assert python(code).endswith("set()\n")


PRETEND_JAX = "import keras; keras.backend.backend = lambda: 'jax'; "


@pytest.mark.parametrize(
    ("code", "environment"),
    [
        # Keras alone would fail because jax is missing.
        ("import tfdpx; tfdpx.DPSGD", {"KERAS_BACKEND": "jax"}),
        slow("import tfdpx.layers", {"KERAS_BACKEND": "jax"}),
        slow(PRETEND_JAX + "import tfdpx; tfdpx.DPSGD", {}),
    ],
)
def test_other_backends_are_refused_by_name(code, environment):
    message = python(code, **environment)
    assert message.startswith("ImportError: tfdpx needs the TensorFlow backend")
    assert "Received: backend='jax'" in message
    assert "KERAS_BACKEND=tensorflow before importing keras" in message


@pytest.mark.parametrize("folder", ["tfdpx", "layers", "models"])
def test_registered_classes_are_found_by_their_name_in_a_file(folder):
    root = pathlib.Path(__file__).resolve().parents[1]
    for path in sorted((root / folder).rglob("*.py")):
        if "register_keras_serializable" in path.read_text(encoding="utf-8"):
            home = ".".join(path.relative_to(root).with_suffix("").parts).removeprefix("tfdpx.")
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
    rules = python(code).split()
    assert len(rules) == 3 and rules[0] == "WSConv2DRule" and "GenericRule" not in rules
