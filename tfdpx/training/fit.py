"""The stages of a private `model.fit`, in order.

1. `read_request` collects the arguments in a frozen `Request`;
2. `draw_batches` turns arrays into the batches that the optimizer's plan draws;
3. `check_request` refuses callbacks, data and batches that break the account's assumptions;
4. `Session` begins one training;
5. `checkpointing` lets a `Checkpoint` restore and save;
6. `divide_into_epochs` divides the remaining updates into epochs, and builds the model;
7. `add_callbacks` adds the callbacks that end and measure the training.

Epsilon is exact if the data are arrays, or an unchanged data set from `plan.batches`: each draw is
then used once. With a plan, other data are refused unless the user accepts an epsilon that is not
an upper bound. All of tfdpx calls such an epsilon "approximate".
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import threading
from typing import Any

import keras
import tensorflow as tf

from tfdpx._keras import lora, model_internals
from tfdpx._keras.tensorflow_internals import sparing_graph_optimizer
from tfdpx._warnings import warn
from tfdpx.accounting.ledger import USER
from tfdpx.checks.callbacks import check_callbacks, check_validation_data
from tfdpx.checks.declared import check_methods
from tfdpx.sampling.batch_sampler import BatchSampler, is_seeded, sampler_of
from tfdpx.sampling.class_weights import read_class_weight
from tfdpx.sampling.examples import RandomAccess
from tfdpx.sampling.inputs import check_batch, without_flags
from tfdpx.sampling.sampled_batches import plan_sampler
from tfdpx.suggestion import HARD_FROM, signal_of, suggest
from tfdpx.training import checkpoint, replicas
from tfdpx.training.budget import StopAtBudget, make_budget_error
from tfdpx.training.clipping import split_ids
from tfdpx.training.norms import norm_refreshes
from tfdpx.training.session import BUSY, Session, reset_between_fits, start_unmanaged_step
from tfdpx.training.step import build_model

_KERAS_BATCH_SIZE = 32
# The arguments of a private `fit` in addition to Keras's.
ARGUMENTS = ("user_ids", "examples_per_user")
# These arguments make batches; they do not apply to batches that a plan has made already.
_OF_BATCHES = ("y", "sample_weight", "class_weight", "validation_split")


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of one `fit`. `keras_arguments` holds the arguments that only Keras reads."""

    x: Any = None
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    user_ids: Any = None
    examples_per_user: int | None = None
    batch_size: int | None = None
    epochs: int = 1
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    shuffle: bool = True
    callbacks: Any = None
    verbose: Any = "auto"
    validation_data: Any = None
    validation_split: float | None = 0.0
    validation_batch_size: int | None = None
    keras_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def with_(self, **changes):
        """Returns the request with some arguments changed."""
        return dataclasses.replace(self, **changes)

    def for_keras(self):
        """Returns a dict of arguments for `keras.Model.fit`."""
        names = {field.name for field in dataclasses.fields(self)} - {"keras_arguments", *ARGUMENTS}
        return {**self.keras_arguments, **{name: getattr(self, name) for name in names}}

    def list_of_callbacks(self):
        """Returns the callbacks as a flat list. `callbacks` may be a nest or a `CallbackList`."""
        callbacks = getattr(self.callbacks, "callbacks", self.callbacks)
        return [callback for callback in tf.nest.flatten(callbacks) if callback is not None]


def read_request(arguments):
    """Returns a `Request` made from `arguments`, a dict of the arguments of a `fit` by name."""
    names = {field.name for field in dataclasses.fields(Request)} - {"keras_arguments"}
    keras_arguments = {name: value for name, value in arguments.items() if name not in names}
    return Request(
        **{k: v for k, v in arguments.items() if k in names}, keras_arguments=keras_arguments
    )


