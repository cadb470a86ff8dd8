"""Pictures: real PNG files that show the right numbers."""

import math
import warnings

import numpy as np
import pytest
from matplotlib import figure, image

from tfdpx.train import pictures


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    figures, save = [], figure.Figure.savefig

    def spy(self, path):
        figures.append(self)
        save(self, path)
        assert min(image.imread(path).shape[:2]) > 300

    monkeypatch.setattr(figure.Figure, "savefig", spy)
    return figures


def rows(epsilons):
    return [
        {"step": 10 * i, "epsilon": epsilon, "accuracy": 0.2 * i}
        for i, epsilon in enumerate(epsilons, start=1)
    ]


def test_the_learning_curve_is_over_epsilon_and_updates(tmp_path, drawn):
    path = tmp_path / "curve.png"
    pictures.learning_curve(rows([0.5, 0.8, 1.0]), path)
    axes, top = drawn[0].axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [(0.5, 20), (0.8, 40), (1.0, 60)])
    assert "varepsilon" in axes.get_xlabel() and axes.get_ylabel() == "test accuracy, %"
    assert top.get_xlabel() == "model updates" and top.get_xlim() == axes.get_xlim()
    ticks = dict(zip([t.get_text() for t in top.get_xticklabels()], top.get_xticks(), strict=True))
    assert (ticks["10"], ticks["20"], ticks["25"]) == pytest.approx((0.5, 0.8, 0.9))
    pictures.learning_curve(rows([math.inf] * 3), path, "validation")  # Without privacy.
    [axes] = drawn[1].axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [10, 20, 30])
    assert axes.get_xlabel() == "model updates" and axes.get_ylabel().startswith("validation")
    pictures.learning_curve(rows([1.0]), path)


def test_the_confusion_matrix_counts(tmp_path, drawn):
    path = tmp_path / "confusion.png"
    pictures.confusion_matrix([0, 0, 0, 1, 2], [0, 0, 1, 1, 0], ["cat", "dog", "frog"], path)
    axes = drawn[0].axes[0]
    expected = [[200 / 3, 100 / 3, 0], [0, 100, 0], [100, 0, 0]]
    np.testing.assert_allclose(axes.images[0].get_array(), expected)
    assert [text.get_text() for text in axes.texts] == ["2", "1", "1", "1"]
    assert axes.get_title() == "3 of 5 right"
    pictures.confusion_matrix([3, 7], [3, 99], range(100), path)
    assert not drawn[1].axes[0].texts  # There are too many classes.


def test_class_names_are_in_any_script(tmp_path, drawn):
    """Letters that no font has are escapes; a font that has them is used."""
    names = ["قطة", "a$b$", "猫", "👩\u200d🔬"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph")
        pictures.confusion_matrix(range(4), range(4), names, tmp_path / "confusion.png")
    labels = [text.get_text() for text in drawn[0].axes[0].get_yticklabels()]
    assert labels[:2] == ["قطة", r"a\$b\$"] and labels[2] in ("猫", r"\u732b")


def test_wrong_predictions_show_images_with_both_classes(tmp_path, drawn):
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), "uint8")
    names = ["cat", "$dog", "a name of more letters than fit"]
    pictures.wrong_predictions(images, [0, 1, 2, 0, 1], [1, 2, 0, 2, 0], names, tmp_path / "a.png")
    titles = [axes.get_title() for axes in drawn[0].axes]
    assert titles[:2] == ["cat\ntaken for \\$dog", "\\$dog\ntaken for a name of m..."]
    for axes, pixels in zip(drawn[0].axes, images, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), pixels)
