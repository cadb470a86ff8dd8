"""How the replicas of `tf.distribute` share a batch in the private step and in `fit`.

For the guarantee, each example may be in an update only once, on a single replica. Keras's `fit`
splits batches in this way on one host, and `tfdpx.distributed.fit` does so on many hosts.
Other calls of the step on replicas (`train_on_batch`, `strategy.run`) are refused, because they may
give all replicas the same rows, or batches of different steps.
"""

import math

import keras
import tensorflow as tf

from tfdpx._keras import step_context
from tfdpx.checks import UnfitForPrivacy
from tfdpx.sampling import shards

_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.TPUStrategy,
)


def is_tpu(strategy):
    """Returns whether `strategy` is for TPUs, where XLA compiles everything."""
    return isinstance(strategy, tf.distribute.TPUStrategy)


def hosts(strategy):
    """Returns the number of hosts of a `tf.distribute.Strategy`, an int."""
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        cluster = strategy.cluster_resolver.cluster_spec()
        return max(sum(cluster.num_tasks(job) for job in cluster.jobs), 1)
    return strategy.extended.num_hosts if is_tpu(strategy) else 1


def check_keras_fit(model, data):
    """Refuses a call of `keras.Model.fit` under a strategy if it would be wrong or fail.

    Args:
        model: A compiled `keras.Model`.
        data: The argument `x` of `fit`.

    Raises:
        UnfitForPrivacy: If `fit` would be wrong or fail. The message says how to fix it.
        ValueError: If the number of replicas does not divide the rows of a batch.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1 and hosts(strategy) == 1:
        return
    remedy = "Train with `tfdpx.distributed.fit(model, plan, x, y)`"
    if isinstance(data, tf.distribute.DistributedDataset):
        raise UnfitForPrivacy(
            "`fit` received a distributed dataset. Its replicas may hold batches of different "
            f"steps, so that an example counts twice in an update. {remedy}, or give `fit` "
            "`plan.batches(x, y, pad_to_multiple_of=replicas)` as it is."
        )
    if hosts(strategy) > 1:
        raise UnfitForPrivacy(
            f"Keras's `fit` cannot share one Poisson sample over {hosts(strategy)} hosts. {remedy}."
        )
    is_compiled = model.jit_compile and not is_tpu(strategy)
    if is_compiled or model.steps_per_execution > 1:
        raise UnfitForPrivacy(
            "Keras's `fit` fails under a strategy of several replicas with `jit_compile=True` or "
            f"`steps_per_execution` > 1. Received: jit_compile={model.jit_compile}, "
            f"steps_per_execution={model.steps_per_execution}. {remedy}, or compile without them."
        )
    if isinstance(data, tf.data.Dataset):
        # With uneven shares, views would depend on the replica.
        rows = tf.nest.flatten(data.element_spec)[0].shape[0]
        if rows is not None:
            shards.check_divides(strategy.num_replicas_in_sync, rows, "rows a batch")


def check_layout():
    """Refuses the data and model parallelism of `keras.distribution`, which needs JAX.

    Raises:
        UnfitForPrivacy: If a distribution is set. The message says how to fix it.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise UnfitForPrivacy(
            "Keras shares out batches and weights by `keras.distribution` with JAX alone: with "
            "TensorFlow one device would hold and do everything. Received: "
            f"{type(distribution).__name__}. Call keras.distribution.set_distribution(None), make "
            "the model within a tf.distribute strategy to share batches, and where the weights are "
            "too many for a device, train few of them in bfloat16 (tfdpx.layers.trainable)."
        )


