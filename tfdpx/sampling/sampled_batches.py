"""Draws batches of fixed shapes by Poisson sampling or shuffling. Draws can resume at any step.

Sampling reduces the privacy loss of a step (amplification by sampling), but only while the drawn
examples stay secret. Anyone who knows the seed can repeat every draw; against such an attacker,
sampling gives no protection. So by default the seed comes from the operating system. Pass a seed
only for experiments, and keep it as secret as the data.

Batches of both kinds are tuples `(x, y, sample_weight)`, as for `keras.Model.fit`. An example with
sample_weight 0 is absent: it contributes exactly zero in tfdpx's optimizers. The sources of
examples are in `tfdpx.sampling.examples`.
"""

import functools
import math

import numpy as np
import tensorflow as tf

from tfdpx import noise
from tfdpx._arguments import check_positive_integer, is_number, require
from tfdpx._keras import tensorflow_internals
from tfdpx.accounting.accountants import check_probability
from tfdpx.accounting.ledger import USER
from tfdpx.sampling.batch_sampler import BatchSampler, check_optimizer, finished
from tfdpx.sampling.class_weights import read_class_weight
from tfdpx.sampling.examples import Examples, as_examples
from tfdpx.sampling.repeated_rows import warn_of_repeated_rows
from tfdpx.sampling.shards import ReplicaShards
from tfdpx.sampling.users import DEFAULT_PER_USER, Users, check_order

# Numbers that are folded into keys. With them, draws differ from other uses of the same seed.
_POISSON_KEY = int.from_bytes(b"poisson", "big")
_SHUFFLE_KEY = int.from_bytes(b"shuffle", "big")


def in_order(examples, batch_size):
    """Returns a data set of all examples once, in order, to evaluate on one device.

    Args:
        examples: `Examples` or `RandomAccess`.
        batch_size: Int.

    Returns:
        A `tf.data.Dataset` of `(x, y, sample_weight)` with shapes `[batch_size, ...]`. The last
        batch may be shorter.
    """

    def cut(first, size, count):
        starts = tf.data.Dataset.range(first, first + size * count, size)
        # For a small data set, AutoGraph would take most of the time of an evaluation.
        unconverted = tf.autograph.experimental.do_not_convert
        return starts.map(
            unconverted(lambda start: examples.batch(tf.range(start, start + size), size))
        )

    whole, rest = divmod(examples.count, batch_size)
    dataset = cut(0, batch_size, whole)
    if rest:
        dataset = (
            dataset.concatenate(cut(whole * batch_size, rest, 1)) if whole else cut(0, rest, 1)
        )
    return dataset.prefetch(1)


def plan_sampler(
    plan,
    x,
    y,
    sample_weight,
    *,
    class_weight,
    user_ids,
    examples_per_user,
    validation_split,
    optimizer,
    seed,
    start,
    pad_to_multiple_of,
    input_context,
):
    """Returns the `BatchSampler` for `PrivacyPlan.batches`, which describes the arguments."""
    check_positive_integer("pad_to_multiple_of", pad_to_multiple_of)
    _check_unit(plan, user_ids, examples_per_user, validation_split)
    if user_ids is not None:
        check_order(x, y, user_ids)
    count = plan.num_examples if user_ids is None else np.size(user_ids)
    class_weight = read_class_weight(class_weight)
    examples = as_examples(x, y, sample_weight, num_examples=count)
    examples, held_out = _without_held_out(examples, validation_split, sample_weight is not None)
    if user_ids is not None:
        per_user = DEFAULT_PER_USER if examples_per_user is None else examples_per_user
        examples, class_weight = Users(examples, user_ids, per_user, class_weight), None
    _check_count(plan, examples.count, user_ids, validation_split if held_out else None)
    # Only `Examples` are searched for equal rows. In `Users`, all examples of a person are
    # protected together, and a `RandomAccess` is not read before it is drawn.
    if isinstance(examples, Examples) and plan.noise_multiplier:
        warn_of_repeated_rows(plan, examples.present())
    arguments = {
        "capacity": math.ceil(plan.capacity / pad_to_multiple_of) * pad_to_multiple_of,
        "steps": plan.steps,
        "seed": seed,
        "start": start,
        "input_context": input_context,
    }
    if optimizer is not None:
        arguments["optimizer"] = optimizer = check_optimizer(optimizer, plan)
        arguments["steps"] = lambda: max(optimizer.updates_left(plan), 0)
    if plan.sampling == "shuffle":
        sampler = shuffled_sampler(examples, batch_size=plan.batch_size, **arguments)
    else:
        probability = plan.sampling_probability
        sampler = poisson_sampler(examples, sampling_probability=probability, **arguments)
    sampler.plan, sampler.held_out, sampler.class_weight = plan, held_out, class_weight
    return sampler


