"""The white-box audit of an optimizer: does its noise hide a canary as well as the account says?

The adversary sees each noisy gradient, and chooses everything else: a batch that is empty but for
canaries whose gradient is far above the clip (Nasr et al. 2021, arXiv:2101.04535). It looks at the
noisy gradient along the direction in which the canaries pull, and compares it to half their pull.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import keras
import numpy as np
import scipy.stats
import tensorflow as tf

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx._keras import layer_internals, model_internals
from tfdpx.accounting.accountants import check_delta
from tfdpx.audit.canaries import Canaries
from tfdpx.audit.lower_bound import check_confidence, epsilon_of_mu, gdp_mu_lower_bound
from tfdpx.training import replicas
from tfdpx.training.private_optimizer import PrivateOptimizer

# Standard deviations of the noise that the canaries pull: few errors, and yet some.
_PULL = 3.5
_MOST_CANARIES = 512
_FEWEST_TRIALS = 20
# What rounding may do to norms and to the scale of noise.
_SLACK = 0.01
# Of what equal canaries add, whatever half precision and its allowance take away.
_LEAST_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class OptimizerReport:
    """What `check_optimizer` found.

    Attributes:
        epsilon: Float, of one update on a batch that the canary is in for sure, by the account.
        epsilon_lower_bound: Float; the true epsilon is at least that, with this confidence.
        delta: Float, of both.
        confidence: Float. An optimizer that keeps its word passes with this probability.
        noise_multiplier: Float, the optimizer's.
        noise_multiplier_upper_bound: Float; the effective one is at most that.
        trials: Int, updates with the canaries, and as many without.
        canaries: Int, in each update.
        problems: Tuple of strings, what else is not as the optimizer says.
    """

    epsilon: float
    epsilon_lower_bound: float
    delta: float
    confidence: float
    noise_multiplier: float
    noise_multiplier_upper_bound: float
    trials: int
    canaries: int
    problems: tuple[str, ...] = ()

    @property
    def passed(self):
        """Bool: nothing found contradicts the optimizer's account."""
        hidden = self.noise_multiplier_upper_bound >= self.noise_multiplier
        return hidden and not self.problems

    def __str__(self):
        lines = [
            f"{'PASSED' if self.passed else 'FAILED'}: one update has epsilon {self.epsilon:.4g} "
            f"by the account (noise_multiplier={self.noise_multiplier:.4g}, "
            f"delta={self.delta:.3g}); the attack shows at least {self.epsilon_lower_bound:.4g}, "
            f"with {self.confidence:.4%} confidence.",
            f"The effective noise multiplier is at most {self.noise_multiplier_upper_bound:.4g} "
            f"({self.trials} updates with {self.canaries} canaries, {self.trials} without).",
        ]
        return "\n".join([*lines, *(f"- {problem}" for problem in self.problems)])