@contextlib.contextmanager
def fitting(optimizer, model, arguments):
    """Context manager around `model.fit` that yields the arguments for Keras.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`.
        arguments: Dict of the arguments of `fit`.

    Raises:
        ValueError: If an argument does not fit the plan, or would void the guarantee.
        BudgetExceeded: If all updates of the plan were made.
    """
    check_methods(model)
    request = read_request(arguments)
    check_validation_data(request.validation_data, request.x, optimizer)
    check_callbacks(request.callbacks, optimizer)
    request = draw_batches(optimizer, model, request)
    replicas.check_keras_fit(model, request.x)
    with training(optimizer, model, request) as (session, request):
        request = request.with_(x=replicas.interleave_batches(model, session, request.x))
        yield add_callbacks(model, session, request).for_keras()


@contextlib.contextmanager
def training(optimizer, model, request):
    """Context manager that runs a `fit` within a `Session`.

    It yields the session, and the request with its updates divided into epochs.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`.
        request: `Request`.

    Raises:
        ValueError: If the batches belong to another plan or optimizer, or have another size.
        BudgetExceeded: If all steps of the plan were taken.
    """
    optimizer.account.follow(model)
    replicas.check_layout()
    lora.reinitialize_zero_lora(model)
    draws = sampler_of(request.x)
    if draws is not None and draws.plan is None:
        draws = None
    if optimizer.individual is not None:
        optimizer.clip_policy.check_examples(draws)
    count, probability = check_request(optimizer, request, draws)
    callbacks = request.list_of_callbacks()
    class_weight = read_class_weight(request.class_weight) if draws is None else draws.class_weight
    request = request.with_(class_weight=None)
    with (
        sparing_graph_optimizer(),
        Session(
            optimizer, draws, probability, is_seeded(request.x), callbacks, request.x
        ) as session,
        weighing(optimizer, model, class_weight),
        model_internals.keeping_first_epoch(model),
        checkpoint.checkpointing(model, callbacks, session, count, lambda: build(model, request)),
    ):
        if draws is not None:
            request = divide_into_epochs(optimizer, model, session, request)
        plan = optimizer.plan
        optimizer.account.warn_of_unknown(() if plan is None else plan.spent.entries)
        if plan is not None and model.built and model.trainable_variables:
            weights = sum(math.prod(v.shape) for v in model.trainable_variables)
            if signal_of(plan, weights) < HARD_FROM:
                warn(suggest(plan, model).advice)
        yield session, request


def weighing(optimizer, model, class_weight):
    """Context manager in which the steps of a model multiply gradients by class weights.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`. Its step is traced again when it has class weights for the first
            time.
        class_weight: `tfdpx.sampling.class_weights.ClassWeights`, or None.
    """
    if class_weight is not None and model not in optimizer.weighted_models:
        optimizer.weighted_models.add(model)
        model.train_function = None
    return optimizer.state.class_weights.holding(class_weight)


@contextlib.contextmanager
def unplanned_step(optimizer, model, rows, sample_weight, class_weight):
    """Context manager around `train_on_batch`, a step on a batch that no plan drew.

    A callback may also call `train_on_batch` during a `fit`. The budget of the `fit` then limits
    this step, too.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`.
        rows: Int, the number of examples in the batch, or None if unknown.
        sample_weight: The argument of `train_on_batch`, or None.
        class_weight: The argument of `train_on_batch`, or None.
    """
    check_methods(model)
    class_weight = read_class_weight(class_weight)
    _refuse_unknown_people(optimizer)
    if sample_weight is None and optimizer.noise_multiplier:
        _check_size(optimizer, rows, exactly=False)
    split_ids(optimizer, None)
    account = optimizer.account
    with optimizer.state.lock:
        session = optimizer.session
        if session is not None and session.thread != threading.get_ident():
            raise RuntimeError(BUSY)
        account.follow(model)
        account.warn_of_unknown()
        if session is None:
            reset_between_fits(optimizer)
        else:
            start_unmanaged_step(optimizer)
        if optimizer.state.updates >= optimizer.state.end:
            raise make_budget_error(optimizer, (session or optimizer).plan)
        probability, has_seed = _guess_probability(optimizer, None), optimizer.seed is not None
        former_entry = account.open(probability, poisson_sampled=False, seeded=has_seed)
        try:
            with sparing_graph_optimizer(), weighing(optimizer, model, class_weight):
                yield
        finally:
            account.open(**former_entry)
            if session is not None:
                session.begin()