def _check_count(plan, count, user_ids, validation_split):
    """Raises ValueError unless the number of examples or people is the plan's `num_examples`."""
    if count == plan.num_examples:
        return
    if user_ids is not None:
        raise ValueError(
            "Argument `user_ids` must name the plan's `num_examples` people, because epsilon "
            f"depends on their number. Received: {count} people, num_examples={plan.num_examples}."
        )
    split = f" with validation_split={validation_split}" if validation_split else ""
    raise ValueError(
        "Arguments `x` and `y` must hold the plan's `num_examples`, because epsilon depends on it. "
        f"Received: {count} examples{split}, num_examples={plan.num_examples}. Make the plan for "
        f"them: `num_examples={count}`."
    )


def _check_unit(plan, user_ids, examples_per_user, validation_split):
    """Raises ValueError if a plan of people lacks `user_ids`, or a plan of examples has them."""
    if plan.unit == USER and user_ids is None:
        raise ValueError(
            'A plan with unit="user" draws people. Received: user_ids=None. Pass the person of '
            "each example, as `fit(x, y, user_ids=ids)`."
        )
    if plan.unit != USER:
        for name, value in (("user_ids", user_ids), ("examples_per_user", examples_per_user)):
            if value is not None:
                raise ValueError(
                    f"Argument `{name}` needs a plan of people. Received: plan.unit={plan.unit!r}. "
                    'Make it with `PrivacyPlan(num_examples=<number of people>, unit="user", ...)`.'
                )
    elif validation_split:
        raise ValueError(
            "Argument `validation_split` must be 0 with `user_ids`, because a person would be in "
            f"both parts. Received: validation_split={validation_split}. Pass `validation_data` of "
            "other people to `fit`."
        )


def _without_held_out(examples, share, weighted):
    """Returns the examples to train on, and arrays of the last `share`, or None if it is zero."""
    is_valid = is_number(share) and 0 <= share < 1
    require(is_valid, "validation_split", share, "be a number in [0, 1)")
    if not share:
        return examples, None
    if not isinstance(examples, Examples):
        raise ValueError(
            "Argument `validation_split` needs arrays, because it holds out their last part. "
            f"Received: validation_split={share}, and examples of type {type(examples).__name__}. "
            "Pass `validation_data` to `fit`."
        )
    # Rounds in the same way as Keras.
    count = math.floor(examples.count * (1 - share))
    require(count > 0, "validation_split", share, f"leave some of {examples.count} examples")
    return examples.split(count, weighted)


def poisson_sampler(
    examples,
    *,
    sampling_probability,
    capacity,
    steps,
    seed=None,
    start=0,
    optimizer=None,
    input_context=None,
):
    """Returns a `BatchSampler` that draws each example with `sampling_probability`.

    Examples are drawn independently of each other. The draw of step t depends only on the seed and
    t, so it can be replayed without the steps before it. The probability is rounded down to a
    multiple of 2**-32.

    Args:
        examples: `Examples` or `RandomAccess`.
        sampling_probability: Float in (0, 1].
        capacity: Int, the number of rows of every batch. A step that draws more examples raises an
            error.
        steps: Int, the number of steps of the whole training, after which the data set ends; or a
            function that returns the number of remaining steps, which is called when an iterator
            begins.
        seed: Optional int, for experiments. With an `input_context` a seed is required: the same
            int on all hosts, or a pair of ints, the secret of the session. If None, draws use the
            secret of the `fit` that trains on the data set; outside of a `fit`, each iterator gets
            a new secret from the operating system.
        start: Int, the first step; or a scalar variable, for example `optimizer.iterations`, which
            is read with the first batch of an iterator. The training must read a step's batch
            before it increases the variable. tfdpx's optimizers do so; Keras's optimizers may not.
        optimizer: Optional tfdpx optimizer. If it is set, no other optimizer may train on the data
            set.
        input_context: Optional `tf.distribute.InputContext`, for one pass by
            `tfdpx.distributed.fit`. For each step, the data set then yields one batch for each
            replica of this host, with the replica's share of the draw (see
            `tfdpx.sampling.shards`). All hosts need the same examples, `seed` and `start`, and
            `start` must be an int.

    Returns:
        A `BatchSampler`. The batches of its data set are `(x, y, sample_weight)` with static shapes
        `[capacity, ...]`, or `[capacity / replicas, ...]` with an `input_context`. Padding is zero
        and has sample_weight 0. If a step draws more than `capacity` examples, iterating raises
        `tf.errors.InvalidArgumentError`.

    Raises:
        ValueError: If an argument is out of range.

    Example:
    >>> examples = as_examples(np.arange(100.0))
    >>> arguments = {"sampling_probability": 0.1, "capacity": 40, "seed": 7}
    >>> whole = list(poisson_sampler(examples, steps=3, **arguments).dataset())
    >>> [last] = poisson_sampler(examples, steps=3, start=2, **arguments).dataset()
    >>> bool(np.array_equal(whole[2][0], last[0]))  # A step does not need the steps before it.
    True
    """
    check_probability(sampling_probability)
    shards = ReplicaShards(capacity, input_context)
    drawn = _poisson_draw(examples.count, sampling_probability, capacity)

    def draw(key, step, replica):
        return shards.cut(drawn(key, step), replica)

    return BatchSampler(_POISSON_KEY, draw, examples, steps, shards, seed, start, optimizer)


