"""DP-SGD, DP-Adam and DP-AdamW: Keras optimizers whose updates are differentially private."""

import collections
import contextlib
import functools
import math
import warnings
import weakref

import keras
import tensorflow as tf

from tfdpx import augment as augment_module
from tfdpx import fit_data, microbatch, replicas
from tfdpx.account import Account
from tfdpx.callback_checks import check_callbacks
from tfdpx.mechanism import PrivateGradient
from tfdpx.per_example import ENGINES
from tfdpx.run import Run, fresh_state, value_of
from tfdpx.train_step import private_train_step

# Keras arguments that would change the mechanism, and what to use instead.
_REFUSED = {
    "clipnorm": "use `l2_norm_clip`, which bounds each example",
    "clipvalue": "use `l2_norm_clip`, which bounds each example",
    "global_clipnorm": "use `l2_norm_clip`, which bounds each example",
    "gradient_accumulation_steps": "use `microbatch_size`: a step is one update of the whole batch",
    "loss_scale_factor": "use the `mixed_bfloat16` policy, which needs no loss scaling",
}

_DOC = """{name} with per-example clipping and Gaussian noise (DP-SGD).

    A drop-in for `keras.optimizers.{name}` in `model.compile(optimizer=...)`. The gradient that
    {name} receives is Eq. 4 of De et al. 2022 (arXiv:2204.13650),

        1/B * sum_i clip_C(mean over K views of grad l_i) / C + sigma/B * xi,

    with B the declared `batch_size`, a constant, whatever the size of the batch at hand. Dividing
    by C keeps the learning rate independent of the clip.

    Guarantee: each update is one Gaussian mechanism of sensitivity 1 and standard deviation sigma
    under adding or removing one example. What a run of updates costs depends on how batches are
    drawn: see `tfdpx.PrivacyPlan`. It holds for the weights; the training loss and metrics that
    Keras shows are functions of the private data. Files that Keras saves hold no seed of noise or
    draws; a loaded or copied optimizer has fresh noise, and its `ledger` goes on.

    Args:
        *args: Arguments of `keras.optimizers.{name}`, `learning_rate` first.
        plan: Optional `tfdpx.PrivacyPlan`, which gives `batch_size` and `noise_multiplier`.
        batch_size: Int, the expected batch size B. Needed without a plan.
        noise_multiplier: Float sigma, noise standard deviation in units of `l2_norm_clip`. Needed
            without a plan. 0 clips without noise: epsilon is infinite.
        l2_norm_clip: Float C, the bound on the l2 norm of each example's gradient. With
            `noise_multiplier=0` also infinity: gradients are then averaged, neither clipped nor
            divided by C, in what is otherwise the same step. That is training without privacy.
        microbatch_size: Optional int, or `"auto"`. Examples per pass; a memory knob that changes
            neither the update (but for rounding) nor its sensitivity. `None` takes the whole batch
            at once; `"auto"` the largest pass that is predicted to fit in the memory that is free
            at the first step, and prints which. It may differ from run to run, so give an int
            where a resumed run must equal an uninterrupted one to the last bit.
        augment: A `tfdpx.augment` object or a Keras augmentation layer, run on the device.
        augmult: Int K, views of each example. 0 means no augmentation. With `augment=None`, K > 0
            expects inputs of shape [batch, K, ...].
        seed: Optional int. `None`, for a seed from the operating system, is what privacy needs:
            noise of a known seed can be subtracted.
        per_example_engine: `"layerwise"`, or `"vmap"`, slow and large, for models that the first
            cannot explain.
        **kwargs: Keyword arguments of `keras.optimizers.{name}`. With `use_ema=True` the average
            warms up, decay = min(ema_momentum, (1+t)/(10+t)), as in appendix C.3 of De et al.

    Raises:
        ValueError: For an argument out of range, one that contradicts `plan`, or one of Keras'
            that would change the mechanism ({refused}).
    """


_Mechanism = collections.namedtuple(
    "_Mechanism",
    "plan batch_size noise_multiplier l2_norm_clip microbatch_size augment augmult seed "
    "per_example_engine",
)


