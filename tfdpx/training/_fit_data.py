"""What `fit` was given to train on: arrays, of which the plan draws, its batches, or other data.

Epsilon is exact for arrays and for the very data set that `plan.batches` made, each draw used once.
Other data are refused where a plan counts on Poisson sampling, unless the user says that an
approximation will do, and are labelled approximate everywhere.
"""

import contextlib
import math
import numbers
import threading

import keras
import tensorflow as tf

from tfdpx._keras import lora, model_internals
from tfdpx.accounting.ledger import USER
from tfdpx.sampling.batch_sampler import is_seeded
from tfdpx.sampling.inputs import check_batch, without_flags
from tfdpx.sampling.random_access import RandomAccess
from tfdpx.spending import budget
from tfdpx.training import checkpoint, replicas, views
from tfdpx.training.clip_policy import planned
from tfdpx.training.session import BUSY, Limit, Progress, Room, Session, begin_alone, stand_by

_KERAS_BATCH_SIZE = 32

# What makes batches, and changes none that are made.
_OF_BATCHES = ("y", "sample_weight", "class_weight", "validation_split")
# What a private `fit` takes beyond Keras's arguments.
ARGUMENTS = ("user_ids", "examples_per_user")


def draw_by_plan(optimizer, model, arguments):
    """Has the optimizer's plan draw the batches of a `fit` on arrays or a `RandomAccess`.

    An epoch has as many updates as Keras would make on the same arrays.

    Args:
        optimizer: The tfdpx optimizer; without a plan nothing changes.
        model: The `keras.Model`.
        arguments: Dict of the arguments of `fit`, which is changed.

    Raises:
        ValueError: If they are not the plan's examples, `batch_size` is not the plan's, or ids of
            people come without a plan that draws them.
    """
    plan, data = optimizer.plan, arguments.get("x")
    is_held = isinstance(data, RandomAccess | list | tuple | dict) or hasattr(data, "shape")
    if not is_held or plan is None:
        _refuse_data_beside(arguments, ARGUMENTS)
    if plan is None and isinstance(data, RandomAccess):
        raise ValueError(
            "A `tfdpx.RandomAccess` is drawn from by the optimizer's plan. Received: an optimizer "
            "with plan=None. Make it with `plan=`, or pass `x=plan.batches(...)`."
        )
    if plan is None or not is_held:
        return
    batch_size = arguments.pop("batch_size", None)
    if batch_size not in (None, plan.batch_size):
        raise ValueError(
            f"Argument `batch_size` must be the plan's, {plan.batch_size}, on which epsilon "
            f"depends. Received: batch_size={batch_size}. Leave it out, or make the plan with "
            f"`batch_size={batch_size}`."
        )
    arguments["x"] = plan.batches(
        data,
        arguments.pop("y", None),
        arguments.pop("sample_weight", None),
        class_weight=arguments.pop("class_weight", None),
        **{name: arguments.pop(name, None) for name in ARGUMENTS},
        validation_split=arguments.pop("validation_split", None) or 0.0,
        optimizer=optimizer,
        pad_to_multiple_of=model.distribute_strategy.num_replicas_in_sync,
    )
    if arguments.get("validation_batch_size") is None:
        arguments["validation_batch_size"] = batch_size
    if arguments.get("steps_per_epoch") is None:
        arguments["steps_per_epoch"] = math.ceil(plan.num_examples / plan.batch_size)


@contextlib.contextmanager
def session_of(optimizer, model, arguments):
    """The `Session` of a `fit`, around it: account and checkpoint know what it trains on.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`.
        arguments: Dict of the arguments of `fit`; `x` may be replaced by an equal data set.

    Raises:
        ValueError: If the batches are another plan's, another optimizer's or of another size, or
            private examples are public ones too.
        BudgetExceeded: If all steps of their plan were taken.
    """
    optimizer.spend_tracker.follow(model.variables)
    replicas.check_layout()
    lora.wake(model)
    data = arguments.get("x")
    policy = optimizer.clip_policy
    policy.check_data(data)
    draws = planned(data)
    if draws is None:
        count = _examples_of(arguments)
        check_unplanned(optimizer, arguments)
        probability = _guess_probability(optimizer, count)
    else:
        count = draws.plan.num_examples
        check_draws(optimizer, draws)
        _refuse_data_beside(arguments)
        probability = draws.plan.sampling_probability
    with (
        Session(optimizer, draws, probability, is_seeded(data)) as session,
        model_internals.keeping_first_epoch(model),
        checkpoint.kept(model, arguments, session, count, build),
    ):
        if draws is not None:
            restored = model_internals.initial_epoch(model)
            first = restored or arguments.get("initial_epoch", 0)
            if restored and not session.left:
                arguments["epochs"] = restored  # The run was finished.
            elif first < arguments.get("epochs", 1):
                session.check_room()
                _lay_out(arguments, session, first, restored is not None)
            arguments["x"] = draws.fitted
            # Keras itself would take flags for weights, and ids for a part of the batch.
            build(model, arguments)
            per_user = getattr(draws.examples, "per_user", None)
            if per_user != optimizer.per_user:  # TensorFlow would trace a step for any number.
                optimizer.per_user, model.train_function = per_user, None
            arguments["x"] = policy.dataset(draws)
            arguments["shuffle"] = False  # Keras would warn that it does not shuffle a data set.
            if draws.held_out is not None and arguments.get("validation_data") is None:
                arguments["validation_data"] = draws.held_out
        optimizer.spend_tracker.warn_of_unseen()
        yield session


