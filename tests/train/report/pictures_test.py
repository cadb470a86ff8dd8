"""Pictures: real PNG files that show what they are given, and arrive in TensorBoard."""

import math
import warnings

import numpy as np
import pytest
from matplotlib import figure, image

from tfdpx.train.report import pictures


def rows(epsilons, accuracies, step=10):
    return [
        {"step": step * i, "epsilon": e, "accuracy": a}
        for i, (e, a) in enumerate(zip(epsilons, accuracies, strict=True), start=1)
    ]


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    saved = []
    save = figure.Figure.savefig

    def record(self, *args, **kwargs):
        saved.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(figure.Figure, "savefig", record)
    return saved


def check_png(path):
    pixels = image.imread(path)
    assert min(pixels.shape[:2]) > 300
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 10


def test_learning_curve_has_epsilon_below_and_updates_above(tmp_path, drawn):
    path = tmp_path / "curve.png"
    pictures.learning_curve(rows([0.5, 0.8, 1.0], [0.3, 0.7, 0.9]), path)
    check_png(path)
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [0.5, 0.8, 1.0])
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [30, 70, 90])
    assert "varepsilon" in axes.get_xlabel() and axes.get_ylabel() == "test accuracy, %"
    (second,) = axes.child_axes
    assert second.get_xlabel() == "model updates"
    to_steps, to_epsilon = second._functions
    np.testing.assert_allclose(to_steps([0, 0.5, 0.8, 0.9, 1.0]), [0, 10, 20, 25, 30])
    np.testing.assert_allclose(to_epsilon(to_steps(np.linspace(-1, 2))), np.linspace(-1, 2))


def test_learning_curve_without_privacy_is_over_updates(tmp_path, drawn):
    path = tmp_path / "curve.png"
    pictures.learning_curve(rows([math.inf] * 3, [0.3, 0.7, 0.9]), path, "validation")
    check_png(path)
    axes = drawn[0].axes[0]
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [10, 20, 30])
    assert axes.get_xlabel() == "model updates" and axes.get_ylabel().startswith("validation")
    assert not axes.child_axes
    for epsilons in ([1.0], [0.5, 0.5, 0.5]):
        pictures.learning_curve(rows(epsilons, [0.5] * len(epsilons)), path)


def test_confusion_matrix_counts(tmp_path, drawn):
    path = tmp_path / "confusion.png"
    labels, predictions = [0, 0, 0, 1, 2], [0, 0, 1, 1, 0]
    pictures.confusion_matrix(labels, predictions, ["cat", "dog", "frog"], path)
    check_png(path)
    axes = drawn[0].axes[0]
    expected = [[200 / 3, 100 / 3, 0], [0, 100, 0], [100, 0, 0]]
    np.testing.assert_allclose(axes.images[0].get_array(), expected)
    assert [text.get_text() for text in axes.texts] == ["2", "1", "1", "1"]
    assert axes.get_title() == "3 of 5 right"
    pictures.confusion_matrix([3, 7], [3, 99], [str(i) for i in range(100)], path)
    assert not drawn[1].axes[0].texts  # Too many classes, and absent ones.


def test_names_of_classes_in_any_script(tmp_path, drawn):
    """Letters that no font has are escapes; a font that has them is found and used."""
    names = ["قطة", "a$b$", "猫", "👩\u200d🔬"]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Glyph")
        pictures.confusion_matrix(range(4), range(4), names, tmp_path / "confusion.png")
    shown = [text.get_text() for text in drawn[0].axes[0].get_yticklabels()]
    assert shown[:2] == ["قطة", r"a\$b\$"] and shown[2] in ("猫", r"\u732b")


def test_wrong_predictions_show_images_with_both_classes(tmp_path, drawn):
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), "uint8")
    names = ["cat", "$dog", "a name of more letters than fit"]
    pictures.wrong_predictions(images, [0, 1, 2, 0, 1], [1, 2, 0, 2, 0], names, tmp_path / "a.png")
    check_png(tmp_path / "a.png")
    shown = drawn[0].axes
    assert [axes.get_title() for axes in shown[:2]] == [
        "cat\ntaken for \\$dog",
        "\\$dog\ntaken for a name of m...",
    ]
    for axes, image_shown in zip(shown, images, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), image_shown)
