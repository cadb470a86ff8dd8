"""Pictures: real PNG files that show the right numbers."""

import math

import numpy as np
import pytest
from matplotlib import figure, image

from tfdpx import PrivacyPlan
from tfdpx.report import pictures


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
    pictures.learning_curve([row | {"auc": 0.9} for row in rows([1.0])], path, base_rate=0.25)
    lines = [(line.get_label(), line.get_ydata()[0]) for line in drawn[2].axes[0].lines]
    assert lines == [("accuracy", 20), ("AUC", 90), ("base rate", 25)]


def test_reliability_is_of_tenths_and_thresholds_are_of_public_examples(tmp_path, drawn):
    shares = np.repeat([0.05, 0.25, 0.45], 200)
    labels = np.arange(600) % 20 < 20 * shares
    for is_public in (False, True):
        pictures.calibration(labels.astype(int), shares, 'a "$"<b>', tmp_path / "a.png", is_public)
    private, public = ([axes for axes in one.axes] for one in drawn)
    np.testing.assert_allclose(private[0].lines[1].get_xdata(), private[0].lines[1].get_ydata())
    assert [len(private), len(public)] == [2, 3] and "share 0.25" in private[0].get_title()
    precision, recall = (line.get_ydata().tolist() for line in public[2].lines)
    assert precision == pytest.approx([0.25, 0.35, 0.45]) and recall[0] == 1


def test_the_confusion_matrix_counts(tmp_path, drawn):
    path = tmp_path / "confusion.png"
    pictures.confusion_matrix([0, 0, 0, 1, 2], [0, 0, 1, 1, 0], ["cat", "dog", "frog"], path)
    axes = drawn[0].axes[0]
    expected = [[2 / 3, 1 / 3, 0], [0, 1, 0], [1, 0, 0]]
    np.testing.assert_allclose(axes.images[0].get_array(), expected)
    assert [text.get_text() for text in axes.texts] == [
        f"{100 * v:.0f}%" for v in np.ravel(expected)
    ]
    assert axes.get_title() == "3 of 5 right"
    pictures.confusion_matrix([3, 7], [3, 99], range(100), path)
    assert not drawn[1].axes[0].texts  # There are too many classes.


def test_the_attack_curve_is_the_bound_with_guessing(tmp_path, drawn):
    arguments = dict(num_examples=100, batch_size=10, steps=20, delta=1e-5)
    bounds = PrivacyPlan(**arguments, noise_multiplier=1).attack_bounds()
    pictures.attack_curve(bounds, tmp_path / "attack.png")
    shown, guessing = (line.get_xydata() for line in drawn[0].axes[0].lines)
    np.testing.assert_allclose(shown[:, 1], 100 * bounds.true_positive_rate(shown[:, 0] / 100))
    np.testing.assert_allclose(guessing, [(0, 0), (100, 100)])
