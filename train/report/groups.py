"""Which groups of examples are served worse: in privacy, in loss, and against an attack.

After Yu et al. 2022, section 5. Everything here is a function of private data.
"""

import dataclasses

import numpy as np

from tfdpx._arguments import check_positive_integer


@dataclasses.dataclass(frozen=True)
class Group:
    """What was found of one group.

    Attributes:
        name: Its id, as given.
        count: Int, examples.
        mean_epsilon: Float.
        mean_loss: Float.
        correlation: Float, Pearson's, of epsilon and loss within the group; NaN where one of them
            is constant.
        attack_success: Float, of `membership_success`; None without losses of non-members.
    """

    name: object
    count: int
    mean_epsilon: float
    mean_loss: float
    correlation: float
    attack_success: float | None


@dataclasses.dataclass(frozen=True)
class GroupReport:
    """What `group_report` found.

    Attributes:
        groups: Tuple of `Group`, by mean loss, the lowest first.
        correlation: Float, Pearson's, of epsilon and loss over all examples.
        group_correlation: Float, of the groups' means.
    """

    groups: tuple
    correlation: float
    group_correlation: float


def group_report(
    epsilons, losses, groups, *, held_out_losses=None, held_out_groups=None, splits=100, seed=0
):
    """Mean epsilon, mean loss and membership attack of each group.

    Args:
        epsilons: Float array [num_examples], as of `IndividualAccountant.epsilon`.
        losses: Float array [num_examples], of the same examples.
        groups: Array [num_examples] of ids, such as classes: ints or strings.
        held_out_losses: Optional float array [n] of examples that were not trained on, for the
            attack. Losses of another model than the one of `epsilons` will do, and show more:
            against a private one the attack has next to no success.
        held_out_groups: Array [n] of their ids. Needed with `held_out_losses`.
        splits: Int, random halves that the attack is averaged over.
        seed: Int, of these.

    Returns:
        `GroupReport`.

    Raises:
        ValueError: If lengths differ, a number is not finite, or one of two is missing.
    """
    epsilons, losses, groups = np.asarray(epsilons, float), np.asarray(losses), np.asarray(groups)
    if not (epsilons.ndim == 1 and epsilons.shape == losses.shape == groups.shape):
        raise ValueError(
            "Arguments `epsilons`, `losses` and `groups` must have one shape [num_examples]. "
            f"Received: shapes {epsilons.shape}, {losses.shape}, {groups.shape}."
        )
    if (held_out_losses is None) != (held_out_groups is None):
        raise ValueError(
            "Arguments `held_out_losses` and `held_out_groups` go together. Received one of them."
        )
    if not (np.isfinite(epsilons).all() and np.isfinite(losses).all()):
        raise ValueError(
            "Arguments `epsilons` and `losses` must be finite. Received: "
            f"{np.count_nonzero(~np.isfinite(epsilons) | ~np.isfinite(losses))} that are not."
        )
    found = []
    for name in np.unique(groups):
        mine, success = groups == name, None
        if held_out_losses is not None:
            others = np.asarray(held_out_losses)[np.asarray(held_out_groups) == name]
            if len(others) > 1:
                success = membership_success(losses[mine], others, splits, seed)
        found.append(
            Group(
                name=name.item(),
                count=int(mine.sum()),
                mean_epsilon=float(epsilons[mine].mean()),
                mean_loss=float(losses[mine].mean()),
                correlation=_pearson(epsilons[mine], losses[mine]),
                attack_success=success,
            )
        )
    found.sort(key=lambda group: group.mean_loss)
    means = np.array([[group.mean_epsilon, group.mean_loss] for group in found])
    return GroupReport(tuple(found), _pearson(epsilons, losses), _pearson(*means.T))


def membership_success(members, others, splits=100, seed=0):
    """The success of the attack that takes examples of low loss for members.

    After Yu et al. 2022, section 5.3: as many members as others; the threshold that is best on one
    half of them is tested on the other half.

    Args:
        members: Float array [n] of losses of examples that were trained on.
        others: Float array [m] of losses of examples that were not.
        splits: Int, random choices and halves that the result is averaged over.
        seed: Int, of these.

    Returns:
        Float in [0, 1]; 0.5 is guessing.

    Raises:
        ValueError: If there are less than two of either.
    """
    check_positive_integer("splits", splits)
    count = min(len(members), len(others))
    if count < 2:
        raise ValueError(
            "Arguments `members` and `others` must hold at least two losses each. Received: "
            f"{len(members)} and {len(others)}."
        )
    generator, half = np.random.default_rng(seed), count // 2
    successes = []
    for _ in range(splits):
        inside = generator.permutation(members)[:count]
        outside = generator.permutation(others)[:count]
        threshold = _best_threshold(inside[:half], outside[:half])
        right = np.mean(inside[half:] <= threshold) + np.mean(outside[half:] > threshold)
        successes.append(right / 2)
    return float(np.mean(successes))


def _best_threshold(inside, outside):
    """The loss up to which examples are best taken for members, of as many as of others."""
    losses = np.concatenate([inside, outside])
    order = np.argsort(losses, kind="stable")
    gains = np.where(order < len(inside), 1, -1)
    # At each loss the gain of all up to it, ties among them.
    last = np.append(np.diff(losses[order]) > 0, True)
    gained = np.where(last, np.cumsum(gains), -len(losses))
    best = int(np.argmax(gained))
    # Half way to the next.
    edges = np.append(losses[order], np.inf)
    return edges[best : best + 2].mean() if gained[best] > 0 else -np.inf


def _pearson(a, b):
    """Pearson's correlation; NaN where it is undefined."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
