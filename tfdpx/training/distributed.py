"""`fit` on many devices and many hosts, also where Keras's `fit` fails.

With TensorFlow 2.21 and Keras 3.15, `keras.Model.fit` works

- under `MirroredStrategy` with `jit_compile=False` and `steps_per_execution=1`, and
- under `TPUStrategy` on one host (not tested here).

Keras's `fit` fails, with any optimizer,

- under `MirroredStrategy` with `jit_compile=True`: XLA cannot compile a function that reads
  variables on several devices (`evaluate` fails too);
- under `MirroredStrategy` with `steps_per_execution` > 1: TensorFlow cannot trace the loop;
- under `MultiWorkerMirroredStrategy`: `fit` and `evaluate` convert `PerReplica` values to tensors.

The `fit` of this module works in all of these cases, and on one device. As for Keras's `fit`, build
and compile the model within `strategy.scope()`:

    strategy = tf.distribute.MirroredStrategy()
    with strategy.scope():
        model = tfdpx.models.WideResNet(16, 4, 10)
        model.compile(tfdpx.DPSGD(4.0, plan=plan), loss, metrics=["accuracy"])
    tfdpx.distributed.fit(model, plan, x, y, callbacks=[tfdpx.PrivacyBudget(plan)])
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdpx._keras import metric_internals, model_internals, step_context
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.checks.callbacks import check_callbacks, check_validation_data
from tfdpx.checks.declared import check_methods
from tfdpx.per_example.loss import row_losses
from tfdpx.per_example.rows import Rows
from tfdpx.sampling import sampled_batches, shards
from tfdpx.sampling.batch_sampler import check_optimizer, sampler_of
from tfdpx.sampling.examples import as_examples
from tfdpx.sampling.inputs import present_rows
from tfdpx.training import replicas
from tfdpx.training.budget import StopAtBudget
from tfdpx.training.fit import Request, training
from tfdpx.training.norms import norm_refreshes
from tfdpx.training.step import build_model, regularization, show_losses


def fit(
    model: keras.Model,
    plan: PrivacyPlan,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    class_weight: dict[int, float] | None = None,
    user_ids: Any = None,
    examples_per_user: int | None = None,
    seed: int | None = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    initial_epoch: int = 0,
    validation_data: Any = None,
    validation_batch_size: int = 500,
    callbacks: Any = None,
    verbose: int | str = "auto",
) -> keras.callbacks.History:
    """Trains for the plan's steps, like `model.fit(plan.batches(x, y), ...)`, on every replica.

    On several hosts, each host runs the same program with the same arguments. Every host draws its
    share of one Poisson sample. The sample depends only on the seed and the step. An update makes
    one all-reduce of the clipped sums, and all replicas add the same noise. Training never goes
    beyond the plan's last step.

    Every host runs the `callbacks` that it got. Callbacks that write files should be passed only on
    the chief, and callbacks that may stop the training must be passed on every host. In the `logs`
    of a batch, metrics are means over this host's replicas, as in Keras. In the `logs` of an epoch,
    they are exact means over all replicas.

    Args:
        model: A `keras.Model` compiled with a tfdpx optimizer. `jit_compile`,
            `steps_per_execution` and `run_eagerly` mean the same as in Keras.
        plan: The optimizer's `tfdpx.PrivacyPlan`.
        x: As for `plan.batches`: all of the data, the same on every host.
        y: As `x`.
        sample_weight: As for `plan.batches`.
        class_weight: As for `plan.batches`.
        user_ids: As for `plan.batches`.
        examples_per_user: As for `plan.batches`.
        seed: Int, the seed of the draws, for experiments. Private training needs None, which makes
            fresh draws. On several hosts, the chief's seed counts.
        epochs: Int, the number of the epoch at which training ends, as for `keras.Model.fit`.
        steps_per_epoch: Int, the number of updates in an epoch. None means all updates that the
            plan has left.
        initial_epoch: Int, the number of the epoch at which training begins, counted from 0.
        validation_data: Optional `(x, y)` or `(x, y, sample_weight)` of arrays, or `(x,)` of a
            `tfdpx.RandomAccess`, to evaluate after each epoch. Callbacks may act on the resulting
            metrics only if the optimizer has `public_validation=True`. The arrays must not share
            memory with `x`.
        validation_batch_size: Int, the number of examples in a step of evaluation, over all
            replicas.
        callbacks: List of `keras.callbacks.Callback`.
        verbose: As for `keras.Model.fit`.

    Returns:
        The `keras.callbacks.History`.

    Raises:
        TypeError: If the model's optimizer is not a tfdpx optimizer.
        ValueError: If the plan is not the optimizer's, or hosts have different data or arguments.
    """
    optimizer, strategy = model.optimizer, model.distribute_strategy
    check_optimizer(optimizer, plan)
    check_methods(model)
    examples = as_examples(x, y, sample_weight)
    check_validation_data(validation_data, x, optimizer)
    check_callbacks(callbacks, optimizer)
    shards.check_divides(strategy.num_replicas_in_sync, plan.batch_size, "examples of `batch_size`")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ValueError("Argument `callbacks` must be a list. Received: a CallbackList.")
    callbacks = keras.callbacks.CallbackList(
        callbacks, add_history=True, add_progbar=verbose != 0, model=model,
        verbose=1 if verbose == "auto" else verbose, epochs=epochs,
        steps=steps_per_epoch or max(optimizer.updates_left(plan), 1),
    )  # fmt: skip
    batch_arguments = dict(
        class_weight=class_weight,
        user_ids=user_ids,
        examples_per_user=examples_per_user,
        optimizer=optimizer,
    )
    plan_batches = plan.batches(x, y, sample_weight, seed=seed, **batch_arguments)
    arrays = tf.nest.map_structure(_zeros, plan_batches.element_spec)
    with strategy.scope():
        build_model(model, *arrays)
    request = Request(plan_batches, callbacks=callbacks, epochs=epochs, initial_epoch=initial_epoch)
    with (
        step_context.driving(model, "tfdpx"),
        training(optimizer, model, request) as (session, _),
    ):
        first_callbacks = [*norm_refreshes(model, session), StopAtBudget()]
        for callback in first_callbacks:
            callback.set_model(model)
            callback.set_params(callbacks.params)
        callbacks.callbacks[:0] = first_callbacks
        model.stop_training = False
        callbacks.on_train_begin()
        # This comes after the callbacks have begun, because one may have restored a checkpoint.
        initial_epoch = model_internals.initial_epoch(model) or initial_epoch
        run_arguments = [epochs, steps_per_epoch, initial_epoch, model.steps_per_execution]
        seed = share_secret(
            strategy,
            session,
            seed,
            {
                "data": (
                    x.fingerprint() if examples is x else x,
                    y, sample_weight, class_weight and sorted(class_weight.items()),
                    user_ids, examples_per_user,
                ),
                "plans": plan.get_config(),
                "optimizers": keras.saving.serialize_keras_object(optimizer),
                "weights or optimizer states": [*model.weights, *optimizer.variables],
                "arguments of `fit` or `compile`": run_arguments,
                "seeds of optimizers": optimizer.seed,
            },
        )  # fmt: skip
        draw_seed = tuple(session.draw_seed()) if seed is None else seed

        def make_share(context):
            batches = plan.batches(
                x, y, sample_weight, seed=draw_seed,
                pad_to_multiple_of=strategy.num_replicas_in_sync, input_context=context,
                **batch_arguments,
            )  # fmt: skip
            draws = sampler_of(batches)
            return draws.fitted if optimizer.individual is None else draws.with_ids

        batches = iter(strategy.distribute_datasets_from_function(make_share))
        execute = _make_execute(model, strategy)
        evaluate = validation_data and _Evaluator(
            model, strategy, validation_data, validation_batch_size
        )
        logs = {}
        for epoch in range(initial_epoch, epochs):
            callbacks.on_epoch_begin(epoch)
            logs = _epoch(model, execute, batches, session, steps_per_epoch, callbacks)
            if evaluate:
                logs.update({f"val_{name}": value for name, value in evaluate(callbacks).items()})
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training or not session.left:
                break
        optimizer.finalize_variable_values(model.trainable_variables)
        callbacks.on_train_end(logs)
    return model.history


def _zeros(spec):
    """Returns zeros [1, ...] with the shape and dtype of a `tf.TensorSpec` [batch, ...].

    If `spec` is anything else, the result is None.
    """
    is_spec = isinstance(spec, tf.TensorSpec)
    return tf.zeros([1, *spec.shape[1:]], spec.dtype) if is_spec else None


def _epoch(model, execute, batches, session, steps, callbacks):
    """Trains for one epoch of `steps` updates, and returns its metrics, a dict.

    With `steps=None`, the epoch has all updates that are left.
    """
    model.reset_metrics()
    steps = session.left if steps is None else min(steps, session.left)
    for step in range(0, steps, model.steps_per_execution):
        count = min(model.steps_per_execution, steps - step)
        callbacks.on_train_batch_begin(step)
        count = min(count, session.left)
        logs = execute(batches, tf.constant(count))
        callbacks.on_train_batch_end(step + count - 1, logs)
        if model.stop_training:
            break
    return _to_numbers(model.get_metrics_result())


def _to_numbers(logs):
    """Returns metrics of all replicas as Python numbers or arrays. Call it on all hosts."""
    arrays = {name: keras.ops.convert_to_numpy(value) for name, value in logs.items()}
    return {name: array if array.ndim else array.item() for name, array in arrays.items()}


def _make_execute(model, strategy):
    """Returns a function `execute(batches, count)` that makes `count` updates and returns logs."""

    def execute(batches, count):
        if model.steps_per_execution == 1:
            strategy.run(model.train_step, args=(next(batches),))
        else:

            def update(step):
                strategy.run(model.train_step, args=(next(batches),))
                return step + 1

            tf.while_loop(lambda step: step < count, update, [0], parallel_iterations=1)
        results = strategy.run(model.get_metrics_result)
        return {
            name: tf.add_n(values) / len(values)
            for name, value in results.items()
            for values in [strategy.experimental_local_results(value)]
        }

    return execute if model.run_eagerly else tf.function(execute, autograph=False)


class _Evaluator:
    """Evaluates a model on all replicas, as `model.evaluate` does, and leaves out padding."""

    def __init__(self, model, strategy, data, batch_size):
        self._model, self._strategy = model, strategy
        self._examples, num_replicas = as_examples(*data), strategy.num_replicas_in_sync
        self._capacity = (
            math.ceil(min(batch_size, self._examples.count) / num_replicas) * num_replicas
        )

        @tf.function(autograph=False)
        def evaluate_step(batches):
            strategy.run(self._step, args=(next(batches),))

        self._run = evaluate_step

    def __call__(self, callbacks):
        """Evaluates the model. Returns a dict of losses and metrics by name, as Python floats."""
        steps = math.ceil(self._examples.count / self._capacity)
        batches = iter(
            self._strategy.distribute_datasets_from_function(
                lambda context: sampled_batches.batches_in_order(
                    self._examples, capacity=self._capacity, input_context=context
                )
            )
        )
        callbacks.on_test_begin()
        self._model.reset_metrics()
        for step in range(steps):
            callbacks.on_test_batch_begin(step)
            self._run(batches)
            callbacks.on_test_batch_end(step)
        logs = _to_numbers(self._model.get_metrics_result())
        callbacks.on_test_end(logs)
        return logs

    def _step(self, data):
        model = self._model
        x, y, sample_weight = data
        present = present_rows(sample_weight, Rows(x).count)
        sample_weight = sample_weight if self._examples.is_weighted else None
        y_pred = model(x, training=False)
        rows = row_losses(model, x, y, y_pred, sample_weight)
        count = tf.reduce_sum(tf.cast(present, "float32"))

        def total(losses):
            return tf.reduce_sum(tf.where(present, losses, 0.0))

        penalty, _ = regularization(model.trainable_variables)
        tracked = [total(losses) for losses in rows.tracked]
        show_losses(model, total(rows.losses), tracked, count, penalty)
        metric_internals.compute_metrics(model, x, y, y_pred, sample_weight, present)


def agree(strategy, seed, parts):
    """Returns the chief's seed, after checking that all hosts hold equal `parts`.

    Each host computes its share of a batch. If hosts had different data, weights or settings, an
    example could be drawn twice in one update, or weights would drift apart. So each host sends
    digests of its `parts`, and all hosts stop if two digests differ. Call this function on every
    host. The seed is sent over the hosts' network, like gradients.

    Args:
        strategy: The `tf.distribute.Strategy`.
        seed: Int in [0, 2**128), or None for a seed from the chief's operating system.
        parts: Dict of the values to compare. A key is a name for the error; a value is a nest of
            arrays or variables, or a JSON value.

    Returns:
        The chief's seed, an int.

    Raises:
        ValueError: On every host, if two hosts differ in a part.
    """
    if seed is None:
        seed = secrets.randbits(128)
    is_multi_host = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    if not is_multi_host or replicas.hosts(strategy) == 1:
        return seed
    words = [seed >> shift & (2**32 - 1) for shift in range(0, 128, 32)]
    digests = [int.from_bytes(_digest(part)[:7], "big") for part in parts.values()]
    rows = _gather(strategy, np.array([*words, *digests], "int64"))
    for name, column in zip(parts, rows[:, 4:].T, strict=True):
        if len(set(column)) > 1:
            hosts = np.flatnonzero(column != column[0])
            raise ValueError(
                f"The hosts hold different {name}: replicas {hosts.tolist()} differ from replica 0."
                " Every host must be given the same, in the same order, and restore the same "
                "checkpoint."
            )
    return sum(
        int(word) << shift for word, shift in zip(rows[0, :4], range(0, 128, 32), strict=True)
    )


def share_secret(strategy, session, seed, parts):
    """Gives the sessions of all hosts the secret that the chief drew, so all make the same draws.

    First calls `agree`, which checks that all hosts hold equal `parts`.

    Args:
        strategy: The `tf.distribute.Strategy`.
        session: The `tfdpx.training.session.Session` of this host.
        seed: Int, the seed of the draws, or None.
        parts: As for `agree`.

    Returns:
        The chief's seed for the draws, or None if `seed` is None.

    Raises:
        ValueError: On every host, if two hosts differ in a part.
    """
    if replicas.hosts(strategy) == 1:
        return seed
    chief_seed = agree(strategy, seed, {**parts, "arguments `seed`": seed is None})
    session.share(agree(strategy, None, {}))
    return None if seed is None else chief_seed


def _gather(strategy, vector):
    """Returns the vectors of all hosts, an array [replicas, length]. Call it on every host.

    Each row is the `vector` [length] of the host that the replica belongs to.
    """

    def gather():
        context = tf.distribute.get_replica_context()
        return context.all_gather(tf.constant(vector)[tf.newaxis], axis=0)

    rows = strategy.run(tf.function(gather, autograph=False))
    return strategy.experimental_local_results(rows)[0].numpy()


def _digest(part):
    """Returns the BLAKE2 digest of a nest of arrays and variables, or of a JSON value."""
    digest = hashlib.blake2b()
    for leaf in tf.nest.flatten(part):
        if isinstance(leaf, keras.Variable) or hasattr(leaf, "dtype"):
            array = np.ascontiguousarray(keras.ops.convert_to_numpy(leaf))
            digest.update(f"{array.dtype}{array.shape}".encode())
            is_text = array.dtype == object
            digest.update(repr(array.tolist()).encode() if is_text else array.view("uint8").data)
        else:
            digest.update(json.dumps(leaf, default=str).encode())
    return digest.digest()
