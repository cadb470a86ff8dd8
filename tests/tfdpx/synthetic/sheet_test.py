"""The contact sheet shows the first images of each generator, and refuses what it cannot show."""

import pathlib
import re

import numpy as np
import pytest
from PIL import Image

from tfdpx.synthetic import DeadLeaves, Shapes
from tfdpx.synthetic.sheet import contact_sheet

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "synthetic.md"


def test_rows_are_generators_and_columns_images(tmp_path):
    gray, colour = DeadLeaves((5, 7)), Shapes((5, 7), 3)
    contact_sheet([gray, colour], tmp_path / "sheet.png", columns=3, enlarge=2)
    picture = np.asarray(Image.open(tmp_path / "sheet.png"))
    assert picture.shape == (2 * 10 + 2, 3 * 14 + 2 * 2, 3)
    for row, generator in enumerate([gray, colour]):
        for column, image in enumerate(generator.images(3)):
            tile = picture[12 * row :, 16 * column :][:10:2, :14:2]
            np.testing.assert_array_equal(tile, np.rint(255 * image) * np.ones(3))
    assert (picture[10:12] == 255).all() and (picture[:, 14:16] == 255).all()


@pytest.mark.parametrize(
    "generators, message",
    [
        ([], "`generators` must hold a generator"),
        ([DeadLeaves(8), DeadLeaves(9)], r"one image size.*\(8, 8\), \(9, 9\).*a sheet for each"),
        ([DeadLeaves(8, 2)], r"1 or 3 channels.*\[2\]"),
    ],
)
def test_refuses_by_name(generators, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        contact_sheet(generators, tmp_path / "sheet.png")


@pytest.mark.parametrize("name", ["columns", "enlarge"])
def test_refuses_no_columns(name, tmp_path):
    with pytest.raises(ValueError, match=f"`{name}` must be a positive integer"):
        contact_sheet([DeadLeaves(4)], tmp_path / "sheet.png", **{name: 0})


@pytest.mark.slow
@pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")
def test_the_page_makes_its_picture_and_its_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    np.testing.assert_array_equal(names["model"](np.ones((1, 32, 32, 3))), np.zeros((1, 10)))
    made, shown = Image.open("synthetic.png"), Image.open(PAGE.with_suffix(".png"))
    assert made.size == shown.size
