"""AdaMix, its ablations, and other methods of the paper, by their names in the tables."""

import dataclasses

import numpy as np

from experiments.adamix import measures
from tfdpx import AdaMix
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.heads.adamix import LEAST_CLIP, PublicSet
from tfdpx.train.data import images

# Candidate learning rates. With an adaptive clip gradients are smaller, so its rates are larger.
# The rates are for mean gradients. The noise is added to a sum, so with fewer than _MANY private
# examples the mean is noisier, and `Study.chosen_rate` makes the rates smaller.
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
    """AdaMix without a fit to public examples before its steps.

    The steps start from `initial_weights`, or from zero.
    """

    def _start(self):
        return self._first


class Theorem3(Recording):
    """AdaMix with the decay, step sizes and average of Theorem 3, but no projection to a ball.

    The theorem's proof bounds J by two terms: `dim tau^2 / (rho decay)` for the noise, and `decay /
    2 |w* - w_ref|^2`, where w* is the minimum without privacy. The decay here balances these terms.
    The paper prints another decay, sqrt(rho / (2 |w* - w_ref| dim tau^2)), which falls where the
    balanced decay rises.
    """

    def fit(self, features, labels=None, *, public_data=None):
        """Fits like `AdaMix`, but the decay is computed from the private examples without noise."""
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
    """PPGD, from "Differentially Private Learning with Small Public Data", on full batches.

    First NoisyGD on the private examples starts from zero and clips gradients to the norm of the
    mean public gradient. Then the weights minimize the loss of the public examples, with weight
    decay toward the result of NoisyGD.
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
    """Fits NoisyGD (Algorithm 1) from zero to all examples. Public examples count as private."""
    head = Recording(num_classes, l2_norm_clip=1.0, **arguments)
    return head.fit(*_joined(private, public))


def only_public(num_classes, public, private=None, **arguments):
    """Minimizes the loss of the public examples. Private examples are not read, so epsilon is 0."""
    return _minimum(num_classes, public, **arguments)


def paragon(num_classes, public, private, **arguments):
    """Minimizes the loss of all examples, **without privacy**."""
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


# From a method's name to a pair. First, a function that returns a fitted head; its arguments are
# the number of classes, the public pair of features and labels, the private pair, and arguments of
# the head. Second, the candidate learning rates, or None for methods without private steps.
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
# Methods that start from the public weights in --initial_weights. For example, a text encoder
# computes such weights from the names of the classes.
FROM_WEIGHTS = {
    "names_start": (FirstStart, _ADAPTIVE),
    "names_and_images": (Recording, _ADAPTIVE),
}
FREE = tuple(name for name, (_, rates) in METHODS.items() if rates is None)


@dataclasses.dataclass(frozen=True)
class Study:
    """The data of the study: features of the training images in each domain, and test features.

    Attributes:
        features: Dict from a domain to float32 `[n, d]`, the features of all training images in
            this domain. Private features are always taken from the domain "none".
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
        """Returns two pairs of features and labels: public, and private."""
        public, private = images.public_split(self.labels, shots, seed)
        private = np.random.default_rng([seed, 18]).permutation(private)[: self.most_private]
        return (
            (self.features[shift][public], self.labels[public]),
            (self.features["none"][private], self.labels[private]),
        )

    def chosen_rate(self, method, shots, shift, epsilon):
        """Returns the best learning rate for another random split; None if there is none to choose.

        The rate has the smallest error on a held-out fifth of the private examples. As in the
        paper, epsilon does not cover this choice.
        """
        fit, rates = self.method(method)
        if rates is None or len(rates) == 1:
            return rates and rates[0]
        public, (x, y) = self.sets(shots, _DRAW, shift)
        held, errors = int(_HELD_OUT * len(x)), {}
        # The number of steps at an epsilon grows as sigma^2. Over all steps, noise and gradients
        # then both move a weight farther by the same factor.
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
        """Returns the results of a fit: error, attack, epsilon, and quantiles over examples."""
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