@contextlib.contextmanager
def unplanned_step(optimizer, model, rows, sample_weight):
    """Around `train_on_batch`, also inside of a `fit`: no plan drew such a batch.

    Args:
        optimizer: The tfdpx optimizer.
        model: The `keras.Model`.
        rows: Int, examples of the batch, or None where unknown.
        sample_weight: As given, or None.
    """
    _refuse_unknown_people(optimizer)
    if sample_weight is None and optimizer.noise_multiplier:
        _check_size(optimizer, rows, exactly=False)
    optimizer.clip_policy.split(None, None)
    account = optimizer.spend_tracker
    with optimizer.state.lock:
        session = optimizer.session
        if session is not None and session.thread != threading.get_ident():
            raise RuntimeError(BUSY)
        account.follow(model.variables)
        account.warn_of_unseen()
        if session is None:
            stand_by(optimizer)
        else:
            begin_alone(optimizer)
        if optimizer.state.updates >= optimizer.state.end:
            raise budget.used_up(optimizer, (session or optimizer).plan)
        probability, seeded = _guess_probability(optimizer, None), optimizer.seed is not None
        usual = account.open(probability, exact=False, seeded=seeded)
        try:
            yield
        finally:
            account.open(*usual)
            if session is not None:
                session.begin()


def build(model, arguments):
    """Builds a compiled model and its optimizer for what `fit` is given, without reading it.

    Args:
        model: A model compiled with a tfdpx optimizer.
        arguments: Dict of the arguments of `fit`.
    """
    optimizer = model_internals.innermost(model.optimizer)
    data = tuple(arguments.get(name) for name in ("x", "y", "sample_weight"))
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
        known = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        return tf.zeros([1, *(n or 1 for n in leaf.shape[1:])], leaf.dtype) if known else None

    data = tf.nest.map_structure(example, data)
    check_batch(model, data)
    x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
    with model.distribute_strategy.scope():
        views.build(model, x, y, without_flags(weights))
        optimizer.build(model.trainable_variables)


def add_limit(arguments):
    """Has a `fit` end with its session, and its progress bar show the steps until then.

    Args:
        arguments: Dict of the arguments of `fit`; `callbacks` may be replaced.
    """
    given = arguments.get("callbacks")
    if isinstance(given, keras.callbacks.CallbackList):  # It has its model and its bar already.
        return
    given = checkpoint.in_order(
        [callback for callback in tf.nest.flatten(given or []) if callback is not None]
    )
    has_bar = any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in given)
    bar = [] if has_bar or arguments.get("verbose", "auto") == 0 else [Progress()]
    arguments["callbacks"] = [Limit(), *given, *bar, Room()]


def _refuse_data_beside(arguments, names=_OF_BATCHES):
    """Raises ValueError if `fit` was given what belongs to `plan.batches`."""
    for name in names:
        value = arguments.get(name)
        if value is not None and not (name == "validation_split" and value == 0):
            there = "x, y" if name == "y" else f"x, y, {name}={name}"
            raise ValueError(
                f"Argument `{name}` of `fit` cannot change batches that are drawn by a plan. Give "
                f"it where they are made: `plan.batches({there})`. Received: {name} of type "
                f"{type(value).__name__}."
            )