def check_optimizer(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    *,
    x: Any = None,
    delta: float | None = None,
    confidence: float = 0.999,
    trials: int = 1000,
    seconds: float = 40.0,
) -> OptimizerReport:
    """Attacks the updates of `optimizer` on `model`, and says what they hide at most.

    Takes updates of a copy of both, with fresh noise, on made-up canaries. No data is read, and
    the model, the optimizer, its account and its noise stay as they are.

    With k canaries a mu-GDP mechanism is k mu-GDP (Dong, Roth, Su 2022, Theorem 2.14), so a lower
    bound on that is k times one on mu: large noise needs no more updates than small noise. Besides
    the bound, which is an attack's, it is looked whether the sum of clipped gradients is that of
    Eq. 4 of De et al. 2022 (arXiv:2204.13650), padding adds nothing, the noise of each variable has
    the standard deviation that is said, is drawn anew each time and is the same on all replicas.

    Guarantee: an optimizer that does what it says fails with probability at most
    `1 - confidence`. That it passes proves no privacy. How batches are sampled, what the loss and
    the layers do to examples, and what else a run shows are not looked at. `check_sampling` looks
    at the first, `tfdpx.checks` at the second. With `individual=`, canaries are examples that the whole
    clip is accounted for; smaller clips are not looked at. Of an `AdaptiveClip` the gradients and
    their noise are looked at, and not what the count of examples reveals. With `public_data=`, two
    made-up public examples take the place of the real ones, and set the clip. Weight decay, weight
    regularisers, constraints and averages of weights read no data, and are left out.

    Args:
        model: A built `keras.Model`, compiled or not; under a strategy of one host.
        optimizer: A tfdpx optimizer, compiled with the model or not.
        x: Optional nest of arrays [rows, ...] like those of a batch, for a model that does not know
            the shapes of its inputs; only shapes and dtypes are read.
        delta: Optional float in (0, 1); by default the optimizer's plan's, or 1e-5.
        confidence: Float in (0, 1).
        trials: Int, updates with the canaries, and as many without.
        seconds: Float; fewer trials are made where they would take longer, after compilation. The
            lower bound is then lower.

    Returns:
        `OptimizerReport`, with `epsilon`, `epsilon_lower_bound`, `confidence` and `passed`. Print
        it.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If it adds no noise, if the model cannot be copied or has more than one host, or
            if an argument is out of its range.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> optimizer = tfdpx.DPSGD(0.5, batch_size=8, noise_multiplier=2.0)
    >>> tfdpx.audit.check_optimizer(model, optimizer, trials=100).passed
    True
    """
    optimizer = model_internals.innermost(optimizer)
    delta = _checked(model, optimizer, delta, confidence, trials, seconds)
    sigma = optimizer.noise_multiplier
    wanted = min(max(1, math.ceil(_PULL * sigma)), _MOST_CANARIES)
    canaries = Canaries(model, optimizer, wanted, x)
    # Augmentations and dropout make canaries unlike.
    alike = optimizer.augment is None and not layer_internals.seed_generators(model)
    pull, problems = _pull(canaries, alike)
    # Half of what may go wrong by chance is for the bound, half for the noise's scale.
    confidence_of_each = 1 - (1 - confidence) / 2
    counts = _trials(canaries, sigma, pull, trials, seconds)
    count, half = len(counts.present), float(tf.linalg.global_norm(pull)) / 2
    false_positives = int(np.sum(counts.absent > half))
    false_negatives = int(np.sum(counts.present <= half))
    mu = (
        gdp_mu_lower_bound(false_positives, count, false_negatives, count, confidence_of_each)
        / canaries.count
    )
    of_gradients = optimizer.clip_policy.noise_of_gradients(sigma)
    problems += _noise_problems(canaries, of_gradients, counts, 1 - confidence_of_each)
    return OptimizerReport(
        epsilon=epsilon_of_mu(1 / sigma, delta),
        epsilon_lower_bound=epsilon_of_mu(mu, delta),
        delta=delta,
        confidence=confidence,
        noise_multiplier=sigma,
        noise_multiplier_upper_bound=1 / mu if mu else math.inf,
        trials=count,
        canaries=canaries.count,
        problems=tuple(problems),
    )


def _checked(model, optimizer, delta, confidence, trials, seconds):
    """The delta to use; raises for what cannot be audited."""
    if not isinstance(optimizer, PrivateOptimizer):
        raise TypeError(
            "Argument `optimizer` must be a tfdpx optimizer such as tfdpx.DPSGD. Received: "
            f"optimizer={optimizer!r}"
        )
    if not optimizer.noise_multiplier:
        raise ValueError(
            "This optimizer has noise_multiplier=0: its epsilon is infinite, and there is nothing "
            "to audit."
        )
    if replicas.hosts(model.distribute_strategy) > 1:
        raise ValueError(
            "`check_optimizer` runs on one host. Received a model under a strategy of "
            f"{replicas.hosts(model.distribute_strategy)}. Build the model without it."
        )
    if delta is None:
        delta = optimizer.plan.delta if optimizer.plan is not None else 1e-5
    check_delta(delta)
    check_confidence(confidence)
    check_positive_integer("trials", trials)
    require(is_number(seconds) and seconds > 0, "seconds", seconds, "be a number > 0")
    return delta


