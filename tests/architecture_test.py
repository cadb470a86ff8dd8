"""Checks which modules may import each other, and where Keras's private names may be used."""

import ast
import functools
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# A room (a folder or a file of `tfdpx/`, or a folder of the root) may import those before it.
ROOMS = [
    *("_warnings", "_arguments", "_files", "_resumable", "_keras", "noise", "accounting"),
    *("suggestion", "per_example", "augment", "mechanism"),
    *(
        "account",
        "synthetic",
        "sampling",
        "checks",
        "training",
        "heads",
        "tables",
        "sklearn",
        "audit",
    ),
    *("callbacks", "distributed", "report", "layers", "models", "_import_hook", "__init__"),
    *("train", "experiments"),
]
FOLDERS = ("tfdpx", "layers", "models", "train", "experiments")
# `plan.batches` imports the samplers, and `statement` the sentences, when they are called.
ON_THE_CALL = {("accounting", "sampling"), ("accounting", "report")}
NOT_IN_ACCOUNTING = {"keras", "tensorflow"}

NAMED_TUPLE = {"_asdict", "_fields", "_replace"}


parsed = functools.cache(ast.parse)


@functools.cache
def sources():
    """Returns `{path: source}` of the package, with paths relative to the root."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def room_of(path):
    folder, inner = path.removesuffix(".py").split("/")[:2]
    return inner if folder == "tfdpx" else folder


def imports(source):
    """Yields pairs of a dotted name and whether the import is at the top level of the module."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, node.col_offset == 0


def wrong_arrows(files):
    """Returns a list of "path imports name" against the order of the rooms."""
    wrong = []
    for path, source in files.items():
        room = room_of(path)
        for name, at_top in imports(source):
            package, *inner = name.split(".")
            target = None
            if package == "tfdpx":
                target = inner[0] if inner and inner[0] in ROOMS else "__init__"
            elif package == "experiments":
                target = package
            elif room == "accounting" and package in NOT_IN_ACCOUNTING:
                wrong.append(f"{path} imports {name}")
            if target is not None and ROOMS.index(target) > ROOMS.index(room):
                if at_top or (room, target) not in ON_THE_CALL:
                    wrong.append(f"{path} imports {name}")
    return wrong


def foreign_uses(files):
    """Returns a list of "path imports name" for files with an underscore in another room."""
    uses = []
    for path, source in files.items():
        for name, _ in imports(source):
            for module in (name, name.rpartition(".")[0]):
                *folders, last = module.split(".")
                private = is_private(last) and len(folders) > 1 and folders[1] in ROOMS
                if private and folders[1] != room_of(path):
                    uses.append(f"{path} imports {name}")
    return uses


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(tree):
    """Yields the names of a module's functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def touched(tree):
    """Yields pairs of a line and the attribute that it reads or sets, for example by `getattr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr"):
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    yield node.lineno, name.value


def may_be_private(path):
    """Returns whether a file may use private names, as the strategy in `experiments/tpu` may."""
    return room_of(path) == "_keras" or path.startswith("experiments/tpu/")


def private_uses(files):
    """Returns a list of "path:line name" where a private name of Keras or TensorFlow is used.

    A private name that no module of the package defines is counted as theirs.
    """
    trees = {path: parsed(source) for path, source in files.items() if not may_be_private(path)}
    ours = {name for tree in trees.values() for name in defined(tree)} | NAMED_TUPLE
    uses = []
    for path, tree in trees.items():
        for name, _ in imports(files[path]):
            if f"{name}.".startswith(("keras.src.", "tensorflow.python.")):
                uses.append(f"{path} imports {name}")
        for line, name in touched(tree):
            if is_private(name) and name not in ours:
                uses.append(f"{path}:{line} {name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                if ast.unparse(node) in ("keras.src", "tf.python", "tensorflow.python"):
                    uses.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    return uses


def test_arrows_point_one_way():
    assert wrong_arrows(sources()) == []


def test_every_room_has_its_place():
    assert {room_of(path) for path in sources()} <= set(ROOMS)


@pytest.mark.planted("an import against the arrows")
@pytest.mark.parametrize(
    "path, source",
    [
        ("tfdpx/training/a.py", "def late():\n    from tfdpx.callbacks import TensorBoard"),
        ("layers/made_up.py", "from tfdpx.models import LeNet"),
        ("tfdpx/accounting/made_up.py", "import tensorflow as tf"),
        ("train/made_up.py", "from experiments import benchmark"),
    ],
)
def test_a_wrong_arrow_is_seen(path, source):
    assert len(wrong_arrows({path: source})) == 1


def test_a_file_with_an_underscore_serves_its_room_alone():
    assert foreign_uses(sources()) == []
    planted = {"tfdpx/training/made_up.py": "from tfdpx.augment import _draws"}
    assert len(foreign_uses(planted)) == 1


def test_private_names_of_keras_and_tensorflow_stand_in_one_place():
    assert private_uses(sources()) == []


def test_the_table_of_versions_has_every_private_name_that_is_used():
    files = {path: source for path, source in sources().items() if room_of(path) == "_keras"}
    table = files["tfdpx/_keras/names.py"]
    ours = {name for source in sources().values() for name in defined(parsed(source))} | NAMED_TUPLE
    for path, source in files.items():
        assert not [name for name, _ in imports(source) if f"{name}.".startswith("keras.src.")]
        used = {name for _, name in touched(parsed(source)) if is_private(name)}
        assert [name for name in sorted(used - ours) if name not in table] == [], path


@pytest.mark.planted("a private name of Keras or TensorFlow")
@pytest.mark.parametrize(
    "source",
    [
        "from keras.src import backend",
        "from tensorflow.python.ops import array_ops",
        "def f(layer):\n    return layer._flatten_layers()",
        "def f(tensor):\n    return getattr(tensor, '_keras_mask', None)",
        "class A:\n    def f(self):\n        return self._model_variables_moving_average",
    ],
)
def test_a_private_name_is_seen(source):
    assert len(private_uses({"tfdpx/made_up.py": source})) == 1