def draw_batches(optimizer, model, request):
    """Returns the request with batches in place of arrays: the optimizer's plan draws the batches.

    An epoch has as many updates as Keras would make on the same arrays. Without a plan, and for
    data that are not in memory, the request is returned unchanged.

    Raises:
        ValueError: If the number of examples or `batch_size` differs from the plan's, or if there
            are `user_ids` but the plan's `unit` is not "user".
    """
    plan, data = optimizer.plan, request.x
    is_in_memory = isinstance(data, RandomAccess | list | tuple | dict) or hasattr(data, "shape")
    if not is_in_memory or plan is None:
        _refuse_data_beside(request, ARGUMENTS)
    if plan is None and isinstance(data, RandomAccess):
        raise ValueError(
            "A `tfdpx.RandomAccess` is drawn from by the optimizer's plan. Received: an optimizer "
            "with plan=None. Make it with `plan=`, or pass `x=plan.batches(...)`."
        )
    if plan is None or not is_in_memory:
        return request
    if request.batch_size not in (None, plan.batch_size):
        raise ValueError(
            f"Argument `batch_size` must be the plan's, {plan.batch_size}, on which epsilon "
            f"depends. Received: batch_size={request.batch_size}. Leave it out, or make the plan "
            f"with `batch_size={request.batch_size}`."
        )
    batches = plan_sampler(
        plan,
        data,
        request.y,
        request.sample_weight,
        class_weight=request.class_weight,
        user_ids=request.user_ids,
        examples_per_user=request.examples_per_user,
        validation_split=request.validation_split or 0.0,
        optimizer=optimizer,
        seed=None,
        start=0,
        input_context=None,
        pad_to_multiple_of=model.distribute_strategy.num_replicas_in_sync,
    )
    steps = request.steps_per_epoch
    return request.with_(
        **dict.fromkeys(("y", "sample_weight", "class_weight", "batch_size", *ARGUMENTS)),
        x=batches,
        validation_split=0.0,
        validation_batch_size=request.validation_batch_size or request.batch_size,
        steps_per_epoch=math.ceil(plan.num_examples / plan.batch_size) if steps is None else steps,
    )


def check_request(optimizer, request, draws):
    """Refuses batches that break the optimizer's assumptions.

    Args:
        optimizer: The tfdpx optimizer.
        request: `Request`.
        draws: The `BatchSampler` of a plan's batches, or None.

    Returns:
        Pair of the number of examples, an int, and the probability that an example is in a batch, a
        float. Either may be None, which means unknown.

    Raises:
        ValueError: If a batch breaks an assumption; the message names the argument and the remedy.
    """
    if draws is None:
        count = _examples_of(request)
        check_unplanned(optimizer, request)
        return count, _guess_probability(optimizer, count)
    check_draws(optimizer, draws)
    _refuse_data_beside(request, _OF_BATCHES)
    return draws.plan.num_examples, draws.plan.sampling_probability


def divide_into_epochs(optimizer, model, session, request):
    """Returns the request with the plan's remaining updates divided among its epochs."""
    draws = session.draws
    restored_epoch = model_internals.initial_epoch(model)
    first_epoch = restored_epoch or request.initial_epoch
    if restored_epoch and not session.left:
        request = request.with_(epochs=restored_epoch)  # The run was finished.
    elif first_epoch < request.epochs:
        if not session.left:
            raise make_budget_error(optimizer, session.plan)
        # Without `steps_per_epoch`, Keras makes a whole pass over the draws in each epoch. No draw
        # may be used twice, so the first epoch would use all draws.
        if request.steps_per_epoch is None:
            # Epochs of a resumed run are as long as before.
            epoch_steps = (
                math.ceil(draws.plan.steps / request.epochs) if restored_epoch is not None else 0
            )
            steps = max(epoch_steps, math.ceil(session.left / (request.epochs - first_epoch)))
            request = request.with_(steps_per_epoch=steps)
    # Keras's own build would take the flags of absent rows for sample weights, and would not
    # expect ids in a batch.
    build(model, request.with_(x=draws))
    per_user = getattr(draws.examples, "per_user", None)
    # If the number of examples per person has changed, the step needs a new function. TensorFlow
    # would trace the old function for an unknown number.
    if per_user != optimizer.per_user:
        optimizer.per_user, model.train_function = per_user, None
    has_held_out = request.validation_data is None and draws.held_out is not None
    return request.with_(
        x=draws.fitted if optimizer.individual is None else draws.with_ids,
        shuffle=False,  # Keras would warn that it does not shuffle a data set.
        validation_data=draws.held_out if has_held_out else request.validation_data,
    )