@functools.lru_cache(maxsize=64)
def _poisson_draw(count, sampling_probability, capacity):
    """Returns a traced function `draw(key, step)` that calls `poisson_rows` and checks `capacity`.

    The function is cached, so it is traced only once for each size of a data set.
    """

    @tf.function(autograph=False)
    def draw(key, step):
        rows = poisson_rows(key, step, count, sampling_probability)
        check = tf.debugging.assert_less_equal(
            tf.shape(rows)[0],
            capacity,
            message="Poisson sampling drew more examples than the batch has rows for. Examples may "
            "not be left out: raise the capacity.",
        )
        with tf.control_dependencies([check]):
            return tf.identity(rows)

    return draw


def shuffled_sampler(
    examples,
    *,
    batch_size,
    capacity,
    steps,
    seed=None,
    start=0,
    optimizer=None,
    input_context=None,
):
    """Returns a `BatchSampler` that shuffles the examples every epoch and cuts them into batches.

    An epoch has `num_examples // batch_size` steps. The remaining examples of the permutation are
    left out. The permutation depends only on the seed and the epoch. Epsilon is computed as for
    Poisson sampling, so it is only an approximation here.

    Args:
        examples: `Examples` or `RandomAccess`.
        batch_size: Int in [1, number of examples].
        capacity: Int >= batch_size, the number of rows of every batch.
        steps: As in `poisson_sampler`.
        seed: As in `poisson_sampler`.
        start: As in `poisson_sampler`.
        optimizer: As in `poisson_sampler`.
        input_context: As in `poisson_sampler`.

    Returns:
        A `BatchSampler`, as from `poisson_sampler`.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not 1 <= batch_size <= examples.count:
        raise ValueError(
            "Argument `batch_size` must lie between 1 and the number of examples. "
            f"Received: batch_size={batch_size}, for {examples.count} examples."
        )
    shards = ReplicaShards(capacity, input_context)
    shuffle = _Shuffle(examples.count, batch_size)

    def draw(key, step, replica):
        rows_of_step = tensorflow_internals.weakly(shuffle.rows)
        rows = tf.numpy_function(rows_of_step, [key, step], tf.int64)
        return shards.cut(tf.ensure_shape(rows, [batch_size]), replica)

    return BatchSampler(_SHUFFLE_KEY, draw, examples, steps, shards, seed, start, optimizer)


def batches_in_order(examples, *, capacity, input_context):
    """Returns a data set of all examples once, in order, to evaluate on several replicas.

    Args:
        examples: `Examples` or `RandomAccess`.
        capacity: Int, the number of rows of a global batch.
        input_context: As in `poisson_sampler`.

    Returns:
        A `tf.data.Dataset` with one element for each step and each replica of this host: the
        replica's share of the global batch, `(x, y, sample_weight)`, padded with zeros.
    """
    shards = ReplicaShards(capacity, input_context)

    def take(step, replica):
        rows = tf.range(step * capacity, tf.minimum((step + 1) * capacity, examples.count))
        return examples.batch(shards.cut(rows, replica), shards.rows)

    steps = shards.steps(0, math.ceil(examples.count / capacity))
    return finished(shards.endless(steps.map(take)))


def poisson_rows(key, step, num_examples, sampling_probability):
    """Returns the indices of the examples that a step draws.

    Args:
        key: int64 tensor of shape `[2]`.
        step: Scalar int64 tensor.
        num_examples: Int.
        sampling_probability: Float in (0, 1].

    Returns:
        int64 tensor of shape `[drawn]`, ascending.
    """
    if sampling_probability == 1:
        return tf.range(num_examples, dtype=tf.int64)
    bits = noise.words([num_examples], noise.fold_in(key, step), tf.uint32)
    threshold = tf.constant(math.floor(sampling_probability * 2**32), tf.uint32)
    return tf.where(bits < threshold)[:, 0]


class _Shuffle:
    """Computes the examples of a step from the permutation of its epoch.

    It stores the last permutation, because all steps of an epoch use the same one.
    """

    def __init__(self, count, batch_size):
        self._count, self._batch_size, self._last = count, batch_size, (None, None)

    def rows(self, key, step):
        epoch, place = divmod(int(step), self._count // self._batch_size)
        name, last = (*key.tolist(), epoch), self._last
        if last[0] != name:
            last = self._last = (name, _permutation(key, epoch, self._count))
        return last[1][place * self._batch_size : (place + 1) * self._batch_size]


def _permutation(key, epoch, num_examples):
    # With 64 bits, ties practically never occur. (The sort would order them by position.)
    bits = noise.words([num_examples], noise.fold_in(key, epoch), tf.uint64)
    return np.argsort(bits.numpy(), kind="stable")
