"""The base class of private optimizers: their arguments and account, and operations they refuse.

The update itself is in `step`; the optimizers that users name are in `optimizers`.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import keras
import tensorflow as tf

from tfdpx import account
from tfdpx._keras import model_internals
from tfdpx._warnings import warn
from tfdpx.accounting import saved
from tfdpx.accounting.ledger import EXAMPLE, USER, Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.mechanism import check_private
from tfdpx.sampling.batch_sampler import check_optimizer
from tfdpx.training import arguments, fit
from tfdpx.training.budget import updates_left
from tfdpx.training.session import StepState, reset_between_fits
from tfdpx.training.step import private_train_step

# Arguments of earlier versions, which files still name.
_OLD = ("bias_correction", "least_second_moment", "per_example_engine", "require_proof")


def _read_only(name):
    """Returns a read-only property for an argument. A traced step would ignore a new value."""

    def get(self) -> Any:
        return getattr(self._settings, name)

    def refuse(self, value):
        raise AttributeError(
            f"`{name}` of a private optimizer is read-only: the account counts on the value that "
            f"it was made with, {get(self)!r}. Received: {name}={value!r}. Compile the model with "
            "a new optimizer; its account continues."
        )

    return property(get, refuse, doc=f"The argument `{name}`. Read-only.")


class PrivateOptimizer(model_internals.OptimizerOverrides):
    """A mixin that makes a Keras optimizer private; it comes before Keras's class in the bases."""

    plan = _read_only("plan")
    batch_size = _read_only("batch_size")
    noise_multiplier = _read_only("noise_multiplier")
    l2_norm_clip = _read_only("l2_norm_clip")
    microbatch_size = _read_only("microbatch_size")
    augment = _read_only("augment")
    augmult = _read_only("augmult")
    augment_targets = _read_only("augment_targets")
    seed = _read_only("seed")
    individual = _read_only("individual")
    public_validation = _read_only("public_validation")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        private = {name: kwargs.pop(name) for name in arguments.NAMES if name in kwargs}
        arguments.refuse(type(self), kwargs)
        if args and isinstance(args[0], int):
            args = (float(args[0]), *args[1:])
        arguments.refuse_epsilon(type(self), kwargs)
        super().__init__(*args, **kwargs)
        arguments.refuse_epsilon(type(self), vars(self))
        self._settings = arguments.check_settings(private)
        self.prepared = weakref.WeakKeyDictionary()
        self.session = None  # The current `tfdpx.training.session.Session`.
        self.per_user = None  # The number of examples per person that the step was traced for.
        self.weighted_models = weakref.WeakSet()  # Their steps read class weights.
        self.state = StepState()
        plan = self.plan
        unit = EXAMPLE if plan is None else plan.unit
        self.account = account.Account(self.state, self.noise_multiplier, unit)
        # `tf.train.Checkpoint` saves this attribute. For Keras, `save_own_variables` saves the
        # ledger.
        self._saved_ledger = account.SavedLedger(self)
        self._ledger_facts = self._saved_ledger  # The name in files of 0.2, which are refused.
        probability = plan and plan.sampling_probability
        self.account.open(probability, poisson_sampled=False, seeded=self.seed is not None)
        reset_between_fits(self)
        self.clip_policy = arguments.clip_policy(self._settings, self.account)
        self._gradient_norm = self.add_variable([], name="privatized_gradient_norm")
        self.clip_policy.init(self)

    def unplanned_step(self, model: keras.Model, rows: int | None, *weights: Any) -> Any:
        """Returns a context manager around `model.train_on_batch`; see `fit.unplanned_step`."""
        return fit.unplanned_step(self, model, rows, *weights)

    def compiled(self, model: keras.Model) -> None:
        """Called after `model.compile`: `ledger` then includes all spending on the weights."""
        self.account.follow(model)
        if self.session is None:
            reset_between_fits(self)

    def private_train_step(self, model: keras.Model, data: Any) -> dict[str, Any]:
        """Makes one update of `model` on one batch, in place of Keras's `train_step`."""
        return private_train_step(self, model, data)

    def fitting(self, model: keras.Model, arguments: dict[str, Any]) -> Any:
        """Returns a context manager around `model.fit`; see `fit.fitting`."""
        return fit.fitting(self, model, arguments)

    fit_arguments = fit.ARGUMENTS

    def updates_left(self, plan: PrivacyPlan) -> int:
        """Returns how many more updates a plan allows, an int that may be negative."""
        check_optimizer(self, plan)
        return updates_left(self, plan)

    @property
    def of_users(self) -> bool:
        """Bool, whether the plan's unit is "user". A batch then has one entry for each person."""
        return self.plan is not None and self.plan.unit == USER

    def step_key(self) -> Any:
        """Returns the next update's secret key, int64 tensor [2]. No other update has this key."""
        return self.state.key()

    def trains(self, model: keras.Model) -> None:
        """Records that this optimizer trains `model`: its ledger counts for the model's weights."""
        self.account.follow(model)
        if self.plan is not None and self.plan.spent.entries:
            account.attach(self.plan.spent, model.variables)
        self.account.trains(model.trainable_variables)

    @property
    def privatized_gradient_norm(self) -> float:
        """Float: the l2 norm of the last noisy gradient. The guarantee covers this number."""
        return float(keras.ops.convert_to_numpy(self._gradient_norm))

    @property
    def nonfinite_examples(self) -> int:
        """Int: how many examples counted as zero, because their gradients were not finite.

        The guarantee does not cover this number.
        """
        return self.state.nonfinite

    @property
    def ledger(self) -> Ledger:
        """The `tfdpx.accounting.Ledger` of everything spent on the weights that are trained.

        The ledger includes the updates of earlier optimizers. If the weights came from a file, it
        includes the file's ledger. Assigning weights never removes anything from the ledger. If
        values of weights came from a source without a ledger, `ledger.is_complete` is False.
        """
        ledger, plan = self.account.ledger(), self.plan
        facts = {"delta": float(plan.delta), "num_examples": plan.num_examples} if plan else {}
        return dataclasses.replace(ledger, **facts)

    @property
    def epsilon_is_approximate(self) -> bool:
        """Bool, whether any update used a batch that was not drawn as the accountant assumes."""
        return self.ledger.is_approximate

    @property
    def independence(self) -> tuple:
        """Tuple of strings, one for each trained model: how its examples are kept separate.

        A string begins with "mapped" if tfdpx calls the model on one example at a time, by a
        vectorized map. It begins with "batched" if tfdpx calls the model on whole batches, because
        every layer is known to treat each example by itself. The rest of the string is the reason.
        """
        return tuple(dict.fromkeys(cache.engine.mode for cache in self.prepared.values()))

    def record(self, gradient_norm: Any, nonfinite: Any) -> None:
        """Counts an update, and stores its gradient norm and its number of non-finite gradients."""
        self._gradient_norm.assign(gradient_norm)
        self.state.count(nonfinite)

    def save_own_variables(self, store: Any) -> None:
        """Saves Keras's variables and the ledger, but no seed of noise or draws."""
        super().save_own_variables(store)
        for name, array in self.account.arrays().items():
            store[name] = array

    def load_own_variables(self, store: Any) -> None:
        """Loads Keras's variables and the saved ledger. Later updates count as another run."""
        arrays = {name: store[name] for name in store.keys()}
        ledger = saved.read(arrays)
        if ledger is not None:
            self.account.join(ledger)
        elif arrays:
            warn(
                "The saved optimizer has no ledger: what was spent on its weights is unknown, and "
                "not counted.",
            )
        super().load_own_variables(saved.without_ledger(arrays))
        if self.session is None:
            reset_between_fits(self)
        else:
            self.session.renew()

    def refuse_hdf5(self) -> None:
        """Called when Keras would save or load a whole model as HDF5: raises ValueError."""
        raise ValueError(
            "The legacy HDF5 format of whole models (`.h5`, `.hdf5`) has no room for the ledger of "
            f"a private optimizer. Received: a model with optimizer {type(self).__name__}. Save it "
            'as "model.keras", or its weights as "model.weights.h5". An old HDF5 file can be '
            "loaded by `compile=False`; what was spent on it is then unknown."
        )

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Applies gradients from the private step; raises ValueError for other gradients."""
        check_private(grads)
        return super().apply(grads, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        """Applies gradients from the private step; raises ValueError for other gradients."""
        check_private(grads)
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Makes the Keras optimizer's update with the tensor of a `PrivateGradient`."""
        return super().update_step(self.check_gradient(gradient).tensor, variable, learning_rate)

    def check_gradient(self, gradient: Any) -> Any:
        """Returns `gradient`; raises an error unless it comes unchanged from the private step."""
        check_private([gradient])
        if not gradient.all_reduce_passed:
            raise RuntimeError(
                "Keras reduced the gradients over replicas by itself, which would count the noise "
                "more than once. This version of Keras is not supported."
            )
        return gradient

    def all_reduce_sums(self, grads_and_vars: list) -> list:
        """Returns `grads_and_vars` unchanged: the private step has summed over replicas already."""
        for gradient, _ in grads_and_vars:
            gradient.all_reduce_passed = True
        return grads_and_vars

    def average_weights(self, pairs: Any) -> None:
        """Updates the moving averages, with warm-up. `pairs` holds pairs (weight, average)."""
        step = tf.cast(self.iterations.value, "float32")
        decay = tf.minimum(float(self.ema_momentum), (1.0 + step) / (10.0 + step))
        # Keras's averages start from zero, so the first update replaces them.
        decay = tf.where(step == 0, 0.0, decay)
        for variable, average in pairs:
            share = tf.cast(decay, average.dtype)
            average.assign(share * average.value + (1 - share) * variable.value)

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        config = super().get_config()
        # Refused arguments are all None.
        for argument in arguments.REFUSED:
            config.pop(argument, None)
        settings = self._settings._replace(l2_norm_clip=self._settings.policy or self.l2_norm_clip)
        # `seed` is left out: a file must not reveal it, and a copy needs different noise.
        for name in arguments.NAMES:
            if name != "seed":
                config[name] = keras.saving.serialize_keras_object(getattr(settings, name))
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> PrivateOptimizer:
        """Builds the optimizer from `get_config()`."""
        config = dict(config)
        for old_argument in _OLD:
            config.pop(old_argument, None)
        if config.get("microbatch_size") == "auto":  # From tfdpx 0.2.
            config["microbatch_size"] = None
        for name in ("plan", "augment", "individual", "l2_norm_clip"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(
                    config[name], custom_objects=custom_objects
                )
        return super().from_config(config, custom_objects=custom_objects)