def add_callbacks(model, session, request):
    """Returns the request with the callbacks of private training in front of the user's."""
    callbacks, refreshes = request.list_of_callbacks(), norm_refreshes(model, session)
    if not isinstance(request.callbacks, keras.callbacks.CallbackList):
        callbacks = checkpoint.place_checkpoint(callbacks)
        return request.with_(callbacks=[*refreshes, StopAtBudget(), *callbacks])
    for callback in refreshes:  # The list will not set the model again.
        callback.set_model(model)
        request.callbacks.callbacks.insert(0, callback)
    return request


def build(model, request):
    """Builds a compiled model and its optimizer for the data of a `fit`, without reading them.

    Args:
        model: A model compiled with a tfdpx optimizer.
        request: `Request`.
    """
    optimizer = model_internals.innermost(model.optimizer)
    data = request.x, request.y, request.sample_weight
    is_drawn = isinstance(data[0], BatchSampler)
    if is_drawn:
        data = (data[0].fitted,)
    if isinstance(data[0], tf.data.Dataset):
        data = data[0].element_spec
    elif isinstance(data[0], keras.utils.PyDataset):
        data = data[0][0]
    elif _length(data[0]) is None:
        if not model.built:
            raise ValueError(
                "A model that is not built cannot be restored for data whose shapes are not known "
                f"before they are read. Received: x of type {type(data[0]).__name__}. Call "
                "`model.build(input_shape)` before `fit`."
            )
        optimizer.build(model.trainable_variables)
        return

    def example(leaf):
        is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        return tf.zeros([1, *(n or 1 for n in leaf.shape[1:])], leaf.dtype) if is_array else None

    data = tf.nest.map_structure(example, data)
    check_batch(model, data)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    with model.distribute_strategy.scope():
        build_model(model, x, y, without_flags(weights, is_drawn))
        optimizer.build(model.trainable_variables)


def check_draws(optimizer, draws):
    """Raises ValueError unless the account of `optimizer` holds for the batches of `draws`.

    Args:
        optimizer: The tfdpx optimizer.
        draws: `BatchSampler` with a plan.
    """
    plan = optimizer.plan or draws.plan
    if draws.plan.unit == USER and optimizer.plan is None:
        raise ValueError(
            "Batches of people need an optimizer that was given their plan, `plan=`. Received: an "
            "optimizer with plan=None."
        )
    for name in ("num_examples", "batch_size", "noise_multiplier", "sampling", "unit", "delta"):
        plan_value = getattr(draws.plan, name)
        is_of_optimizer = name in ("batch_size", "noise_multiplier")
        value = getattr(optimizer if is_of_optimizer else plan, name)
        # A checkpoint or a config may have stored a number in float32.
        if plan_value != value and not (
            isinstance(value, float) and math.isclose(plan_value, value, rel_tol=1e-6)
        ):
            raise ValueError(
                f"These batches are of a plan with {name}={plan_value}, and the optimizer counts "
                f"on {name}={value}: its epsilon would not be theirs. Train on `plan.batches(...)` "
                "of the plan that the optimizer was given."
            )
    if draws.optimizer is not None and draws.optimizer is not optimizer:
        raise ValueError(
            "These batches were made for another optimizer. Make them by "
            "`plan.batches(x, y, optimizer=model.optimizer)` after the model was compiled."
        )