def _lay_out(arguments, session, first, is_resumed):
    """Shares the steps that are left out to the epochs that `fit` was asked for, from `first` on.

    Keras would make one pass an epoch, and no draw may be used twice: the first epoch would have
    all of them.
    """
    if arguments.get("steps_per_epoch") is None:
        epochs = arguments.get("epochs", 1)
        # A resumed run has epochs as long as they were.
        whole = math.ceil(session.draws.plan.steps / epochs) if is_resumed else 0
        arguments["steps_per_epoch"] = max(whole, math.ceil(session.left / (epochs - first)))


def check_draws(optimizer, draws):
    """Raises ValueError unless batches of `draws` are what `optimizer` accounts for.

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
    for name in ("num_examples", "batch_size", "sampling", "unit"):
        theirs = getattr(draws.plan, name)
        ours = optimizer.batch_size if name == "batch_size" else getattr(plan, name)
        if theirs != ours:
            raise ValueError(
                f"These batches are of a plan with {name}={theirs}, and the optimizer counts on "
                f"{name}={ours}: its epsilon would not be theirs. Train on `plan.batches(...)` of "
                "the plan that the optimizer was given."
            )
    if draws.optimizer is not None and draws.optimizer is not optimizer:
        raise ValueError(
            "These batches were made for another optimizer. Make them by "
            "`plan.batches(x, y, optimizer=model.optimizer)` after the model was compiled."
        )


def check_unplanned(optimizer, arguments):
    """Refuses batches that the optimizer does not count on.

    Args:
        optimizer: The tfdpx optimizer.
        arguments: Dict of the arguments of `fit`.
    """
    _refuse_unknown_people(optimizer)
    if not optimizer.noise_multiplier:
        return
    data, rows = arguments.get("x"), None
    if isinstance(data, tf.data.Dataset):
        leaves = tf.nest.flatten(data.element_spec)
        weighted = isinstance(data.element_spec, tuple) and len(data.element_spec) > 2
        rows = None if weighted or not leaves[0].shape.rank else leaves[0].shape[0]
    elif count := _examples_of(arguments):
        rows = min(arguments.get("batch_size") or _KERAS_BATCH_SIZE, count)
    _check_size(optimizer, rows)
    callbacks = getattr(arguments.get("callbacks"), "callbacks", arguments.get("callbacks"))
    agreed = any(getattr(each, "allow_approximate", False) for each in tf.nest.flatten(callbacks))
    if optimizer.plan is not None and not optimizer.plan.is_approximate and not agreed:
        raise ValueError(
            "The plan counts on Poisson sampling, and `fit` was given batches that the plan did "
            f"not draw, or that were changed (by `take`, `cache`, `map`, ...). Received: x of type "
            f"{type(data).__name__}. Give `fit` arrays, a `tfdpx.RandomAccess`, or "
            "`plan.batches(...)` as it is; or say that an approximation will do: "
            "`callbacks=[tfdpx.PrivacyBudget(plan, allow_approximate=True)]`."
        )


def _refuse_unknown_people(optimizer):
    if optimizer.of_users:
        raise ValueError(
            'A plan with unit="user" draws people, and whose these examples are is unknown. Train '
            "with `fit(x, y, user_ids=ids)`, or on `plan.batches(x, y, user_ids=ids)` as it is."
        )


def _check_size(optimizer, rows, exactly=True):
    if rows is None:
        return
    other = rows != optimizer.batch_size and exactly and optimizer.plan is not None
    if other or rows > optimizer.batch_size:
        raise ValueError(
            f"These batches have {rows} examples, and the optimizer counts on "
            f"batch_size={optimizer.batch_size}: epsilon would not hold for these batches. Train "
            "on `plan.batches(x, y)`, or give both the same batch size."
        )


def _guess_probability(optimizer, count):
    """The probability that an example is in a batch; None if the number of examples is unknown.

    Args:
        optimizer: The tfdpx optimizer.
        count: Int, the examples that are trained on, or None.
    """
    planned = optimizer.plan and optimizer.plan.sampling_probability
    given = min(1.0, optimizer.batch_size / count) if count else None
    return max((p for p in (planned, given) if p is not None), default=None)


def _examples_of(arguments):
    """Int: the examples that `fit` would train on, if its arguments are arrays; else None."""
    count = _length(arguments.get("x"))
    return count and math.floor(count * (1 - (arguments.get("validation_split") or 0)))


def _length(data):
    """The number of examples of arrays; None for anything else."""
    leaves = [t for t in tf.nest.flatten(data) if t is not None]
    if not leaves or not all(hasattr(t, "shape") and len(t.shape) for t in leaves):
        return None
    count = leaves[0].shape[0]
    return int(count) if isinstance(count, numbers.Integral) else None
