"""The white-box audit of an optimizer: does its noise hide a canary as well as the account claims?

The adversary sees each noisy gradient, and chooses everything else: a batch that contains only
canaries with a gradient far above the clip (Nasr et al. 2021, arXiv:2101.04535). It measures the
noisy gradient along the direction in which the canaries pull, and compares it to half their pull.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from typing import Any

import keras
import numpy as np
import scipy.stats
import tensorflow as tf

from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx._keras import layer_internals, lora, model_internals, step_context
from tfdpx.account import copy_weights
from tfdpx.accounting.accountants import check_delta
from tfdpx.audit.bounds import check_confidence, epsilon_of_mu, gdp_mu_lower_bound
from tfdpx.per_example.rows import Rows
from tfdpx.sampling.class_weights import ClassWeights, labels_of
from tfdpx.training import replicas
from tfdpx.training.private_optimizer import PrivateOptimizer

# The pull of the canaries in standard deviations of the noise, which gives a few errors.
_PULL = 3.5
_MOST_CANARIES = 512
_FEWEST_TRIALS = 20
# The effect of rounding on norms and on the scale of noise.
_SLACK = 0.01
# The least share of the sum of equal canaries that half precision and its allowance must leave.
_LEAST_SHARE = 0.75
# How much longer than the clip a canary's gradient is: a missing clip shows.
_EXCESS = 1000.0
# The class weight of the canaries, which becomes 1 when divided by the largest.
_CLASS_WEIGHT = 8.0


@dataclasses.dataclass(frozen=True)
class OptimizerReport:
    """The result of `check_optimizer`.

    Attributes:
        epsilon: Float, by the account, of one update on a batch that surely contains the canary.
        epsilon_lower_bound: Float; the true epsilon is at least this, with this confidence.
        delta: Float, of both.
        confidence: Float. A correct optimizer passes with this probability.
        noise_multiplier: Float, the optimizer's.
        noise_multiplier_upper_bound: Float; the effective one is at most this.
        trials: Int, number of updates with the canaries, and as many without.
        canaries: Int, number of canaries in each update.
        problems: Tuple of strings: other differences from the optimizer's description.
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
        """Bool: nothing in the updates contradicts the optimizer's account."""
        return not self.problems and self.noise_multiplier_upper_bound >= self.noise_multiplier

    def __str__(self):
        return "\n- ".join([
            f"{'PASSED' if self.passed else 'FAILED'}: one update has epsilon {self.epsilon:.4g} "
            f"by the account (noise_multiplier={self.noise_multiplier:.4g}, "
            f"delta={self.delta:.3g}); the attack shows at least {self.epsilon_lower_bound:.4g}, "
            f"with {self.confidence:.4%} confidence.\n"
            f"The effective noise multiplier is at most {self.noise_multiplier_upper_bound:.4g} "
            f"({self.trials} updates with {self.canaries} canaries, {self.trials} without).",
            *self.problems,
        ])  # fmt: skip


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
    """Attacks the updates of `optimizer` on `model`, and reports a bound on the privacy they give.

    It takes updates of a copy of both, with fresh noise, on artificial canaries. No data are read,
    and the model, the optimizer, its account and its noise do not change.

    With k canaries a mu-GDP mechanism is k mu-GDP (Dong, Roth, Su 2022, Theorem 2.14), so a lower
    bound on that is k times one on mu, and large noise needs no more updates than small noise.
    Apart from the attack, it checks that the sum of clipped gradients follows Eq. 4
    of De et al. 2022 (arXiv:2204.13650), that padding adds nothing, and that the noise of each
    variable has the right standard deviation, is drawn again each time and is the same on all
    replicas. With one output of classes the canaries have a large class weight, which must not let
    them add more.

    Guarantee: a correct optimizer fails with probability at most `1 - confidence`. Passing proves
    no privacy. The check does not cover the sampling of batches (see `check_sampling`), the effect
    of the loss and the layers on examples (see `tfdpx.checks`), or other outputs of a run. With
    `individual=`, canaries are examples that are charged for the whole clip; smaller clips are not
    covered. For an `AdaptiveClip` it covers the gradients and their noise, but not the leakage of
    the count of examples. Weight decay, weight regularisers, constraints and averages of weights
    read no data, and are left out.

    Args:
        model: A built `keras.Model`, compiled or not; under a strategy of one host.
        optimizer: A tfdpx optimizer, compiled with the model or not.
        x: Optional nest of arrays [rows, ...] like the arrays of a batch, for a model without known
            input shapes; only shapes and dtypes are read.
        delta: Optional float in (0, 1). Defaults to the optimizer's plan's, or 1e-5.
        confidence: Float in (0, 1).
        trials: Int, number of updates with the canaries, and as many without.
        seconds: Float, a limit of time after compilation. If it allows only fewer trials, the lower
            bound is lower.

    Returns:
        `OptimizerReport`, with `epsilon`, `epsilon_lower_bound`, `confidence` and `passed`. Print
        it.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If it adds no noise, if the model cannot be copied or has more than one host, or
            if an argument is out of range.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> optimizer = tfdpx.DPSGD(0.5, batch_size=8, noise_multiplier=2.0)
    >>> tfdpx.audit.check_optimizer(model, optimizer, trials=100).passed
    True
    """
    optimizer = model_internals.innermost(optimizer)
    delta = _checked(model, optimizer, delta, confidence, trials, seconds)
    sigma = optimizer.noise_multiplier
    canaries = Canaries(model, optimizer, min(math.ceil(_PULL * sigma), _MOST_CANARIES), x)
    # Augmentations and dropout make canaries differ.
    alike = optimizer.augment is None and not layer_internals.seed_generators(model)
    pull, problems = _pull(canaries, alike)
    # Half of the probability of a false alarm is for the bound, half for the noise's scale.
    error = (1 - confidence) / 2
    present, absent, squares, spread = _trials(canaries, sigma, pull, trials, seconds)
    count, half = len(present), float(tf.linalg.global_norm(pull)) / 2
    errors = int(np.sum(absent > half)), count, int(np.sum(present <= half)), count
    mu = gdp_mu_lower_bound(*errors, 1 - error) / canaries.count
    if spread > 0:
        problems.append(
            f"Replicas hold different weights after an update, by up to {spread:.3g}: noise must "
            "be drawn once for all."
        )
    # One float32 repeats by chance in 1 of 70 audits of 1,000 updates; but not all at once.
    if len(np.unique(np.column_stack([absent, squares]), axis=0)) < count:
        problems.append("Noise repeats: two updates drew the same, and their difference has none.")
    scale = optimizer.clip_policy.gradient_noise_multiplier
    problems += _scale_problems(canaries.variables, scale, squares, error)
    epsilons = epsilon_of_mu(1 / sigma, delta), epsilon_of_mu(mu, delta)
    most, sizes = 1 / mu if mu else math.inf, (count, canaries.count)
    return OptimizerReport(*epsilons, delta, confidence, sigma, most, *sizes, tuple(problems))