def _pull(canaries, alike):
    """What the canaries add to the sum, a list of tensors, and what is wrong with it.

    Args:
        canaries: `Canaries`.
        alike: Bool, whether each has the same gradient.
    """
    update = canaries.updates(noise_multiplier=0.0)
    nothing = [tf.zeros(v) for v in canaries.shapes()]
    pull, *_ = update(True, nothing)
    empty, *_ = update(False, nothing)
    problems, count = [], canaries.count
    norm, rest = (float(tf.linalg.global_norm(each)) for each in (pull, empty))
    if rest > _SLACK:
        problems.append(
            f"Padding counts: examples of sample weight zero add {rest:.4g} times the clip to the "
            "sum without noise."
        )
    if norm > count * (1 + _SLACK):
        problems.append(
            f"Clipping does not bound an example: {count} canaries add {norm:.4g} times the clip "
            "to the sum without noise."
        )
    if alike and norm < count * _LEAST_SHARE:
        problems.append(
            f"The sum is not a sum of clipped examples: {count} equal canaries, each longer than "
            f"the clip, add {norm:.4g} times the clip without noise. The batch may be clipped as "
            "a whole, which bounds no example's part."
        )
    return pull, problems


@dataclasses.dataclass(frozen=True)
class _Found:
    """Of all trials: sums along the pull [n], with canaries and without.

    And, without them, the squared norms [n, variables]; the largest difference between replicas.
    """

    present: np.ndarray
    absent: np.ndarray
    squares: np.ndarray
    spread: float


def _trials(canaries, sigma, pull, trials, seconds):
    """`_Found` in as many trials as `seconds` allow."""
    norm = tf.linalg.global_norm(pull)
    direction = [each / tf.maximum(norm, 1e-12) for each in pull]
    update = canaries.updates(sigma)
    update(True, direction)  # Compiles.
    present, absent, squares, spread = [], [], [], 0.0
    end = time.monotonic() + seconds
    while len(present) < trials and (time.monotonic() < end or len(present) < _FEWEST_TRIALS):
        _, along, _, differs = update(True, direction)
        present.append(float(along))
        spread = max(spread, float(differs))
        _, along, square, _ = update(False, direction)
        absent.append(float(along))
        squares.append(square.numpy())
    return _Found(np.array(present), np.array(absent), np.array(squares), spread)


def _noise_problems(canaries, sigma, found, error):
    """Texts of how the noise differs from N(0, sigma^2), with probability `error` by chance."""
    problems = []
    if found.spread > 0:
        problems.append(
            f"Replicas hold different weights after an update, by up to {found.spread:.3g}: noise "
            "must be drawn once for all."
        )
    # One float32 repeats by chance in 1 of 70 audits of 1,000 updates; not all of them at once.
    drawn = np.column_stack([found.absent, found.squares])
    if len(np.unique(drawn, axis=0)) < len(drawn):
        problems.append("Noise repeats: two updates drew the same, and their difference has none.")
    level = error / (2 * len(canaries.names()))
    for name, size, square in zip(
        canaries.names(), canaries.sizes(), found.squares.sum(0, "float64"), strict=True
    ):
        degrees = size * len(found.squares)
        ratio = square / (degrees * sigma**2)
        least = scipy.stats.chi2.ppf(level, degrees) / degrees * (1 - _SLACK) ** 2
        most = scipy.stats.chi2.isf(level, degrees) / degrees * (1 + _SLACK) ** 2
        if not least <= ratio <= most:
            problems.append(
                f"The noise on variable '{name}' has a standard deviation of "
                f"{sigma * math.sqrt(ratio):.4g} times the clip, not {sigma:.4g}."
            )
    return problems
