"""The two phases of appendix A.2 of De et al. 2022: look for a good attack, then count its errors.

Each model gives one score: the logit of the target's own class. It falls as the loss rises, and is
nearer to normal over models.
"""

import dataclasses
import itertools
import math

import numpy as np
import scipy.special
import scipy.stats

from tfdpx import audit

# Part of phase II's models that choose the thresholds, and thresholds that are tested.
_RESERVED = 0.2
_THRESHOLDS = 201


@dataclasses.dataclass(frozen=True)
class Attack:
    """What phase I chooses among.

    Attributes:
        target: One of `problem.TARGETS`.
        learning_rate: Float.
        l2_norm_clip: Float.
    """

    target: str
    learning_rate: float
    l2_norm_clip: float

    def __str__(self):
        return f"{self.target}-lr{self.learning_rate:g}-clip{self.l2_norm_clip:g}"


def attacks(targets, learning_rates, l2_norm_clips):
    """The grid of phase I, a list of `Attack`."""
    return [Attack(*each) for each in itertools.product(targets, learning_rates, l2_norm_clips)]


def true_class_logits(logits, label):
    """`log(p / (1 - p))` of the probability p of class `label`, precise where p is near 1.

    Near to normal over models that were trained alike, as losses are not (Carlini et al. 2022,
    arXiv:2112.03570, section IV.C).

    Args:
        logits: Array of floats [models, classes].
        label: Int.

    Returns:
        float64 [models].
    """
    logits = np.asarray(logits, "float64")
    return logits[:, label] - scipy.special.logsumexp(np.delete(logits, label, 1), axis=1)


def advantage_upper_bound(epsilon, delta):
    """The most that the advantage can be on average, for an (epsilon, delta)-private mechanism.

    It is `(exp(epsilon) - 1 + 2 delta) / (exp(epsilon) + 1)` (Humphries et al. 2020,
    arXiv:2010.12112), the last column of Table 8 of De et al. 2022.

    Args:
        epsilon: Float >= 0.
        delta: Float in (0, 1).

    Returns:
        Float in [0, 1].
    """
    # Divided by exp(epsilon), which overflows.
    small = math.exp(-epsilon)
    return min(1.0, (1 - small + 2 * delta * small) / (1 + small))


def total_variation(first, second):
    """The total variation distance of the normals that fit two arrays of scores, in [0, 1]."""
    laws = [(np.mean(s), max(np.std(s), 1e-12)) for s in (first, second)]
    means, deviations = zip(*laws, strict=True)
    # Where the densities are equal: a quadratic, in the log.
    a, b = (1 / d**2 for d in deviations)
    c = means[0] ** 2 * a - means[1] ** 2 * b + 2 * np.log(deviations[0] / deviations[1])
    roots = np.roots([a - b, 2 * (means[1] * b - means[0] * a), c])
    points = np.sort(roots[np.isreal(roots)].real)
    cdfs = [
        np.diff([0.0, *scipy.stats.norm.cdf(points, mean, deviation), 1.0])
        for mean, deviation in laws
    ]
    return float(np.abs(cdfs[0] - cdfs[1]).sum() / 2)


def measured(with_it, without, delta, confidence, full_batch):
    """What phase II says of the scores of its models: a dict of a row of Table 8.

    A fifth of the models chooses the thresholds, by normals fitted to their scores, and the others
    are counted.

    Args:
        with_it: Array of floats [n], scores of models whose data had the target.
        without: Array of floats [n], of models without it.
        delta: Float.
        confidence: Float, of each lower bound.
        full_batch: Bool, whether each update had all examples, so that training is Gaussian DP.
    """
    reserved = [scores[: int(_RESERVED * len(scores))] for scores in (with_it, without)]
    counted = [scores[int(_RESERVED * len(scores)) :] for scores in (with_it, without)]
    row = {"models": len(counted[0])}
    bounds = {
        "epsilon_lower_bound": audit.epsilon_lower_bound,
        "gdp_epsilon_lower_bound": audit.gdp_epsilon_lower_bound,
    }
    for name, bound in bounds.items():
        threshold = _threshold(reserved, len(counted[0]), bound, delta, confidence)
        missed, false = np.sum(counted[0] <= threshold), np.sum(counted[1] > threshold)
        row[name] = bound(false, len(counted[1]), missed, len(counted[0]), delta, confidence)
        row[name.replace("epsilon_lower_bound", "threshold")] = threshold
    report = audit.membership_report(*counted)
    chosen = best_threshold(*reserved)
    return {
        **row,
        "gdp_is_exact": full_batch,
        "auc": report.auc,
        "advantage": float(np.mean(counted[0] > chosen) - np.mean(counted[1] > chosen)),
        "tpr_at_1%_fpr": report.tpr_at_fpr.get(0.01),
    }


def best_threshold(with_it, without):
    """The threshold that tells two arrays of scores apart best, a float half way to the next."""
    thresholds = np.union1d(with_it, without)
    gains = [np.mean(with_it > each) - np.mean(without > each) for each in thresholds]
    best = int(np.argmax(gains))
    return float(np.mean(thresholds[best : best + 2]))


def passed(row):
    """Whether no bound that holds for the training exceeds the nominal `epsilon` of a row."""
    names = ["epsilon_lower_bound"] + ["gdp_epsilon_lower_bound"] * row["gdp_is_exact"]
    return all(row[name] <= row["epsilon"] for name in names)


def _threshold(reserved, count, bound, delta, confidence):
    """The threshold of the best bound, were the scores of `count` further models normal."""
    laws = [scipy.stats.norm(np.mean(s), max(np.std(s), 1e-12)) for s in reserved]
    both = np.concatenate(reserved)
    tested = np.linspace(both.min(), both.max(), _THRESHOLDS)
    missed, false = laws[0].cdf(tested), laws[1].sf(tested)
    values = [
        bound(round(count * f), count, round(count * m), count, delta, confidence)
        for f, m in zip(false, missed, strict=True)
    ]
    return float(tested[int(np.argmax(values))])