def check_context(model):
    """Returns the replica context of a private step, after checking that it may run there.

    Args:
        model: The `keras.Model`.

    Returns:
        `tf.distribute.ReplicaContext`.

    Raises:
        UnfitForPrivacy: If the strategy is not supported, or no `fit` has split the rows over the
            replicas.
    """
    strategy, context = tf.distribute.get_strategy(), tf.distribute.get_replica_context()
    if context is not None and context.num_replicas_in_sync == 1 and hosts(strategy) == 1:
        if not isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
            return context
    if not isinstance(strategy, _STRATEGIES):
        raise UnfitForPrivacy(
            f"Private training does not support {type(strategy).__name__}. Use one of "
            f"{', '.join(c.__name__ for c in _STRATEGIES)}."
        )
    if context is None or step_context.driver(model) is None:
        raise UnfitForPrivacy(
            f"A private step on {strategy.num_replicas_in_sync} replicas must be run by `model.fit`"
            " or `tfdpx.distributed.fit`, which split each batch over them. `train_on_batch` and "
            "`strategy.run` may count an example more than once."
        )
    return context


def compile_per_replica(model):
    """Returns whether the step itself compiles each replica's part with XLA.

    The step does so only in `tfdpx.distributed.fit`. Keras's `fit` compiles the whole step, and on
    a TPU everything is compiled anyway.
    """
    strategy = tf.distribute.get_strategy()
    return step_context.driver(model) == "tfdpx" and model.jit_compile and not is_tpu(strategy)


def interleave_batches(model, session, batches):
    """Reorders a plan's batches, so Keras's split gives replicas equally many examples.

    Args:
        model: The `keras.Model`.
        session: The `tfdpx.training.session.Session` of the `fit`.
        batches: The `x` of the `fit`.
    """
    count = model.distribute_strategy.num_replicas_in_sync
    if count == 1 or not is_interleaved(model, session):
        return batches

    def interleave(*batch):
        return tf.nest.map_structure(
            lambda t: None if t is None else shards.interleave_shards(t, count), batch
        )

    return batches.map(interleave)


def is_interleaved(model, session):
    """Returns whether a replica takes every R-th row of a batch, rather than a block of rows."""
    is_drawn = session is not None and session.draws is not None
    return step_context.driver(model) == "tfdpx" or is_drawn


def select_replica_rows(nest, count, context, in_shards):
    """Returns this replica's rows of a nest of tensors [replicas * count, ...].

    Args:
        nest: Nest of tensors in the order of the draw, or None.
        count: Int or scalar tensor, the number of rows of a replica.
        context: `tf.distribute.ReplicaContext`.
        in_shards: The result of `is_interleaved`.
    """
    if context.num_replicas_in_sync == 1:
        return nest

    def select(tensor):
        if in_shards:
            tensor = shards.interleave_shards(tensor, context.num_replicas_in_sync)
        # XLA must know the start of a slice at compile time, so rows are gathered instead.
        parts = tf.reshape(tensor, [context.num_replicas_in_sync, count, *tensor.shape[1:]])
        return tf.gather(parts, context.replica_id_in_sync_group)

    return tf.nest.map_structure(lambda t: t if t is None else select(t), nest)


def scatter_to_replica_slot(tensor):
    """Returns `tensor` [..., n] among zeros, as a tensor [..., replicas * n].

    Replica p places its `tensor` at [..., p * n : (p + 1) * n]. The sum over replicas then holds
    the tensors of all replicas, one after the other.
    """
    context = tf.distribute.get_replica_context()
    slot = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync)
    spread = tensor[..., tf.newaxis, :] * slot[:, tf.newaxis]
    return tf.reshape(spread, [*tensor.shape[:-1], -1])


def sum_over_replicas(nest, context):
    """Returns the sums of float32 tensors over all replicas, by one all-reduce of one vector.

    Args:
        nest: Nest of float32 tensors of static shapes, the same on every replica.
        context: `tf.distribute.ReplicaContext`.

    Returns:
        Nest of tensors of the same shapes.
    """
    if context.num_replicas_in_sync == 1:
        return nest
    tensors = tf.nest.flatten(nest)
    vector = tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)
    vector = context.all_reduce(tf.distribute.ReduceOp.SUM, vector)
    pieces = tf.split(vector, [math.prod(t.shape) for t in tensors])
    sums = [tf.reshape(p, t.shape) for p, t in zip(pieces, tensors, strict=True)]
    return tf.nest.pack_sequence_as(nest, sums)
