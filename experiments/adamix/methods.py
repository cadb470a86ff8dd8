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


class FirstStart(Recording):
    """AdaMix with steps that start from `initial_weights`, or zero, not the public examples."""

    def _start(self):
        return self._first


class Theorem3(Recording):
    """AdaMix with the decay, the step sizes and the average of Theorem 3, without its ball.

    The decay balances the two terms of the bound on J in the theorem's proof: `dim tau^2 / (rho
    decay)` of the noise, and `decay / 2 |w* - w_ref|^2`. The printed one, sqrt(rho / (2 |w* -
    w_ref| dim tau^2)), falls where this one rises. w* is the minimum without privacy.
    """

    def fit(self, features, labels=None, *, public_data=None):
        """Fits like `AdaMix`; the decay depends on the private examples without noise."""
        start = PublicSet.of(public_data, self.num_classes)
        start = start.minimum(
            self.l2_regularization, np.zeros([features.shape[1], self.num_classes])
        )
        joined = PublicSet.of(_joined((features, labels), public_data), self.num_classes)
        distance = np.linalg.norm(joined.minimum(self.l2_regularization, start) - start)
        rho = self.steps / (2 * self.noise_multiplier**2)
        self._decay = (2 * start.size / rho) ** 0.5 * self.l2_norm_clip / distance
        return super().fit(features, labels, public_data=public_data)

    def _moved(self, kernel, slope, reference, count, step):
        decay = self._decay
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
    "zero_start": (_mixed(FirstStart), _ADAPTIVE),
    "theorem3": (_mixed(Theorem3, l2_norm_clip=1.0), (1.0,)),
    "ngd": (_mixed(l2_norm_clip=1.0), _FIXED),
    "ppgd": (_mixed(PPGD), _ADAPTIVE),
    "fully_private": (fully_private, _FIXED),
    "only_public": (only_public, None),
    "paragon": (paragon, None),
}
# From public weights of --initial_weights, for example of the names of classes.
FROM_WEIGHTS = {
    "names_start": (FirstStart, _ADAPTIVE),
    "names_and_images": (Recording, _ADAPTIVE),
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
        sigma: Float, the noise multiplier.
        initial_weights: Optional array `[d, num_classes]` for the methods of `FROM_WEIGHTS`.
    """

    features: dict
    labels: np.ndarray
    test: tuple
    num_classes: int
    most_private: int | None = None
    sigma: float = 20.0
    initial_weights: np.ndarray | None = None

    def method(self, name):
        """Returns the function of a method and its candidate learning rates."""
        if name in FROM_WEIGHTS:
            kind, rates = FROM_WEIGHTS[name]
            return _mixed(kind, initial_weights=self.initial_weights), rates
        return METHODS[name]

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
        fit, rates = self.method(method)
        if rates is None or len(rates) == 1:
            return rates and rates[0]
        public, (x, y) = self.sets(shots, _DRAW, shift)
        held, errors = int(_HELD_OUT * len(x)), {}
        # With sigma^2 times the steps, both noise and gradients move a weight that much further.
        scale = min(1.0, len(x) / _MANY) * (20.0 / self.sigma) ** 2
        for rate in rates:
            arguments = self._arguments(epsilon, _DRAW, rate * scale)
            head = fit(self.num_classes, public, (x[held:], y[held:]), **arguments)
            errors[rate] = 1 - head.evaluate(x[:held], y[:held])["accuracy"]
        return scale * min(errors, key=errors.get)

    def _arguments(self, epsilon, seed, rate):
        sigma = self.sigma
        return dict(epsilon=epsilon, seed=seed, learning_rate=rate, noise_multiplier=sigma)

    def measured(self, method, shots, shift, epsilon, rate, seed):
        """Returns the results of one fit: error, attack, epsilon, and individual quantiles."""
        public, private = self.sets(shots, seed, shift)
        arguments = {}
        if rate is not None:
            arguments = self._arguments(epsilon, seed, rate)
        head = self.method(method)[0](self.num_classes, public, private, **arguments)
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
