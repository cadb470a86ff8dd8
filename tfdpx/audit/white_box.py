"""The white-box audit of an optimizer tests whether its noise hides examples as the ledger claims.

The attacker sees each noisy gradient, and chooses everything else. The batches consist only of
canaries: artificial examples with equal gradients, which are much longer than the clip (Nasr et al.
2021, arXiv:2101.04535). Without noise, the clipped gradients of the canaries add up to a vector,
called the pull. To guess whether the canaries were in the batch, the attacker projects the noisy
gradient onto the direction of the pull, and compares the result with half of the length of the
pull.
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

# The length of the pull, in standard deviations of the noise. With this length, errors are rare.
_PULL = 3.5
_MOST_CANARIES = 512
_FEWEST_TRIALS = 20
# The largest relative effect of rounding on norms and on the scale of the noise.
_SLACK = 0.01
# Half precision shortens clipped gradients. The pull must have at least this share of the length
# that equal canaries would have without rounding.
_LEAST_SHARE = 0.75
# The gradient of a canary is longer than the clip by this factor, which reveals missing clipping.
_EXCESS = 1000.0
# The class weight of the canaries. It becomes 1 when it is divided by the largest weight.
_CLASS_WEIGHT = 8.0


@dataclasses.dataclass(frozen=True)
class OptimizerReport:
    """The result of `check_optimizer`.

    Attributes:
        epsilon: Float, the epsilon of one update, computed by the accountant. Random sampling does
            not reduce it, because the attacker chooses the batches.
        epsilon_lower_bound: Float. With the given confidence, the true epsilon is at least this.
        delta: Float, the delta of both epsilons.
        confidence: Float. A correct optimizer passes with at least this probability.
        noise_multiplier: Float, the argument of the optimizer.
        noise_multiplier_upper_bound: Float. With the given confidence, the effective noise
            multiplier is at most this.
        trials: Int, the number of updates with canaries, and also the number of updates without
            them.
        canaries: Int, the number of canaries in each update.
        problems: Tuple of strings, other faults that were found.
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
        """Bool: whether the updates agree with the optimizer's noise and have no other faults."""
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
    """Attacks the updates of an optimizer, and reports a lower bound on the updates' epsilon.

    The function copies the model and the optimizer and runs updates of the copies, with fresh
    noise, on canaries. No data are read. The user's model, optimizer and ledger do not change.

    With k canaries in a batch, a mu-GDP mechanism is k mu-GDP (Dong, Roth, Su 2022, Theorem 2.14).
    So the attack gives a lower bound on k mu, which is divided by k. For larger noise there are
    more canaries, so the number of updates need not grow.

    In addition to the attack, the function checks that the sum of clipped gradients follows Eq. 4
    of De et al. 2022 (arXiv:2204.13650), and that padding adds nothing to it. It checks that the
    noise of each variable has the right standard deviation, is different in each update, and is the
    same on all replicas. If the model has a single output of classes, the canaries get a large
    class weight, which must not increase their contribution to the sum.

    Guarantee: a correct optimizer fails with probability at most `1 - confidence`. Passing does not
    prove privacy. The check does not cover how batches are sampled (see `check_sampling`), whether
    the loss and the layers keep examples independent (see `tfdpx.checks`), or other outputs of a
    run. With `individual=`, it covers only examples with the clip `l2_norm_clip`, not those with a
    smaller clip. With an `AdaptiveClip`, it covers the gradients and their noise, but not the
    released count of examples. Weight decay, weight regularisers, constraints and averages of
    weights read no data, and are not checked.

    Args:
        model: A built `keras.Model`, compiled or not. Its distribution strategy must have one host.
        optimizer: An optimizer of tfdpx, compiled with the model or not.
        x: Optional array [rows, ...], or a nested structure of arrays, like a batch. It is needed
            for a model without known input shapes. Only shapes and dtypes are read.
        delta: Optional float in (0, 1). Defaults to the delta of the optimizer's plan, or 1e-5.
        confidence: Float in (0, 1).
        trials: Int, the number of updates with canaries, and also the number of updates without
            them.
        seconds: Float, the time limit in seconds, without compilation. If it allows fewer trials,
            the lower bound is lower.

    Returns:
        `OptimizerReport`, with `epsilon`, `epsilon_lower_bound`, `confidence` and `passed`. Print
        it to read the result.

    Raises:
        TypeError: If `optimizer` is not a tfdpx optimizer.
        ValueError: If the optimizer adds no noise, the model cannot be copied or is on more than
            one host, or an argument is out of range.

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
    # Canaries have equal gradients unless there are augmentations or random layers.
    alike = optimizer.augment is None and not layer_internals.seed_generators(model)
    pull, problems = _pull(canaries, alike)
    # The allowed probability of a false alarm, one for the bound and one for the noise's scale.
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
    # In 1 of 70 audits with 1,000 updates, a single float32 is equal in two updates by chance. So
    # several numbers of an update are compared together.
    if len(np.unique(np.column_stack([absent, squares]), axis=0)) < count:
        problems.append("Noise repeats: two updates drew the same, and their difference has none.")
    scale = optimizer.clip_policy.gradient_noise_multiplier
    problems += _scale_problems(canaries.variables, scale, squares, error)
    epsilons = epsilon_of_mu(1 / sigma, delta), epsilon_of_mu(mu, delta)
    most, sizes = 1 / mu if mu else math.inf, (count, canaries.count)
    return OptimizerReport(*epsilons, delta, confidence, sigma, most, *sizes, tuple(problems))


def _checked(model, optimizer, delta, confidence, trials, seconds):
    """Checks the arguments of `check_optimizer`, and returns the delta to use."""
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
    """Returns the sum of the canaries' clipped gradients without noise, and faults of this sum.

    Args:
        canaries: `Canaries`.
        alike: Bool, whether all canaries have the same gradient.

    Returns:
        Two values: the sum, a list of tensors in units of the clip; and the faults, a list of
        strings.
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
    """Runs updates with and without canaries, as many as `seconds` allow.

    Args:
        canaries: `Canaries`.
        sigma: Float, the noise multiplier.
        pull: List of tensors, as `_pull` returns them.
        trials: Int, the largest number n of updates of each kind.
        seconds: Float, the time limit.

    Returns:
        Four values: two float arrays [n], the projections of the noisy sums onto the direction of
        the pull, with canaries and without; a float array [n, variables], the squared norms of the
        sums without canaries; and a float, the largest difference between replicas.
    """
    norm = tf.linalg.global_norm(pull)
    direction = [tensor / tf.maximum(norm, 1e-12) for tensor in pull]
    update = canaries.updates(sigma)
    update(True, direction)  # The first call compiles the update.
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
    """Returns faults of the noise's standard deviation, a list of strings.

    Args:
        variables: List of `keras.Variable`.
        sigma: Float, the right standard deviation in units of the clip.
        squares: Float array [n, variables], the squared norms of the noise in n updates.
        error: Float, the probability that correct noise is reported as a fault by chance.
    """
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
    """Runs updates of a copy of a model on batches of equal canaries.

    Each update starts at the same weights, so the attacker sees only the gradient of this update.

    Args:
        model: A built `keras.Model`, which is not changed.
        optimizer: The optimizer of tfdpx to audit.
        count: Int, the number of canaries. `self.count` is rounded up to a multiple of the number
            of replicas.
        x: As for `check_optimizer`.

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
        """Returns a function that runs one update with new noise.

        Args:
            noise_multiplier: Float, the noise multiplier of the updates.

        Returns:
            Function with two arguments: a bool, which tells whether the canaries are present, and a
            direction, a list of tensors. It returns four values: the noisy sum of clipped
            gradients, a list of tensors in units of the clip; the inner product of this sum with
            the direction; the squared norm for each variable; and the largest difference between
            replicas.
        """
        config = self._optimizer.get_config()
        config.update(plan=None, noise_multiplier=noise_multiplier, seed=None, use_ema=False)
        # Without individual accounting, each example is clipped to the whole clip. With individual
        # accounting, the whole clip is the largest one, so it is the case to audit.
        config.pop("individual", None)
        config.update({"weight_decay": 0.0} if config.get("weight_decay") is not None else {})
        with layer_internals.undisturbed(), self._strategy.scope(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`noise_multiplier=0`")
            optimizer = _observed(type(self._optimizer)).from_config(config)
            # An adaptive clip stays at its first value in all updates.
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
            # The update has subtracted the noisy sum from the weights.
            added = [start - values[0] for start, values in zip(self._start, copies, strict=True)]
            for variable, start in zip(variables, self._start, strict=True):
                variable.assign(start)
            along = [tf.reduce_sum(a * d) for a, d in zip(added, direction, strict=True)]
            squares = [tf.reduce_sum(tf.square(a)) for a in added]
            return added, tf.add_n(along), tf.stack(squares), tf.reduce_max(tf.stack(spread))

        def run(present, direction):
            # With several replicas, the step must know that the batch is already split.
            several = strategy.num_replicas_in_sync > 1
            with step_context.driving(model, "tfdpx" if several else step_context.driver(model)):
                return update(tf.constant(present), direction)

        return run

    def _targets(self):
        """Returns targets y for the loss `sum(y * y_pred)`, with the structure of the outputs.

        The targets are scaled to make the gradient of a canary `_EXCESS` times as long as the clip.
        """
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
    """Returns a subclass of a private optimizer with updates that show the noisy sum of gradients.

    All methods of the private optimizer run as usual. Only the `update_step` of Keras's optimizer
    is replaced by a method that subtracts the noisy sum, in units of the clip, from the weights.
    So the sum can be read from the change of the weights.

    Args:
        private: A class of private optimizers.
    """
    optimizers = (c for c in private.__mro__ if issubclass(c, keras.optimizers.Optimizer))
    base = next(c for c in optimizers if not issubclass(c, PrivateOptimizer))

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.cast(gradient * self.batch_size, variable.dtype))

    # In the method resolution order, this class comes after the private classes and before Keras's.
    last = type(f"Last{base.__name__}", (base,), {"update_step": update_step})
    return type(f"Observed{private.__name__}", (private, last), {})


def _linear(y_true, y_pred):
    return tf.reduce_sum(y_true * tf.cast(y_pred, y_true.dtype), list(range(1, y_pred.shape.rank)))


def _specs(model, x):
    """Returns a tensor, or a list of tensors, with the shapes and dtypes of the model's inputs."""
    if x is not None:
        specs = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(x)]
    else:
        # An axis without a fixed size gets the size 32.
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
    """Returns the inputs of the canaries: a tensor of equal examples.

    Args:
        tensor: Tensor with the dtype and, except for the first axis, the shape of the examples.
        rows: Int, the number of examples.
        blank: Bool. If True, all values of an example are equal, so an augmentation such as crops
            and flips does not change it.
    """
    shape, dtype = [1, *tensor.shape[1:]], tensor.dtype
    if dtype.is_floating and not blank:
        example = tf.constant(np.random.default_rng(0).normal(size=shape), dtype)
    else:
        example = tf.fill(shape, "a") if dtype == tf.string else tf.cast(tf.ones(shape), dtype)
    return tf.repeat(example, rows, axis=0)


def _copy(model, specs):
    """Returns a copy of a model, with separate weights of the same values.

    `specs` are tensors like the model's inputs.
    """
    try:
        if getattr(model, "inputs", None):
            # An uncompiled model is copied, because Keras would also copy the arguments of
            # `compile`.
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
