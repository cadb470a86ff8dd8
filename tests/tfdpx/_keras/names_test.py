"""The table of private names: the installed Keras and TensorFlow have them where it says."""

import inspect
import pkgutil
import sys

import keras
import pytest
import tensorflow as tf

from tfdpx._keras import names

INSTALLED = {"Keras": keras.__version__, "TensorFlow": tf.__version__}


def minor(version):
    return tuple(int(part) for part in version.split(".")[:2])


def is_installed(versions):
    """Returns whether a row is about the installed version; the newest is about later ones too."""
    library, _, span = versions.partition(" ")
    first, last = map(minor, (span.split(" to ") * 2)[:2])
    newest = max(minor(row.split()[-1]) for row, *_ in names.TABLE if row.startswith(library))
    return first <= min(minor(INSTALLED[library]), newest) <= last


ROWS = [
    pytest.param(place, row.split(), id=place)
    for versions, place, row in names.TABLE
    if is_installed(versions)
]


@pytest.mark.parametrize("place, row", ROWS)
def test_the_installed_versions_have_the_names_of_the_table(place, row):
    owner = pkgutil.resolve_name(place)
    module = owner if inspect.ismodule(owner) else sys.modules[owner.__module__]
    # An attribute that a constructor sets is seen in the source only.
    source = inspect.getsource(module)
    assert [name for name in row if not hasattr(owner, name) and name not in source] == []


def test_a_keras_without_a_name_is_refused_by_it(monkeypatch):
    assert [hasattr(*names.find(name)) for name in ("take", "dropout", "Functional")] == [True] * 3
    monkeypatch.setattr(names, "TABLE", [("Keras 3.10", "keras.src.backend:no.module", "take")])
    names.find.cache_clear()
    with pytest.raises(ImportError, match=r"`take`.*no\.module.*Received: Keras 3.*pip install"):
        names.find("take")
    monkeypatch.undo()
    names.find.cache_clear()