def _checked(model, optimizer, delta, confidence, trials, seconds):
    """Returns the delta to use; raises an error if an audit is impossible."""
    if not isinstance(optimizer, PrivateOptimizer):
        raise TypeError(
            "Argument `optimizer` must be a tfdpx optimizer such as tfdpx.DPSGD. Received: "
            f"optimizer={optimizer!r}"
        )
    sigma = optimizer.noise_multiplier
    text = f"noise_multiplier={sigma:g}"
    require(sigma > 0, "optimizer", text, "add noise: epsilon is infinite without")
    hosts = replicas.hosts(model.distribute_strategy)
    require(hosts == 1, "model", f"a model of {hosts} hosts", "be under a strategy of one host")
    if delta is None:
        delta = optimizer.plan.delta if optimizer.plan is not None else 1e-5
    check_delta(delta)
    check_confidence(confidence)
    check_positive_integer("trials", trials)
    require(is_number(seconds) and seconds > 0, "seconds", seconds, "be a number > 0")
    return delta


def _pull(canaries, alike):
    """Returns the tensors that the canaries add to the sum, and descriptions of its problems.

    Args:
        canaries: `Canaries`.
        alike: Bool, whether all have the same gradient.
    """
    update = canaries.updates(noise_multiplier=0.0)
    nothing = [tf.zeros(v.shape) for v in canaries.variables]
    (pull, *_), (empty, *_) = update(True, nothing), update(False, nothing)
    norm, rest = (float(tf.linalg.global_norm(tensors)) for tensors in (pull, empty))
    problems, count = [], canaries.count
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


def _trials(canaries, sigma, pull, trials, seconds):
    """Runs as many trials as `seconds` allow.

    Returns:
        Arrays of sums along the pull [n], with canaries and without; for those without also the
        squared norms [n, variables]; and the largest difference between replicas, a float.
    """
    norm = tf.linalg.global_norm(pull)
    direction = [tensor / tf.maximum(norm, 1e-12) for tensor in pull]
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
    return np.array(present), np.array(absent), np.array(squares), spread


