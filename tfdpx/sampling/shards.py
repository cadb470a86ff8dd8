"""Splits the examples of a draw over replicas, without communication between hosts.

If a step draws n examples, replica p of R takes the examples p, p + R, p + 2 R, ... of the draw.
Each replica's share has at most ceil(n / R) examples, so no replica waits long for another. All
hosts compute the same draw from the seed and the step, and each host takes its part of the draw. So
no example is taken twice, and none is lost. A replica takes part in a step even if its share is
only padding.

Keras's `fit` splits a batch in another way: of R * m rows, replica p takes the rows [p * m, (p + 1)
* m). `interleave_shards` orders a whole batch for this split: the R shares come one after the
other, each with its padding.
"""

import tensorflow as tf


class ReplicaShards:
    """Computes the share of a draw that each replica of this host takes.

    Args:
        capacity: Int, the number of rows of a global batch.
        input_context: `tf.distribute.InputContext` of this host, or None for whole batches.

    Attributes:
        rows: Int, the number of rows of one share.
        replicas: Range, the numbers of this host's replicas.
        is_split: Bool, whether there is an `input_context`.

    Raises:
        ValueError: If the number of replicas does not divide `capacity`, or hosts would have
            different numbers of replicas.
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
        """Returns a data set of int64 pairs (step, replica) for the replicas of this host.

        The steps go from `first` to `last` (exclusive).

        The data set calls no Python function, because the hosts of a TPU run in other processes.
        """
        count = len(self.replicas)
        return tf.data.Dataset.range(first * count, last * count).map(
            lambda index: (index // count, self.replicas.start + index % count)
        )

    def endless(self, dataset):
        """Returns `dataset` followed by endless batches of padding (zeros with sample_weight 0).

        With endless data, `tf.distribute` need not ask at every step which hosts have data left.
        """

        def zeros(spec):
            return tf.zeros(spec.shape, spec.dtype) if isinstance(spec, tf.TensorSpec) else None

        padding = tf.nest.map_structure(zeros, dataset.element_spec)
        return dataset.concatenate(tf.data.Dataset.from_tensors(padding).repeat())

    def cut(self, rows, replica):
        """Returns the drawn examples of one replica, or all of them if draws are not split.

        Args:
            rows: int64 tensor [n], the indices of the examples that a step draws, n <= capacity.
            replica: Scalar int64 tensor, the number of a replica in `replicas`.
        """
        return rows[replica :: self._count] if self.is_split else rows


def interleave_shards(tensor, count):
    """Returns a tensor [n, ...] with its rows ordered by share.

    There are `count` shares, and each has every `count`-th row. For example, with `count=2`, six
    rows get the order 0, 2, 4, 1, 3, 5.
    """
    if count == 1:
        return tensor
    rows = tf.reshape(tensor, tf.concat([[-1, count], tf.shape(tensor)[1:]], axis=0))
    rows = tf.transpose(rows, [1, 0, *range(2, rows.shape.rank)])
    return tf.reshape(rows, tf.concat([[-1], tf.shape(rows)[2:]], axis=0))


def check_divides(replicas, rows, what):
    """Raises ValueError unless `replicas` divides `rows`. The message suggests valid numbers.

    Args:
        replicas: Int, the number of replicas.
        rows: Int, the number of rows.
        what: String, the name of `rows` in the message, for example "rows a batch".
    """
    if rows % replicas:
        below = rows // replicas * replicas
        sizes = f"{below} or {below + replicas}" if below else str(replicas)
        raise ValueError(
            f"{replicas} replicas cannot share {rows} {what} evenly. Use {sizes}, or a number of "
            f"replicas that divides {rows}."
        )