def _read_only(name):
    """A property without a setter: the traced step and the account hold the value."""

    def get(self):
        return getattr(self._mechanism, name)

    def refuse(self, value):
        raise AttributeError(
            f"`{name}` of a private optimizer is read-only: the account counts on the value that "
            f"it was made with, {get(self)!r}. Received: {name}={value!r}. Compile the model with "
            "a new optimizer; its account goes on."
        )

    return property(get, refuse, doc=f"The argument `{name}`. Read-only.")


class _PrivateOptimizer:
    """What makes a Keras optimizer private; stands before it in the bases."""

    plan = _read_only("plan")
    batch_size = _read_only("batch_size")
    noise_multiplier = _read_only("noise_multiplier")
    l2_norm_clip = _read_only("l2_norm_clip")
    microbatch_size = _read_only("microbatch_size")
    augment = _read_only("augment")
    augmult = _read_only("augmult")
    seed = _read_only("seed")
    per_example_engine = _read_only("per_example_engine")

    def __init__(
        self,
        *args,
        plan=None,
        batch_size=None,
        noise_multiplier=None,
        l2_norm_clip=1.0,
        microbatch_size=None,
        augment=None,
        augmult=0,
        seed=None,
        per_example_engine="layerwise",
        **kwargs,
    ):
        for argument, instead in _REFUSED.items():
            if kwargs.get(argument) is not None:
                raise ValueError(
                    f"Argument `{argument}` would change the privacy mechanism; {instead}. "
                    f"Received: {argument}={kwargs[argument]}"
                )
        if args and isinstance(args[0], int):
            args = (float(args[0]), *args[1:])
        super().__init__(*args, **kwargs)
        # A number may be assigned anew; a schedule stays.
        given = args[0] if args else kwargs.get("learning_rate")
        self.first_learning_rate = given if _is_number(given) else None
        batch_size = _agree("batch_size", batch_size, plan)
        noise_multiplier = _agree("noise_multiplier", noise_multiplier, plan)
        _check_count("batch_size", batch_size)
        if microbatch_size not in (None, microbatch.AUTO):
            _check_count("microbatch_size", microbatch_size, instead=', None or "auto"')
        if not _is_number(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
            raise ValueError(
                "Argument `noise_multiplier` must be a finite float >= 0. Received: "
                f"noise_multiplier={noise_multiplier!r}"
            )
        if not _is_number(l2_norm_clip) or not 0 < l2_norm_clip <= math.inf:
            raise ValueError(
                "Argument `l2_norm_clip` must be a float > 0. Received: "
                f"l2_norm_clip={l2_norm_clip!r}"
            )
        if l2_norm_clip == math.inf and noise_multiplier:
            raise ValueError(
                "Argument `l2_norm_clip` must be finite for noise to hide an example. Received: "
                f"l2_norm_clip=inf, noise_multiplier={noise_multiplier}. Training without privacy "
                "takes noise_multiplier=0."
            )
        if not isinstance(augmult, int) or isinstance(augmult, bool) or augmult < 0:
            raise ValueError(
                "Argument `augmult` must be an int >= 0 (0: no augmentation). Received: "
                f"augmult={augmult!r}"
            )
        if per_example_engine not in ENGINES:
            raise ValueError(
                f"Argument `per_example_engine` must be one of {sorted(ENGINES)}. Received: "
                f"per_example_engine={per_example_engine!r}"
            )
        if noise_multiplier == 0:
            warnings.warn(
                f"`noise_multiplier=0`: no noise is added (`l2_norm_clip={l2_norm_clip}`). There "
                "is no privacy guarantee; epsilon is infinite.",
                stacklevel=3,
            )
        self._mechanism = _Mechanism(
            plan=plan,
            batch_size=batch_size,
            noise_multiplier=float(noise_multiplier),
            l2_norm_clip=float(l2_norm_clip),
            microbatch_size=microbatch_size,
            augment=augment_module.get(augment),
            augmult=augmult,
            seed=seed,
            per_example_engine=per_example_engine,
        )
        self.prepared = weakref.WeakKeyDictionary()
        self.draws = None  # Of the data set that `fit` trains on.
        self.run = Run(seed)
        self.account = Account(self.run, noise_multiplier)
        # Attributes, so that `tf.train.Checkpoint` saves them; `save_own_variables` does for Keras.
        self._ledger_facts, self._ledger_steps = self.account.facts, self.account.steps
        self.account.open(plan and plan.sampling_probability, exact=False)
        self._gradient_norm = self.add_variable([], name="privatized_gradient_norm")

    def by_hand(self, model, rows, sample_weight):
        """A context around `model.train_on_batch`; see `tfdpx.fit_data.by_hand`."""
        del model
        return fit_data.by_hand(self, rows, sample_weight)

    def compiled(self, model):
        """Called after `model.compile`: what was spent on the model's weights goes on here."""
        self.account.follow(model.variables)

    def private_train_step(self, model, data):
        """One update of `model` on one batch, called in place of `model.train_step`'s own body."""
        return private_train_step(self, model, data)

    @contextlib.contextmanager
    def fitting(self, model, arguments):
        """Around `model.fit`: refuses what would go wrong, and accounts for the data.

        Args:
            model: The `keras.Model`.
            arguments: Dict of the arguments of `fit` by name; `x` may be replaced.
        """
        check_callbacks(arguments.get("callbacks"), self)
        replicas.check_keras_fit(model, arguments.get("x"))
        with fit_data.accounted(self, model, arguments):
            yield

    @property
    def noise_seed(self):
        """int64 tensor [2]: the secret seed of this run's noise and views."""
        return self.run.noise_seed

    @property
    def privatized_gradient_norm(self):
        """Float: l2 norm of the last noisy gradient, which the guarantee covers."""
        return float(keras.ops.convert_to_numpy(self._gradient_norm))

    @property
    def nonfinite_examples(self):
        """Int: examples so far whose gradient was not finite and counted as zero. Not private."""
        return self.run.nonfinite

    @property
    def ledger(self):
        """`tfdpx.accounting.Ledger`: all that was spent on the weights that this optimizer trains.

        It holds the updates of former optimizers too, and those of the file that the weights were
        loaded from. Nothing that is assigned lowers it.
        """
        return self.account.ledger()

    @property
    def epsilon_is_approximate(self):
        """Bool: whether any update was on batches that were not drawn as the accountant assumes."""
        return self.ledger.is_approximate

    def record(self, gradient_norm, nonfinite):
        """Counts an update and keeps what it measured; called by the private step."""
        self._gradient_norm.assign(gradient_norm)
        self.account.count_update()
        self.run.count_update(nonfinite, self.learning_rate)

    def save_own_variables(self, store):
        """Saves what Keras saves, and the ledger. No seed of noise or draws is in it."""
        self.account.synchronize()
        super().save_own_variables(store)
        for name, variable in self._ledger_variables().items():
            store[name] = value_of(variable)

    def load_own_variables(self, store):
        """Loads what Keras loads, joins the saved ledger, and begins a run with fresh noise."""
        names = self._ledger_variables()
        saved = {name: store[name] for name in store.keys()}
        if all(name in saved for name in names):
            self.account.join_saved(*(saved.pop(name) for name in names))
        elif saved:
            warnings.warn(
                "The saved optimizer has no ledger: what was spent on its weights is unknown, and "
                "not counted.",
                stacklevel=2,
            )
        self.take_over(None)
        super().load_own_variables(saved)

    def take_over(self, state):
        """Becomes a run: that of a `Run.state()`, or a fresh one if that is None."""
        self.account.synchronize()
        if state is None:
            # Draws of a given seed that were used stay used.
            state = {**fresh_state(), "used": self.run.state()["used"]}
        self.run.restore(state)
        self.account.move()

    def _ledger_variables(self):
        return {"ledger_facts": self._ledger_facts, "ledger_steps": self._ledger_steps}

    def apply(self, grads, trainable_variables=None):
        """Applies gradients from the private step; refuses any other with a ValueError."""
        _check_private(grads)
        return super().apply(grads, trainable_variables)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """Refuses gradients that the private step did not make."""
        _check_private(grads)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """The base optimizer's update with the tensor inside a `PrivateGradient`."""
        _check_private([gradient])
        if not gradient.all_reduce_passed:
            raise RuntimeError(
                "Keras reduced the gradients over replicas by itself, which would count the noise "
                "more than once. This version of Keras is not supported."
            )
        return super().update_step(gradient.tensor, variable, learning_rate)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # The private step has already reduced the sums, before the noise.
        grads_and_vars = list(grads_and_vars)
        for gradient, _ in grads_and_vars:
            gradient.all_reduce_passed = True
        return grads_and_vars

    def _update_model_variables_moving_average(self, trainable_variables):
        if not self.use_ema:
            return
        step = tf.cast(self.iterations.value, "float32")
        decay = tf.minimum(float(self.ema_momentum), (1.0 + step) / (10.0 + step))
        # Keras' averages start from zero: the first update must not count that.
        decay = tf.where(step == 0, 0.0, decay)
        for variable, average in zip(
            trainable_variables, self._model_variables_moving_average, strict=True
        ):
            kept = tf.cast(decay, average.dtype)
            average.assign(kept * average.value + (1 - kept) * variable.value)

    def get_config(self):
        """Returns the configuration as a JSON-serialisable dict."""
        config = super().get_config()
        # Refused arguments are all None.
        for argument in _REFUSED:
            config.pop(argument, None)
        plan, views = self.plan, self.augment
        # Without `seed`: a file must not tell it, and a copy must have noise of its own.
        config.update(
            plan=None if plan is None else keras.saving.serialize_keras_object(plan),
            batch_size=self.batch_size,
            noise_multiplier=self.noise_multiplier,
            l2_norm_clip=self.l2_norm_clip,
            microbatch_size=self.microbatch_size,
            augment=None if views is None else keras.saving.serialize_keras_object(views),
            augmult=self.augmult,
            per_example_engine=self.per_example_engine,
        )
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Builds the optimizer from `get_config()`."""
        config = dict(config)
        for name in ("plan", "augment"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(
                    config[name], custom_objects=custom_objects
                )
        return super().from_config(config, custom_objects=custom_objects)


@functools.cache
def make_private(optimizer_class):
    """The differentially private variant of a Keras optimizer class.

    Args:
        optimizer_class: A subclass of `keras.optimizers.Optimizer` such as
            `keras.optimizers.Lion`.

    Returns:
        A subclass named `DP<name>`, registered with Keras as `tfdpx>DP<name>`, that takes the
        optimizer's arguments and those of `tfdpx.DPSGD`. The same class on every call.

    Raises:
        TypeError: If `optimizer_class` is no such class, wraps another optimizer, or is private.
    """
    if not (
        isinstance(optimizer_class, type)
        and issubclass(optimizer_class, keras.optimizers.Optimizer)
        and not issubclass(
            optimizer_class, (_PrivateOptimizer, keras.optimizers.LossScaleOptimizer)
        )
    ):
        raise TypeError(
            "`make_private` takes an optimizer class of Keras that wraps no other, such as "
            f"keras.optimizers.Lion. Received: {optimizer_class!r}"
        )
    name = optimizer_class.__name__
    private = type(
        f"DP{name}",
        (_PrivateOptimizer, optimizer_class),
        {
            "__doc__": _DOC.format(name=name, refused=", ".join(_REFUSED)),
            "__module__": __name__,
        },
    )
    return keras.saving.register_keras_serializable(package="tfdpx")(private)


DPSGD = make_private(keras.optimizers.SGD)
DPAdam = make_private(keras.optimizers.Adam)
DPAdamW = make_private(keras.optimizers.AdamW)


def _check_private(gradients):
    if not all(isinstance(g, PrivateGradient) for g in gradients):
        raise ValueError(
            "A tfdpx optimizer received gradients that did not come from the private step, so they "
            "are neither clipped nor noisy. Train with `model.fit` (or `model.train_on_batch`) and "
            "the model's own `train_step` of keras.Model; a custom `train_step`, a GradientTape "
            "loop or a wrapped optimizer cannot be made private."
        )


def _agree(name, value, plan):
    """The value of an argument that `plan` gives too."""
    if plan is None:
        if value is None:
            raise ValueError(
                f"Argument `{name}` is missing. Give the optimizer `plan=tfdpx.PrivacyPlan(...)`, "
                "or both `batch_size` and `noise_multiplier`."
            )
        return value
    planned = getattr(plan, name)
    if value is not None and not math.isclose(value, planned, rel_tol=1e-9):
        raise ValueError(
            f"Argument `{name}` disagrees with the plan. Received: {name}={value}, "
            f"plan.{name}={planned}. Leave `{name}` out."
        )
    return planned


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_count(name, value, instead=""):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"Argument `{name}` must be an int >= 1{instead}. Received: {name}={value!r}"
        )
