"""AdaMix, its ablations and the methods that the paper compares it with, by their table names."""

import dataclasses

import numpy as np

from experiments.adamix import measures
from tfdpx import AdaMix
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.heads.adamix import LEAST_CLIP, PublicSet
from tfdpx.train.data import images

# Candidate learning rates: those for an adaptive clip suit smaller gradients. They are for means,
# but the noise is added to a sum, so fewer private examples than _MANY need smaller rates.
_MANY = 1_000
_ADAPTIVE, _FIXED = (8.0, 24.0, 72.0), (1.5, 5.0, 15.0)
_HELD_OUT, _DRAW = 0.2, 1_000


class Recording(AdaMix):
    """`AdaMix` that stores the `measures.Step`s of its last fit in `kept`."""

    def _fit(self, examples, released):
        self.kept = []
        return super()._fit(examples, released)

    def _clip_and_subspace(self, kernel):
        clip_and_subspace = super()._clip_and_subspace(kernel)
        self.kept.append(measures.Step(kernel, *clip_and_subspace))
        return clip_and_subspace


class ZeroStart(Recording):
    """AdaMix with steps that start from zero instead of the public examples."""

    def _start(self):
        return self._first


class Theorem3(Recording):
    """AdaMix with the step sizes and the average of Theorem 3, and decay toward the start."""

    def _moved(self, kernel, slope, reference, count, step):
        decay = self.l2_regularization
        return kernel - 2 / (decay * (step + 1)) * (slope + decay * (kernel - reference))

    def _fit(self, examples, released):
        _, bias = super()._fit(examples, released)
        total = sum(step * release.kernel for step, release in enumerate(self.kept, 1))
        return 2 * total / (self.steps * (self.steps + 1)), bias


class PPGD(Recording):
    """PPGD, of "Differentially Private Learning with Small Public Data", on full batches.

    NoisyGD from zero on the private examples, clipped to the norm of the mean public gradient. Then
    it takes the minimum over the public examples, with decay toward the result.
    """

    def _clip(self, kernel):
        gradient = self._clipping.gradient(kernel)
        return max(LEAST_CLIP, float(np.linalg.norm(gradient)) / len(self._clipping))

    def _fit(self, examples, released):
        public = self._clipping = self._public
        self._public = PublicSet(public.x[:0], public.y[:0])
        kernel, bias = super()._fit(examples, released)
        return public.minimum(self.l2_regularization, kernel), bias


def fully_private(num_classes, public, private, **arguments):
    """NoisyGD (Algorithm 1) from zero on all examples, with the public ones treated as private."""
    head = Recording(num_classes, l2_norm_clip=1.0, **arguments)
    return head.fit(*_joined(private, public))


def only_public(num_classes, public, private=None, **arguments):
    """The minimum over the public examples; private ones are not read, and spend nothing."""
    return _minimum(num_classes, public, **arguments)


def paragon(num_classes, public, private, **arguments):
    """The minimum over all examples, **without privacy**."""
    head = _minimum(num_classes, _joined(private, public), **arguments)
    head.ledger = Ledger((Entry(0.0, 1.0, 1),))
    return head


def _mixed(kind=Recording, **fixed):
    def fit(num_classes, public, private, **arguments):
        return kind(num_classes, **fixed, **arguments).fit(*private, public_data=public)

    return fit


def _minimum(num_classes, data, l2_regularization=0.1):
    x, y = data
    head = Recording(num_classes, steps=1, l2_regularization=l2_regularization)
    zeros = np.zeros([x.shape[1], num_classes])
    head.kernel = np.float32(PublicSet.of((x, y), num_classes).minimum(l2_regularization, zeros))
    head.bias = np.zeros(num_classes, "float32")
    return head


def _joined(first, second):
    return tuple(np.concatenate(parts) for parts in zip(first, second, strict=True))


# From a name to a function of a number of classes, public and private pairs and arguments to a
# fitted head; and the candidate learning rates, None without private steps.
METHODS = {
    "adamix": (_mixed(), _ADAPTIVE),
    "adamix_projected": (_mixed(projection=9), (24.0, 72.0, 216.0)),
    "zero_start": (_mixed(ZeroStart), _ADAPTIVE),
    "ngd": (_mixed(l2_norm_clip=1.0), _FIXED),
    "ppgd": (_mixed(PPGD), _ADAPTIVE),
    "fully_private": (fully_private, _FIXED),
    "only_public": (only_public, None),
    "paragon": (paragon, None),
}
FREE = tuple(name for name, (_, rates) in METHODS.items() if rates is None)


@dataclasses.dataclass(frozen=True)
class Study:
    """Features of a training set, by domain, and of a test set.

    Attributes:
        features: Dict from a domain to float32 `[n, d]`; the private ones are of "none".
        labels: Integers `[n]`.
        test: Pair of features and labels.
        num_classes: Int.
        most_private: Optional int, the largest number of private examples that are used.
    """

    features: dict
    labels: np.ndarray
    test: tuple
    num_classes: int
    most_private: int | None = None

    def sets(self, shots, seed, shift="none"):
        """Returns public and private pairs of features and labels."""
        public, private = images.public_split(self.labels, shots, seed)
        private = np.random.default_rng([seed, 18]).permutation(private)[: self.most_private]
        return (
            (self.features[shift][public], self.labels[public]),
            (self.features["none"][private], self.labels[private]),
        )

    def chosen_rate(self, method, shots, shift, epsilon):
        """Returns the learning rate with the least error on a fifth of another private draw.

        As in the paper, epsilon does not cover that choice. None if there is none to choose.
        """
        fit, rates = METHODS[method]
        if rates is None:
            return None
        public, (x, y) = self.sets(shots, _DRAW, shift)
        held, scale, errors = int(_HELD_OUT * len(x)), min(1.0, len(x) / _MANY), {}
        for rate in rates:
            arguments = dict(epsilon=epsilon, seed=_DRAW, learning_rate=rate * scale)
            head = fit(self.num_classes, public, (x[held:], y[held:]), **arguments)
            errors[rate] = 1 - head.evaluate(x[:held], y[:held])["accuracy"]
        return scale * min(errors, key=errors.get)

    def measured(self, method, shots, shift, epsilon, rate, seed):
        """Returns the results of one fit: error, attack, epsilon, and individual quantiles."""
        public, private = self.sets(shots, seed, shift)
        arguments = {}
        if rate is not None:
            arguments = dict(epsilon=epsilon, seed=seed, learning_rate=rate)
        head = METHODS[method][0](self.num_classes, public, private, **arguments)
        measured = {
            "error": 1 - head.evaluate(*self.test)["accuracy"],
            "auc": measures.membership_auc(
                measures.losses(head, *private), measures.losses(head, *self.test)
            ),
            "spent": head.epsilon_spent(),
        }
        if rate is not None:
            individual = measures.individual_epsilons(head, *private)
            measured["individual"] = np.quantile(individual, np.linspace(0, 1, 201)).tolist()
        return measured
