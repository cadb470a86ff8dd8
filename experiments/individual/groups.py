"""Compares groups of examples by privacy, by loss, and by the success of an attack."""

import numpy as np


def group_report(epsilons, losses, groups, held_out_losses=None, held_out_groups=None):
    """Returns a report of privacy, loss and attack success in groups of examples.

    The report follows Yu et al. 2022, section 5. All of its numbers depend on private data.

    Args:
        epsilons: Float array [num_examples], from `IndividualAccountant.epsilon`.
        losses: Float array [num_examples], the losses of the same examples.
        groups: Array [num_examples] of ints or strings, the group of each example, for example
            its class.
        held_out_losses: Optional float array [n], losses of examples that were not trained on,
            for the attack. An attack on a private model hardly succeeds, so take the losses of a
            model that was trained without privacy, here and in `losses`, to see differences.
        held_out_groups: Array [n], the groups of these examples.

    Returns:
        Dict with `correlation`, Pearson's correlation of epsilon and loss over all examples (NaN if
        one of them is constant); `group_correlation`, the correlation of the groups' means; and
        `groups`, a list of dicts, sorted by mean loss. The dict of a group has `name`, `count`,
        `mean_epsilon`, `mean_loss`, `correlation` within the group, and `attack_success` (see
        `membership_success`), which is None if it has fewer than two losses or held-out losses.
    """
    reports = []
    for name in np.unique(groups):
        rows = groups == name
        held_out = () if held_out_losses is None else held_out_losses[held_out_groups == name]
        can_attack = min(np.sum(rows), len(held_out)) > 1
        reports.append(
            {
                "name": name.item(),
                "count": int(np.sum(rows)),
                "mean_epsilon": float(np.mean(epsilons[rows])),
                "mean_loss": float(np.mean(losses[rows])),
                "correlation": _correlation(epsilons[rows], losses[rows]),
                "attack_success": membership_success(losses[rows], held_out)
                if can_attack
                else None,
            }
        )
    reports.sort(key=lambda report: report["mean_loss"])
    means = ([report[name] for report in reports] for name in ("mean_epsilon", "mean_loss"))
    return {
        "groups": reports,
        "correlation": _correlation(epsilons, losses),
        "group_correlation": _correlation(*means),
    }


def membership_success(members, others, splits=100, seed=0):
    """Returns the success of an attack that guesses that examples with low losses are members.

    As in Yu et al. 2022, section 5.3, equally many members and other examples are chosen at random.
    The best threshold for one half of them is tested on the other half.

    Args:
        members: Float array [n], n >= 2, losses of examples that were trained on.
        others: Float array [m], m >= 2, losses of examples that were not trained on.
        splits: Int, the number of random choices to average over.
        seed: Int, the seed of the random choices.

    Returns:
        Float in [0, 1], the share of right guesses. Random guessing gives 0.5.
    """
    count = min(len(members), len(others))
    generator, half = np.random.default_rng(seed), count // 2
    successes = []
    for _ in range(splits):
        inside = generator.permutation(members)[:count]
        outside = generator.permutation(others)[:count]
        losses = np.unique([-np.inf, *inside[:half], *outside[:half]])
        taken_right = np.searchsorted(np.sort(inside[:half]), losses, side="right")
        taken_wrong = np.searchsorted(np.sort(outside[:half]), losses, side="right")
        best = np.argmax(taken_right - taken_wrong)
        threshold = losses[best : best + 2].mean()  # Halfway to the next loss.
        right = np.mean(inside[half:] <= threshold) + np.mean(outside[half:] > threshold)
        successes.append(right / 2)
    return float(np.mean(successes))


def _correlation(a, b):
    """Returns Pearson's correlation, or NaN if it is undefined."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
