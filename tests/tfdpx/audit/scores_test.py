"""AUC, advantage and true positives at few false ones, against closed forms and definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdpx.audit import membership

some_scores = st.lists(st.integers(-4, 4), min_size=1, max_size=12)


@given(some_scores, some_scores, st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]))
def test_all_follow_from_their_definitions(members, nonmembers, fpr):
    pairs = [(m > o) + 0.5 * (m == o) for m in members for o in nonmembers]
    assert membership.auc(members, nonmembers) == pytest.approx(np.mean(pairs))
    members, nonmembers = np.array(members), np.array(nonmembers)
    thresholds = np.arange(-5.5, 5.0)
    true, false = (np.array([np.mean(s > t) for t in thresholds]) for s in (members, nonmembers))
    assert membership.advantage(members, nonmembers) == pytest.approx(max(true - false))
    assert membership.tpr_at_fpr(members, nonmembers, fpr) == pytest.approx(max(true[false <= fpr]))


@pytest.mark.parametrize("members", [[], [1.0, float("nan")]])
def test_no_scores_and_nan_are_refused(members):
    for function in (membership.auc, membership.advantage):
        with pytest.raises(ValueError, match="`members`"):
            function(members, [0.0])
    with pytest.raises(ValueError, match="`fpr`"):
        membership.tpr_at_fpr([1.0], [0.0], 1.0)
