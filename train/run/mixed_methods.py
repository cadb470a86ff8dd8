"""AdaMix, its ablations and baselines by the names of tables, and how rates are chosen."""

import dataclasses

import numpy as np

import tfdpx
from tfdpx.heads.membership_auc import membership_auc
from tfdpx.train.data import public_split

# Learning rates to choose from: those of an adaptive clip are against smaller gradients. They are
# against means, and the noise is that of a sum: fewer private examples than _MANY take less.
_MANY = 1_000
_ADAPTIVE, _FIXED = (8.0, 24.0, 72.0), (1.5, 5.0, 15.0)
METHODS = {
    "adamix": (tfdpx.AdaMix, {}, _ADAPTIVE),
    "adamix_projected": (tfdpx.AdaMix, {"projection": 10}, (24.0, 72.0, 216.0)),
    "zero_start": (tfdpx.AdaMix, {"start": "initial"}, _ADAPTIVE),
    "ngd": (tfdpx.AdaMix.ngd, {}, _FIXED),
    "ppgd": (tfdpx.AdaMix.ppgd, {}, _ADAPTIVE),
    "fully_private": (tfdpx.AdaMix.fully_private, {}, _FIXED),
    "only_public": (tfdpx.AdaMix.only_public, {}, None),
    "paragon": (tfdpx.AdaMix.paragon, {}, None),
}
_HELD_OUT, _DRAW = 0.2, 1_000


@dataclasses.dataclass(frozen=True)
class Study:
    """Features of a training set, by domain, and of a test set.

    Attributes:
        features: Dict from a shift of `public_split.SHIFTS` to float32 `[n, d]`.
        labels: Integers `[n]`.
        test: Pair of features and labels.
        num_classes: Int.
        most_private: Optional int: so many private examples are used at most.
    """

    features: dict
    labels: np.ndarray
    test: tuple
    num_classes: int
    most_private: int | None = None

    def sets(self, shots, seed, shift="none"):
        """Public and private pairs of features and labels."""
        public, private = public_split.split(self.labels, shots, seed)
        private = np.random.default_rng([seed, 18]).permutation(private)[: self.most_private]
        return (
            (self.features[shift][public], self.labels[public]),
            (self.features["none"][private], self.labels[private]),
        )


def build(method, num_classes, epsilon, delta, noise_multiplier, **kwargs):
    """The `tfdpx.AdaMix` that a name means.

    Args:
        method: One of `METHODS`.
        num_classes: Int.
        epsilon: Float; not used by "only_public" and "paragon".
        delta: Float.
        noise_multiplier: Float.
        **kwargs: Other arguments.
    """
    make, own, rates = METHODS[method]
    if rates is None:
        return make(num_classes, **own, **kwargs)
    return make(num_classes, epsilon, delta, noise_multiplier=noise_multiplier, **{**own, **kwargs})


def chosen_rate(study, method, shots, shift, budget):
    """The learning rate of the least error on a fifth of the private examples of another draw.

    As in the paper, epsilon does not cover that choice.

    Args:
        study: `Study`.
        method: One of `METHODS`.
        shots: Int, public examples of each class.
        shift: One of `public_split.SHIFTS`.
        budget: Tuple of epsilon, delta and noise multiplier.
    """
    rates = METHODS[method][2]
    if rates is None:
        return None
    public, (x, y) = study.sets(shots, _DRAW, shift)
    held, scale, errors = int(_HELD_OUT * len(x)), min(1.0, len(x) / _MANY), {}
    for rate in rates:
        head = build(method, study.num_classes, *budget, seed=_DRAW, learning_rate=rate * scale)
        head.fit(x[held:], y[held:], public_data=public)
        errors[rate] = 1 - head.evaluate(x[:held], y[:held])["accuracy"]
    return scale * min(errors, key=errors.get)


def measured(study, method, shots, shift, budget, rate, seed):
    """One fit: a dict of its error and what an attacker has of it, and the fitted head.

    Args:
        study: `Study`.
        method: One of `METHODS`.
        shots: Int.
        shift: One of `public_split.SHIFTS`.
        budget: Tuple of epsilon, delta and noise multiplier.
        rate: Float, or None.
        seed: Int, of the split and of the noise.
    """
    public, private = study.sets(shots, seed, shift)
    kwargs = {} if rate is None else {"learning_rate": rate, "keep_steps": True}
    head = build(method, study.num_classes, *budget, seed=seed, **kwargs)
    head.fit(*private, public_data=public)
    found = {
        "error": 1 - head.evaluate(*study.test)["accuracy"],
        "auc": membership_auc(head.losses(*private), head.losses(*study.test)),
        "steps": head.steps,
        "spent": head.epsilon_spent(),
    }
    return found, head
