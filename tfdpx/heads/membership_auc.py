"""A membership attack by thresholds on the loss, which AdaMix's Figure 1 (right) measures."""

import numpy as np
from scipy.stats import rankdata


def membership_auc(member_losses, other_losses):
    """The area under the curve of an attacker who takes examples of small loss for members.

    It is the probability that a member has the smaller loss of a member and another example; ties
    count half. 0.5 is what guessing gives. The result is not private.

    Args:
        member_losses: Array `[n]`, losses of private training examples.
        other_losses: Array `[m]`, losses of examples that were not trained on.

    Returns:
        Float in [0, 1].

    Raises:
        ValueError: If one of them is empty or a loss is not a number.
    """
    members, others = (np.ravel(losses) for losses in (member_losses, other_losses))
    for name, losses in (("member_losses", members), ("other_losses", others)):
        if not len(losses) or np.isnan(losses).any():
            raise ValueError(
                f"Argument `{name}` must hold at least one loss, and no NaN. Received: "
                f"{len(losses)} losses, {int(np.isnan(losses).sum())} of them NaN."
            )
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    smaller = ranks.sum() - len(members) * (len(members) + 1) / 2
    return float(1 - smaller / (len(members) * len(others)))
