"""The rules of tables: what the statistics cost, how far a row moves them, and what is chosen."""

import dataclasses

import numpy as np
import pytest

from tfdpx.accounting.ledger import Ledger
from tfdpx.heads.releases import Releases
from tfdpx.sklearn import PrivateClassifier
from tfdpx.tables import rules


def columns_and_labels(rows, share, limit=40.0):
    """Returns eight columns of numbers and a category, and a label of this share."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 8))
    score = 1.5 * x.sum(axis=1) / 8**0.5 + rng.logistic(size=rows)
    target = (score > np.quantile(score, 1 - share)).astype("int64")
    limits = np.full([2, 8], [[-limit], [limit]])
    return rules.Columns({"": x, "city": rng.choice(["x", "y"], rows)}, *limits), target


def adapt(columns, target, epsilon=3.0):
    """Returns the ledger of the statistics, and the shares of the labels."""
    statistics = rules.Preprocessing(columns, 2, epsilon, 1e-5)
    return statistics.rare_shares(target), statistics.model()[1]


@pytest.mark.parametrize("share, limit", [(0.05, 40.0), (0.5, np.nan), (0.5, 4.0)])
def test_the_share_of_the_preprocessing(share, limit):
    """The preprocessing takes a tenth of the budget's squared mu, by Gaussian privacy."""
    shares, spent = adapt(*columns_and_labels(10_000, share, limit))
    noises = sorted(entry.noise_multiplier for entry in spent.entries for _ in range(entry.steps))
    # Ranges or narrower bounds, moments and the category; the labels at twice the noise.
    assert noises == pytest.approx([noises[0]] * 3 + [2 * noises[0]])
    noise = (10 * sum(noise**-2 for noise in noises)) ** -0.5
    alone = dataclasses.replace(spent.entries[0], noise_multiplier=noise, steps=1)
    assert Ledger((alone,)).epsilon(1e-5) == pytest.approx(3.0, rel=5e-3)
    assert shares is None if share == 0.5 else shares[1] == pytest.approx(share, abs=0.01)


def test_limits_of_some_columns_are_found():
    columns, target = columns_and_labels(10_000, 0.5)
    columns.arrays[""][:, 0] *= 1e-3
    columns.lower[:2], columns.upper[:2] = np.nan, np.nan
    _, spent = adapt(columns, target)
    assert spent.steps == 5  # Ranges, narrower bounds, moments, the category and the labels.
    statistics = rules.Preprocessing(columns, 2, 30.0, 1e-5)
    [layer] = [x for x in statistics.model()[0].layers if x.name.startswith("normalization")]
    np.testing.assert_allclose(layer.adapt_variance, [1e-6, *[1.0] * 7], rtol=0.3)


def test_a_row_moves_bounds_and_labels_by_their_sensitivity(monkeypatch):
    columns, target = columns_and_labels(2000, 0.05)
    released = []
    monkeypatch.setattr(
        Releases, "gaussian", lambda self, *release: released.append(release) or release[1]
    )
    for start in (0, 1):
        adapt(columns.rows(np.arange(start, 2000)), target[start:])
    one, other = released[: len(released) // 2], released[len(released) // 2 :]
    names = ["labels", *["statistics"] * 3]
    assert [release[0] for release in one] == [release[0] for release in other] == names
    for place, bound in ((0, 1.0), (1, 8**0.5)):  # The labels, and the cells of narrower bounds.
        moved = np.linalg.norm(one[place][1] - other[place][1])
        assert 0.99 * moved <= bound == pytest.approx(one[place][2], rel=1e-12)


def test_the_epsilon_that_finds_ranges_is_named():
    columns, target = columns_and_labels(200, 0.5, np.nan)
    with pytest.raises(rules.TooFewRows) as error:
        adapt(columns, target)
    *_, rows, epsilon = error.value.args
    assert 3 < epsilon < 10 and rows > 200
    adapt(columns, target, epsilon)
    few, labels = columns_and_labels(3, 0.5, np.nan)
    with (
        pytest.warns(UserWarning, match="epsilon=inf"),
        pytest.raises(rules.TooFewRows, match=r"^3 rows .* some \d+ rows\. Give"),
    ):
        adapt(few, labels)


def test_the_rule_of_epsilon_times_rows():
    asked = PrivateClassifier()
    for rows, *choice in ((142, "linear", 60), (400, "linear", 180), (5000, "network", 180)):
        training = rules.choose(asked, 1.0, rows, Ledger(), False)
        assert [training.name, training.plan.steps, training.l2_norm_clip] == [*choice, "automatic"]
    _, _, rate, clip = rules.choose(asked, 1.0, 400, Ledger(), False, rare_columns=7)
    assert clip == 4 and 0 < rate < clip  # The norm of seven columns and a bias, times sqrt(2).
