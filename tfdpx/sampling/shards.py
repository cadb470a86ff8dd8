"""The examples of a draw that each replica takes, computed by every host without communication.

Of the n examples that a step draws, in order, replica p of R takes numbers p, p + R, p + 2 R, ...:
at most ceil(n / R): none waits long for another. All hosts compute the same draw from
(seed, step) and cut out their own part, so no example is taken twice and none is lost. A replica
takes part even if its share is all padding.

Keras's `fit` splits a batch by itself: replica p takes the rows [p * m, (p + 1) * m) of R * m. For
it `interleave_shards` puts the R shares of a whole batch one after the other, each with its own
padding.
"""

import tensorflow as tf


class ReplicaShards:
    """The shares of this host's replicas.

    Args:
        capacity: Int, rows of a global batch.
        input_context: `tf.distribute.InputContext` of this host, or None for whole batches.

    Attributes:
        rows: Int, rows of one share.
        replicas: Range, the numbers of this host's replicas.
        is_split: Bool, whether there is an `input_context`.

    Raises:
        ValueError: If the replicas do not divide `capacity`, or the hosts the replicas.
    """

    def __init__(self, capacity, input_context=None):
        self.is_split = input_context is not None
        replicas = hosts = 1
        host = 0
        if self.is_split:
            replicas = input_context.num_replicas_in_sync
            hosts, host = input_context.num_input_pipelines, input_context.input_pipeline_id
        if replicas % hosts:
            raise ValueError(
                "Every host must have the same number of replicas. Received: "
                f"{replicas} replicas on {hosts} hosts."
            )
        check_divides(replicas, capacity, "rows a batch")
        self._count = replicas
        self.rows = capacity // replicas
        replicas_per_host = replicas // hosts
        self.replicas = range(host * replicas_per_host, (host + 1) * replicas_per_host)

    def steps(self, first, last):
        """Returns pairs (step, replica) of int64 for steps [first, last) and this host's replicas.

        Made without Python functions, because a TPU's hosts do not share this process.
        """
        count = len(self.replicas)
        return tf.data.Dataset.range(first * count, last * count).map(
            lambda index: (index // count, self.replicas.start + index % count)
        )

    def endless(self, dataset):
        """Returns `dataset` followed by batches without examples: zeros, with sample_weight 0.

        `tf.distribute` then need not ask all hosts at every step which of them have data left.
        """

        def zeros(spec):
            return tf.zeros(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else None

        padding = tf.nest.map_structure(zeros, dataset.element_spec)
        return dataset.concatenate(tf.data.Dataset.from_tensors(padding).repeat())

    def cut(self, rows, replica):
        """Returns the examples in the share of `replica`, or all of them for a whole batch.

        Args:
            rows: int64 tensor [n], the examples that a step draws, n at most `capacity`.
            replica: Scalar int64 tensor, a number of `replicas`.
        """
        return rows[replica :: self._count] if self.is_split else rows


def interleave_shards(tensor, count):
    """Returns the rows of a tensor [n, ...] ordered by shares: each has every `count`-th row."""
    if count == 1:
        return tensor
    rows = tf.reshape(tensor, tf.concat([[-1, count], tf.shape(tensor)[1:]], axis=0))
    rows = tf.transpose(rows, [1, 0, *range(2, rows.shape.rank)])
    return tf.reshape(rows, tf.concat([[-1], tf.shape(rows)[2:]], axis=0))


def check_divides(replicas, rows, what):
    """Raises ValueError, with numbers that are possible, unless `replicas` divides `rows`.

    Args:
        replicas: Int.
        rows: Int.
        what: String, the things that `rows` counts, for the message.
    """
    if rows % replicas:
        below = rows // replicas * replicas
        sizes = f"{below} or {below + replicas}" if below else str(replicas)
        raise ValueError(
            f"{replicas} replicas cannot share {rows} {what} evenly. Use {sizes}, or a number of "
            f"replicas that divides {rows}."
        )