def _scale_problems(variables, sigma, squares, error):
    """Returns texts on differences of the noise's scale from `sigma`, by chance with `error`."""
    problems, level = [], error / (2 * len(variables))
    for variable, square in zip(variables, squares.sum(0, "float64"), strict=True):
        degrees = math.prod(variable.shape) * len(squares)
        ratio = square / (degrees * sigma**2)
        least = scipy.stats.chi2.ppf(level, degrees) / degrees * (1 - _SLACK) ** 2
        most = scipy.stats.chi2.isf(level, degrees) / degrees * (1 + _SLACK) ** 2
        if not least <= ratio <= most:
            problems.append(
                f"The noise on variable '{variable.path}' has a standard deviation of "
                f"{sigma * math.sqrt(ratio):.4g} times the clip, not {sigma:.4g}."
            )
    return problems


class Canaries:
    """Takes updates of a copy of a model on equal canaries only; the model is only read.

    Each update starts at the same weights, and its result is all that an adversary sees.

    Args:
        model: A built `keras.Model`.
        optimizer: The tfdpx optimizer to audit.
        count: Int, requested canaries; `self.count` is rounded up to a multiple of the replicas.
        x: Optional nest of arrays or tensors [rows, ...]; only shapes and dtypes are read.

    Raises:
        ValueError: If the model cannot be copied, or the canaries have no gradient.
    """

    def __init__(self, model, optimizer, count, x=None):
        self._optimizer, self._strategy = optimizer, model.distribute_strategy
        replicas_in_sync = self._strategy.num_replicas_in_sync
        rows = self._each = -(-count // replicas_in_sync)
        self.count = rows * replicas_in_sync
        specs = _specs(model, x)
        with layer_internals.undisturbed(), self._strategy.scope():
            self._model = _copy(model, specs)
        self.variables = self._model.trainable_variables
        for variable in self.variables:
            variable.regularizer = variable.constraint = None
        self._jit_compile = model.jit_compile and replicas_in_sync == 1
        self._x = Rows(specs).map(lambda t: _values(t, rows, optimizer.augment))
        self._y = self._targets()
        self._class_weight = None
        if tf.is_tensor(self._y) and self._y.shape.rank == 2:
            self._class_weight = ClassWeights({int(labels_of(self._y)[0]): _CLASS_WEIGHT})
        views = optimizer.augmult
        if optimizer.augment is None and views:
            self._x = Rows(self._x).map(lambda t: tf.repeat(t[:, tf.newaxis], views, axis=1))
        self._start = [tf.constant(v.numpy()) for v in self.variables]

    def updates(self, noise_multiplier):
        """Returns a function that takes an update, with separate noise.

        Args:
            noise_multiplier: Float.

        Returns:
            Function of a bool, whether the canaries are present, and a list of tensors, a
            direction. It returns the list of tensors that were added to the sums of each variable,
            in units of the clip; its product with the direction; the squared norm of each; and the
            largest difference between replicas.
        """
        config = self._optimizer.get_config()
        config.update(plan=None, noise_multiplier=noise_multiplier, seed=None, use_ema=False)
        # An example before its first draw is clipped at the whole clip, the largest of all.
        config.pop("individual", None)
        config.update({"weight_decay": 0.0} if config.get("weight_decay") is not None else {})
        with layer_internals.undisturbed(), self._strategy.scope(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`noise_multiplier=0`")
            optimizer = _observed(type(self._optimizer)).from_config(config)
            # Each update also starts at the same clip.
            optimizer.clip_policy.update = lambda measured: None
            if self._class_weight is not None:
                optimizer.weighted_models.add(self._model)
                optimizer.state.class_weights.assign(*self._class_weight.arrays())
            loss = tf.nest.map_structure(lambda _: _linear, self._y)
            self._model.compile(optimizer, loss, jit_compile=self._jit_compile)
        model, strategy, variables = self._model, self._strategy, self.variables

        @tf.function(jit_compile=self._jit_compile, autograph=False)
        def update(present, direction):
            weight = tf.fill([self._each], tf.cast(present, "float32"))
            strategy.run(model.train_step, args=((self._x, self._y, weight),))
            copies = [strategy.experimental_local_results(v.value) for v in variables]
            spread = [tf.reduce_max(tf.abs(c - values[0])) for values in copies for c in values]
            # Subtracted from the weights, like a gradient.
            added = [start - values[0] for start, values in zip(self._start, copies, strict=True)]
            for variable, start in zip(variables, self._start, strict=True):
                variable.assign(start)
            along = [tf.reduce_sum(a * d) for a, d in zip(added, direction, strict=True)]
            squares = [tf.reduce_sum(tf.square(a)) for a in added]
            return added, tf.add_n(along), tf.stack(squares), tf.reduce_max(tf.stack(spread))

        def run(present, direction):
            # With several replicas, a step runs only under a driver that has split the batch.
            several = strategy.num_replicas_in_sync > 1
            with step_context.driving(model, "tfdpx" if several else step_context.driver(model)):
                return update(tf.constant(present), direction)

        return run

    def _targets(self):
        """Returns a nest like the outputs: the loss is their product, which has a long gradient."""
        generator = np.random.default_rng(1)
        one = Rows(self._x).map(lambda t: t[:1])
        with tf.GradientTape() as tape:
            y_pred = model_internals.call_model(self._model, one)
            y = tf.nest.map_structure(
                lambda t: tf.constant(generator.normal(size=t.shape), "float32"), y_pred
            )
            pairs = zip(tf.nest.flatten(y), tf.nest.flatten(y_pred), strict=True)
            loss = tf.add_n([tf.reduce_sum(t * tf.cast(p, "float32")) for t, p in pairs])
        gradients = tape.gradient(loss, [v.value for v in self.variables])
        norm = float(tf.linalg.global_norm([g for g in gradients if g is not None]))
        if not (np.isfinite(norm) and norm > 0):
            raise ValueError(
                f"The canary's gradient has norm {norm} on model '{self._model.name}', so nothing "
                "can be learned from it. Pass another model, or other weights."
            )
        scale = _EXCESS * self._optimizer.l2_norm_clip / norm
        y = tf.nest.map_structure(lambda t: tf.repeat(t * scale, self._each, axis=0), y)
        return tuple(y) if isinstance(y, list) else y


def _observed(private):
    """Returns a subclass of a private optimizer class that adds gradients to the weights unchanged.

    Its methods, and its subclasses' methods, run as usual. Only the step of Keras's optimizer is
    left out, and gradients are added in units of the clip.

    Args:
        private: The class.
    """
    optimizers = (c for c in private.__mro__ if issubclass(c, keras.optimizers.Optimizer))
    base = next(c for c in optimizers if not issubclass(c, PrivateOptimizer))

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.cast(gradient * self.batch_size, variable.dtype))

    # Between the private classes and Keras's, by the method resolution order.
    last = type(f"Last{base.__name__}", (base,), {"update_step": update_step})
    return type(f"Observed{private.__name__}", (private, last), {})


def _linear(y_true, y_pred):
    return tf.reduce_sum(y_true * tf.cast(y_pred, y_true.dtype), list(range(1, y_pred.shape.rank)))


def _specs(model, x):
    """Returns tensors with the shapes and dtypes of the model's inputs: one, or a list."""
    if x is not None:
        specs = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(x)]
    else:
        # An axis of any size gets size 32.
        inputs = getattr(model, "inputs", [])
        specs = [tf.zeros([1, *(size or 32 for size in t.shape[1:])], t.dtype) for t in inputs]
    if not specs or not model.built:
        raise ValueError(
            f"The shapes of the inputs of model '{model.name}' are not known. Build the model, and "
            "pass `x`, a batch like those of its training; only its shapes and dtypes are read."
        )
    return _one_or_list(specs)


