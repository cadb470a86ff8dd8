"""Compares groups of examples in privacy, in loss, and in the success of an attack."""

import numpy as np


def group_report(epsilons, losses, groups, held_out_losses=None, held_out_groups=None):
    """Compares groups of examples in privacy, in loss, and in the success of an attack.

    After Yu et al. 2022, section 5. All of it is a function of private data.

    Args:
        epsilons: Float array [num_examples], of `IndividualAccountant.epsilon`.
        losses: Float array [num_examples], of the same examples.
        groups: Array [num_examples] of ints or strings, for example classes.
        held_out_losses: Optional float array [n] of examples that were not trained on, for the
            attack. Losses of another model than the one of `epsilons` show more: an attack
            against a private one has next to no success.
        held_out_groups: Array [n] of their ids.

    Returns:
        Dict of `correlation` (Pearson's, of epsilon and loss over all examples; NaN where one of
        them is constant), `group_correlation` (of the means of groups) and `groups`: a list of
        dicts, by mean loss, of `name`, `count`, `mean_epsilon`, `mean_loss`, `correlation` within
        the group, and `attack_success` (see `membership_success`; None without two held-out
        losses).
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
    """Returns the success of the attack that takes examples of low loss for members.

    After Yu et al. 2022, section 5.3, with as many members as others. The threshold that is best on
    one half of these is tested on the other half.

    Args:
        members: Float array [n] of losses of examples that were trained on; at least two.
        others: Float array [m] of losses of examples that were not; at least two.
        splits: Int, number of random choices and halves to average over.
        seed: Int, the seed of these.

    Returns:
        Float in [0, 1]; 0.5 is guessing.
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
        threshold = losses[best : best + 2].mean()  # Half way to the next loss.
        right = np.mean(inside[half:] <= threshold) + np.mean(outside[half:] > threshold)
        successes.append(right / 2)
    return float(np.mean(successes))


def _correlation(a, b):
    """Returns Pearson's correlation; NaN where it is undefined."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])