def check_unplanned(optimizer, request):
    """Refuses batches without a plan if they break the optimizer's assumptions.

    Args:
        optimizer: The tfdpx optimizer.
        request: `Request`.
    """
    _refuse_unknown_people(optimizer)
    if not optimizer.noise_multiplier:
        return
    data, rows = request.x, None
    if isinstance(data, tf.data.Dataset):
        leaves = tf.nest.flatten(data.element_spec)
        has_weights = isinstance(data.element_spec, tuple) and len(data.element_spec) > 2
        is_batched = all(leaf.shape.rank for leaf in leaves)  # If not, the step refuses it.
        rows = None if has_weights or not is_batched else leaves[0].shape[0]
    elif count := _examples_of(request):
        rows = min(request.batch_size or _KERAS_BATCH_SIZE, count)
    _check_size(optimizer, rows)
    accepts_approximation = any(
        getattr(c, "allow_approximate", False) for c in request.list_of_callbacks()
    )
    if optimizer.plan is not None and not accepts_approximation:
        raise ValueError(
            "The plan counts on its own batches, and `fit` was given batches that the plan did "
            f"not draw, or that were changed (by `take`, `cache`, `map`, ...). Received: x of type "
            f"{type(data).__name__}. Give `fit` arrays, a `tfdpx.RandomAccess`, or "
            "`plan.batches(...)` as it is; or say that you need no limit to epsilon: "
            "`callbacks=[tfdpx.PrivacyBudget(plan, allow_approximate=True)]`."
        )


def _refuse_data_beside(request, names):
    """Raises ValueError if `fit` was given arguments that belong to `plan.batches`."""
    for name in names:
        value = getattr(request, name)
        if value is not None and not (name == "validation_split" and value == 0):
            arguments = "x, y" if name == "y" else f"x, y, {name}={name}"
            raise ValueError(
                f"Argument `{name}` of `fit` cannot change batches that are drawn by a plan. Give "
                f"it where they are made: `plan.batches({arguments})`. Received: {name} of type "
                f"{type(value).__name__}."
            )


def _refuse_unknown_people(optimizer):
    if optimizer.of_users:
        raise ValueError(
            'A plan with unit="user" draws people, and the person of each example is unknown. '
            "Train with `fit(x, y, user_ids=ids)`, or on `plan.batches(x, y, user_ids=ids)` as it "
            "is."
        )


def _check_size(optimizer, rows, exactly=True):
    if rows is None:
        return
    is_other_size = rows != optimizer.batch_size and exactly and optimizer.plan is not None
    if is_other_size or rows > optimizer.batch_size:
        raise ValueError(
            f"These batches have {rows} examples, and the optimizer counts on "
            f"batch_size={optimizer.batch_size}: epsilon would not hold for these batches. Train "
            "on `plan.batches(x, y)`, or give both the same batch size."
        )


def _guess_probability(optimizer, count):
    """Returns the probability that an example is in a batch, a float; None if unknown.

    The result is the larger of two numbers: the plan's probability, and the batch size divided by
    the number of examples.

    Args:
        optimizer: The tfdpx optimizer.
        count: Int, the number of training examples, or None if unknown.
    """
    plan_probability = optimizer.plan and optimizer.plan.sampling_probability
    data_probability = min(1.0, optimizer.batch_size / count) if count else None
    return max(
        (
            probability
            for probability in (plan_probability, data_probability)
            if probability is not None
        ),
        default=None,
    )


def _examples_of(request):
    """Returns the number of examples that `fit` would train on; None if `x` has no arrays."""
    count = _length(request.x)
    return count and math.floor(count * (1 - (request.validation_split or 0)))


def _length(data):
    """Returns the number of examples in a nest of arrays; None for anything else."""
    leaves = [t for t in tf.nest.flatten(data) if t is not None]
    if not leaves or not all(hasattr(t, "shape") and len(t.shape) for t in leaves):
        return None
    count = leaves[0].shape[0]
    return int(count) if isinstance(count, numbers.Integral) else None
