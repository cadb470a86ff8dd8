"""Searches the hyperparameters of a head, by Optuna or at random and paid for."""

import math

import numpy as np

from tfdpx.accounting import selection
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.spent import Selected
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import head_methods, noisy_score

# Bounds of what each method has. Clips reach the 0.005 of the paper on heads, where the covariance
# is small against the gradients, so that learning rates of dp_fc are too.
_RANGES = {
    "dp_ls": {"alpha": (0.01, 100.0)},
    "dp_newton": {"learning_rate": (0.01, 10.0)},
    "dp_fc": {"learning_rate": (0.001, 100.0)},
    "dp_adam": {"learning_rate": (0.01, 10.0)},
}
_CLIPS = (0.005, 2.0)


def ranges(method):
    """Dict from the arguments that are searched to their bounds, where no preset says them."""
    base = next(name for name in sorted(_RANGES, key=len) if method.startswith(name))
    return {**_RANGES[base], "l2_norm_clip": _CLIPS}


def split(features, labels, draws, share):
    """Training and held-out parts, each a pair of arrays.

    Every example goes to a part by a draw of its own, a hash of what it holds, which no other
    example changes: so a score on one part and a head of the other compose in parallel. How many
    there are in each is public.

    Args:
        features: Float array [n, d].
        labels: Int array [n].
        draws: Float array [n] in [0, 1), of `FeatureFolder.arrays`.
        share: Float in (0, 1), of the held-out part.
    """
    held_out = draws < share
    return (features[~held_out], labels[~held_out]), (features[held_out], labels[held_out])


def by_optuna(method, train, held_out, budget, trials, searched=None):
    """The arguments that Optuna finds best on examples held out.

    No trial is paid for: the guarantee of the head that is then fitted is for that fit alone, as
    in the paper.

    Args:
        method: Name in `head_methods.METHODS`.
        train: Pair of features and labels.
        held_out: Likewise.
        budget: Dict of num_classes, epsilon and delta, and of arguments that are not searched.
        trials: Int.
        searched: Dict from arguments to their bounds, logarithmically; default `ranges(method)`.

    Returns:
        Dict of arguments, and the best accuracy.
    """
    try:
        import optuna
    except ImportError as error:
        raise UserError(
            "Flag --trials needs Optuna, which is not installed: pip install 'tfdpx[search]'."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    searched = ranges(method) if searched is None else searched

    def accuracy(trial):
        chosen = {
            name: trial.suggest_float(name, low, high, log=True)
            for name, (low, high) in searched.items()
        }
        head = head_methods.build(method, **budget, **chosen)
        return head.fit(*train).evaluate(*held_out)["accuracy"]

    study = optuna.create_study(direction="maximize")
    study.optimize(accuracy, n_trials=trials)
    return study.best_params, study.best_value


def privately(method, train, held_out, budget, mean, rng=None, searched=None):
    """The best head of a geometric number of runs, within epsilon all together.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example, of the
    head and of its noisy score (`tfdpx.accounting.selection`). Each run draws its arguments at
    random, whatever the others found. An example is either trained on or held out; the score is
    the number of held-out examples that are right, which one example changes by 1, with noise of
    deviation noise_multiplier / sqrt(releases): so both parts cost the same, and a run no more.

    Args:
        method: As of `by_optuna`.
        train: Pair of features and labels.
        held_out: Likewise.
        budget: As of `by_optuna`.
        mean: Float > 1, mean number of runs.
        rng: Optional `numpy.random.Generator` for the arguments.
        searched: As of `by_optuna`.

    Returns:
        The head, the arguments, the noisy accuracy, and the `Selected` of all runs.
    """
    rng = rng or np.random.default_rng()
    searched = ranges(method) if searched is None else searched
    epsilon = budget["epsilon"]
    releases = head_methods.build(method, **budget).num_releases
    delta = budget["delta"]
    sigma = selection.selection_scale([Entry(1.0, 1.0, releases)], epsilon, delta, mean)
    best = None
    for _ in range(selection.draw_runs(mean)):
        chosen = {name: math.exp(rng.uniform(*np.log(of))) for name, of in searched.items()}
        unbudgeted = {**budget, "epsilon": None}
        head = head_methods.build(method, **unbudgeted, **chosen, noise_multiplier=sigma)
        head.fit(*train)
        right = head.evaluate(*held_out)["accuracy"] * len(held_out[1])
        count = max(1, len(held_out[1]))
        score = noisy_score.noisy_count(right, sigma / math.sqrt(releases)) / count
        if best is None or score > best[2]:
            best = head, chosen, score
    return *best, Selected(Ledger((Entry(sigma, 1.0, releases),)), mean, delta)
