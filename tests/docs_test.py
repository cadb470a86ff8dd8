"""The pages: links, names, quotations, commands and notebooks are those of the source."""

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

import tfdpx
from tfdpx.train import settings, sweep
from tfdpx.train.command import PROGRAMS

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAQ = ROOT / "docs" / "faq.md"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for pattern in ("*.md", "docs/**/*.md", "experiments/**/*.md", "tfdpx/**/*.md")
    for path in ROOT.glob(pattern)
)
NOW = [page for page in PAGES if page != "CHANGELOG.md"]
_PLACEHOLDER = re.compile(r"\.\.\.|=(NAME|HEAD|[A-Za-z])(?= |$|`|\))")
_OF_SWEEP = re.compile("--(grid|seeds|jobs|private_tuning)")
_COMMAND = re.compile(r"(?:python -m tfdpx\.train\.|\btfdpx )(\w+)((?: +(?:--|\\)[^`]*)?)")
pytestmark = pytest.mark.skipif(not FAQ.exists(), reason="needs a checkout")


def test_every_link_to_a_file_leads_to_one():
    for page in PAGES:
        path = ROOT / page
        links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        files = [link for link in links if not re.match(r"\w+:", link)]
        assert [file for file in files if not (path.parent / file).exists()] == [], page


def test_commands_fold_at_80_columns():
    """No flag is cut off on a page or in a terminal."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert [line for b in blocks for line in b.splitlines() if len(line) > 80] == [], page


def texts():
    """Yields every string of the package, with "..." in place of an f-string's values."""
    for folder in ("tfdpx", "layers", "models", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [getattr(part, "value", None) for part in node.values]
                    yield "".join(part if isinstance(part, str) else "..." for part in parts)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def missing(quotes):
    """Returns the quotes that no string contains, with all parts between "..." in order."""
    strings = list(texts())

    def pattern(quote):
        return re.compile(".*".join(map(re.escape, quote.split("..."))), re.DOTALL)

    return [quote for quote in quotes if not any(map(pattern(quote).search, strings))]


def test_errors_that_the_page_quotes_are_in_the_source():
    quotes = re.findall(r"^> (.*)$", FAQ.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(quotes) >= 20
    assert missing(quotes) == []
    assert missing(["The plan counts on shuffled batches"])


def commands():
    """Yields pairs of a program and its arguments from all code in the pages."""
    for page in NOW:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
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


def test_every_file_that_is_named_exists():
    for page in map(pathlib.Path, NOW):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`((?:\w+/)*\w+\.py|(?:\w+/){2,})(?:`|::)", text))
        folders = [page.parent, "tests" / page.parent, ".", "tfdpx", "tests/tfdpx"]
        bases = [ROOT / folder for folder in folders]
        lacking = [name for name in named if not any((base / name).exists() for base in bases)]
        assert not lacking, page


def test_the_pages_of_flags_and_presets_are_current():
    path = ROOT / "tools" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages", path)
    reference_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference_pages)
    for path, text in reference_pages.pages().items():
        assert path.read_text(encoding="utf-8") == text, "run tools/reference_pages.py"


NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_has_outputs_and_asserts_its_epsilon(path, tmp_path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    assert re.search(r"assert .*epsilon.* <= \d", code)
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "epsilon" in outputs
    assert '"error"' not in outputs and '"stderr"' not in outputs
    (tmp_path / "tutorial.py").write_text(f"import matplotlib\n\nmatplotlib.use('Agg')\n{code}\n")
    command = [sys.executable, "tutorial.py"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]


MODULES = [name for name in tfdpx.__all__ if inspect.ismodule(getattr(tfdpx, name))]


def public_names():
    yield from (f"tfdpx.{name}" for name in tfdpx.__all__ if name not in MODULES)
    for module in MODULES:
        names = importlib.import_module(f"tfdpx.{module}").__all__
        yield from (f"tfdpx.{module}.{name}" for name in names)


def test_the_page_lists_every_public_name_and_no_other():
    lines = [
        line
        for line in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines()
        if line[:2] == "- "
    ]
    listed = [
        name for line in lines for name in re.findall(r"`(tfdpx\.[\w.]+)`", line.split(":")[0])
    ]
    assert sorted(listed) == sorted(public_names())


def functions_of(public):
    """Yields a public function, or a class's constructor and public methods, without Keras's."""
    if inspect.isfunction(public):
        yield inspect.unwrap(public)
        return
    for base in public.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("tfdpx.") else ():
            value = getattr(value, "__func__", value)
            if isinstance(value, (property, functools.cached_property)):
                value = getattr(value, "fget", None) or value.func
            if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
                yield inspect.unwrap(value)


def test_every_public_function_has_annotations():
    for name in public_names():
        public = functools.reduce(getattr, name.split(".")[1:], tfdpx)
        for function in functions_of(public):
            signature = inspect.signature(function)
            parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
            bare = [p.name for p in parameters if p.annotation is p.empty]
            assert not bare and signature.return_annotation is not signature.empty, function


def test_every_argument_is_described():
    for name in public_names():
        public = functools.reduce(getattr, name.split(".")[1:], tfdpx)
        function = public if inspect.isfunction(public) else public.__init__
        if not inspect.isfunction(function):
            continue  # An exception.
        bases = [public] if inspect.isfunction(public) else public.__mro__
        text = "".join(base.__doc__ or "" for base in bases if base.__module__.startswith("tfdpx."))
        described = re.findall(r"^ +\*{0,2}(\w+): ", text, re.MULTILINE)
        # `**private` of optimizers is described by the class of these arguments.
        assert {*inspect.signature(function).parameters} - {"self", "private"} <= {*described}, name
