"""Checks that `docs/api.md` lists all public names."""

import functools
import importlib
import inspect
import pathlib
import re

import pytest

import tfdpx

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "api.md"
MODULES = [name for name in tfdpx.__all__ if inspect.ismodule(getattr(tfdpx, name))]


def public_names():
    yield from (f"tfdpx.{name}" for name in tfdpx.__all__ if name not in MODULES)
    for module in MODULES:
        names = importlib.import_module(f"tfdpx.{module}").__all__
        yield from (f"tfdpx.{module}.{name}" for name in names)


@pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")
def test_the_page_lists_every_public_name_and_no_other():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "- "]
    listed = [
        name for line in lines for name in re.findall(r"`(tfdpx\.[\w.]+)`", line.split(":")[0])
    ]
    assert sorted(listed) == sorted(public_names())


def test_modules_export_what_they_list():
    for name in MODULES:
        module = importlib.import_module(f"tfdpx.{name}")
        assert sorted(module.__all__) == module.__all__
        for name in module.__all__:
            assert getattr(module, name).__doc__, name


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
