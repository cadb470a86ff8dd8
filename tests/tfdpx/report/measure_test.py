"""Metrics by hand and by closed forms, their edges, warnings, and the threshold."""

import math
import pathlib
import warnings

import numpy as np
import pytest
from sklearn import metrics

from tfdpx.report import measure, words
from tfdpx.train.errors import UserError
from tfdpx.train.fitting import AUC
from tfdpx.train.start_from import check_threshold

LABELS = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, 0])
PROBABILITIES = np.array([0.1, 0.2, 0.3, 0.3, 0.1, 0.6, 0.3, 0.7, 0.2, 0.05])


@pytest.fixture(autouse=True)
def no_warning():
    """Undefined metrics are None, without a warning of scikit-learn or NumPy."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def two(labels, probabilities, threshold=0.5, **about):
    logits = np.stack([np.zeros(len(labels)), np.log(probabilities / (1 - probabilities))], axis=1)
    return measure.Measured(labels, logits, ("no", "yes"), threshold, **about)


def wilson(share, count, z=1.959963984540054):
    centre, half = share + z**2 / (2 * count), share * (1 - share) / count + (z / 2 / count) ** 2
    return [(centre + sign * z * math.sqrt(half)) / (1 + z**2 / count) for sign in (-1, 1)]


def test_metrics_of_two_classes_at_a_threshold():
    results = two(LABELS, PROBABILITIES, 0.25).results()  # Predicted "yes": rows 2, 3, 5, 6, 7.
    pairs = [(p, n) for p in PROBABILITIES[LABELS == 1] for n in PROBABILITIES[LABELS == 0]]
    auc = np.mean([(p > n) + 0.5 * math.isclose(p, n) for p, n in pairs])
    expected = dict(accuracy=0.6, base_rate=0.7, recall=2 / 3, precision=0.4, f1=0.5, auc=auc)
    expected["mean_probability"] = PROBABILITIES.mean()
    for name, value in expected.items():
        assert results[f"test_{name}"] == pytest.approx(value), name
    assert results["test_accuracy_interval"] == pytest.approx(wilson(0.6, 10))
    assert results["test_most_frequent_class"] == "no" and not results["warnings"]
    assert results["test_positive_class"] == "yes"
    assert results["threshold"] == 0.25 and results["not_protected"] == words.NOT_PROTECTED
    limits = pathlib.Path(__file__).parents[3] / "docs" / "known_limits.md"
    assert words.NOT_PROTECTED.partition(":")[0] in limits.read_text()
    public = two(LABELS, PROBABILITIES, split="validation", is_public=True).results()
    assert public["validation_accuracy"] == 0.7 and public["not_protected"] is None
    # The second class wins a tie with the threshold; only two classes have a threshold.
    assert measure.predicted_classes(np.zeros((2, 2))).tolist() == [1, 1]
    assert measure.predicted_classes(np.zeros((2, 3)), 0.1).tolist() == [0, 0]
    with pytest.raises(UserError, match="--threshold=0.3 for 3 classes"):
        check_threshold(0.3, "abc")


def test_metrics_of_several_classes_and_of_values():
    logits = np.eye(4)[[0, 0, 1, 1, 1]]
    several = measure.Measured(np.array([0, 0, 0, 1, 2]), logits, ('"<a>', "b", "c", "d"))
    results = several.results()
    assert results["test_macro_f1"] == pytest.approx((0.8 + 0.5 + 0) / 3)
    recalls = {'"<a>': pytest.approx(2 / 3), "b": 1.0, "c": 0.0, "d": None}
    assert results["test_recall_by_class"] == recalls
    [warning] = results["warnings"]
    assert warning.startswith('The model never predicts "c": ')
    values = measure.Measured(np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.0, 2.5])).results()
    assert (values["test_r2"], values["test_mean_absolute_error"]) == (0.75, pytest.approx(1 / 3))


def test_undefined_metrics_are_none():
    rare = two(LABELS, PROBABILITIES / 10).results()
    assert rare["test_precision"] is None and rare["test_recall"] == rare["test_f1"] == 0
    assert rare["warnings"][0].startswith('The model never predicts "yes": accuracy says nothing')
    one = two(0 * LABELS, PROBABILITIES).results()
    assert one["test_auc"] is one["test_average_precision"] is one["test_recall"] is None
    broken = two(LABELS, PROBABILITIES)
    broken.outputs[3] = np.nan
    assert broken.results()["test_auc"] is None and broken.results()["test_accuracy"] > 0
    for names, outputs in ((("a", "b"), np.zeros((0, 2))), ((), np.zeros(0))):
        none = measure.Measured(np.zeros(0, int), outputs, names).results()
        assert none["num_measured"] == 0 and not any(v for k, v in none.items() if "test_" in k)
    names, logits = tuple(map(str, range(100))), np.eye(1, 100, dtype="float32").repeat(100, 0)
    hundred = measure.Measured(np.arange(100), logits, names).results()
    assert hundred["warnings"][0].startswith('The model always predicts "0"')
    nan = measure.Measured(np.array([1.0, 2.0]), np.array([np.nan, 1.0])).results()
    assert nan["test_r2"] is nan["test_mean_absolute_error"] is None


@pytest.mark.parametrize(("shift", "scale"), [(-10, 1), (0, 0.01), (-5, 0.1)])
def test_the_curve_ranks_rare_classes(shift, scale):
    rng = np.random.default_rng(0)
    labels = (rng.random(2000) < 0.1).astype(int)
    margins = (shift + scale * (labels + rng.normal(size=2000))).astype("float32")
    area = AUC()
    area.update_state(labels, np.stack([0 * margins, margins], axis=1))
    assert float(area.result()) == pytest.approx(metrics.roc_auc_score(labels, margins), abs=3e-3)