def _one_or_list(values):
    return values[0] if len(values) == 1 else list(values)


def _values(tensor, rows, blank):
    """Returns equal examples like the rows of `tensor`; `blank` ones look the same in all views."""
    shape, dtype = [1, *tensor.shape[1:]], tensor.dtype
    if dtype.is_floating and not blank:
        example = tf.constant(np.random.default_rng(0).normal(size=shape), dtype)
    else:
        example = tf.fill(shape, "a") if dtype == tf.string else tf.cast(tf.ones(shape), dtype)
    return tf.repeat(example, rows, axis=0)


def _copy(model, specs):
    """Returns a model like `model`, with separate weights of the same values."""
    try:
        if getattr(model, "inputs", None):
            # Without the compile arguments: Keras would copy them too.
            bare = keras.Model(_one_or_list(model.inputs), _one_or_list(model.outputs))
            twin = keras.models.clone_model(bare)
        else:
            bare, twin = model, type(model).from_config(model.get_config())
            twin(specs)
        lora.enable_as(bare, twin)
        copy_weights(bare, twin)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ValueError(
            f"Model '{model.name}' (of type {type(model).__name__}) cannot be copied, and an audit "
            "must not change its weights. Build it, and give it (and its layers) a `get_config` "
            f"from which the class can make it again. Keras said: {error}"
        ) from error
    return twin
