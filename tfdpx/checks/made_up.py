"""Made-up batches of several kinds: three that share some of their examples, and differ in others.

No data is read. The first batch holds small values only: uniform in [0, 1], normal, and examples
that are nearly alike. In the second and third most others are replaced by far larger or by opposite
ones, and all examples stand in another order. So what makes an example depend on others, by their
values, by how many are alike or by their places, shows in the examples that stayed.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from tfdpx.per_example.rows import Rows, synthetic

# Integers below these are tried in turn: some vocabularies are small.
_VOCABULARIES = (1000, 100, 10, 3, 2)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A made-up batch.

    Attributes:
        x: Nest of eager tensors [rows, ...].
        order: int [rows], the row of the first batch that stands at each place here.
        kept: bool [rows], in the order of the first batch: which rows are the same there and here.
        wide: bool [rows], in the order of the first batch: which rows the second and third share.
        emphasis: float32 [rows], in the order of the first batch: how large a row's gradients are.
    """

    x: object
    order: np.ndarray
    kept: np.ndarray
    wide: np.ndarray
    emphasis: np.ndarray

    def places(self, rows):
        """Int [n]: where `rows`, int [n] in the order of the first batch, stand in this one."""
        return np.argsort(self.order)[rows]


def batches(specs, examples, views, vocabulary, shuffled=True):
    """Three `Batch`es of `examples * views` rows.

    Args:
        specs: Nest of tensors [rows, ...]; only shapes and dtypes are read.
        examples: Int.
        views: Int, K; an example's rows stay together and in order.
        vocabulary: Int, integers lie below it.
        shuffled: Whether the second and third stand in another order.
    """
    generator = np.random.default_rng(0)
    kinds = generator.permutation(np.arange(examples) % 4)
    # Half of the examples stay, a quarter is wide, a quarter changes each time.
    kept, wide = np.isin(kinds, (0, 1)), kinds == 2
    rows = Rows(specs)
    small, large, huge = [], [], []
    for leaf in rows.tensors:
        shape = [examples * views, *(32 if size is None else size for size in leaf.shape[1:])]
        first, second, third = _values(generator, shape, leaf.dtype, vocabulary)
        stays = np.repeat(kept, views).reshape([-1] + [1] * (len(shape) - 1))
        both = np.repeat(wide, views).reshape(stays.shape)
        small.append(first)
        large.append(np.where(stays, first, second))
        huge.append(np.where(stays, first, np.where(both, second, third)))
    kept, wide = np.repeat(kept, views), np.repeat(wide, views)
    made = []
    for number, tensors in enumerate((small, large, huge)):
        order = np.arange(examples)
        if shuffled and number:
            order = generator.permutation(examples)
        order = (order[:, np.newaxis] * views + np.arange(views)).ravel()
        cast = [
            _tensor(array[order], leaf.dtype)
            for array, leaf in zip(tensors, rows.tensors, strict=True)
        ]
        others = np.where(wide, 10.0, 1000.0) if number == 2 else 10.0
        emphasis = np.where(kept, 1.0, others if number else 1.0).astype("float32")
        made.append(Batch(rows.pack(cast), order, kept, wide, emphasis))
    return made


def _values(generator, shape, dtype, vocabulary):
    """Arrays of `shape`: small values, opposite and wide ones, huge ones."""
    if dtype == tf.string:
        return [generator.choice(["a", "b", "c"], shape) for _ in range(3)]
    if not dtype.is_floating:
        highest = 2 if dtype == tf.bool else min(vocabulary, 256 if dtype.size == 1 else vocabulary)
        highest = min(highest, 128) if dtype == tf.int8 else highest
        alike = np.broadcast_to(generator.integers(0, 2, [1, *shape[1:]]), shape)
        return [
            _alternate(alike, generator.integers(0, 2, shape)),
            generator.integers(0, highest, shape),
            _alternate(highest - 1 - alike, generator.integers(0, highest, shape)),
        ]
    normal = generator.normal(size=shape)
    alike = generator.uniform(size=[1, *shape[1:]]) + 0.01 * generator.normal(size=shape)
    small = _alternate(alike, _alternate(generator.uniform(size=shape), normal))
    wide = _alternate(255.0 * generator.uniform(size=shape), 100.0 * generator.normal(size=shape))
    magnitude = 10.0 ** generator.uniform(-2, 6, [shape[0]] + [1] * (len(shape) - 1))
    return [small, wide, _alternate(-alike, magnitude * generator.normal(size=shape))]


def _alternate(even, odd):
    """Rows of `even` and of `odd` in turn."""
    flags = np.arange(len(even)).reshape([-1] + [1] * (even.ndim - 1)) % 2 == 0
    return np.where(flags, even, odd)


def _tensor(array, dtype):
    if dtype == tf.string:
        return tf.constant(array.tolist())
    return tf.cast(tf.constant(array), dtype)


def vocabulary(function, specs):
    """The first of several sizes of a vocabulary that `function` accepts in all integer inputs.

    Args:
        function: Takes a nest of eager tensors like `specs`.
        specs: Nest of tensors [rows, ...]; only shapes and dtypes are read.

    Returns:
        Int >= 2.
    """
    if all(t.dtype.is_floating or t.dtype in (tf.string, tf.bool) for t in Rows(specs).tensors):
        return 2
    for size in _VOCABULARIES[:-1]:
        largest = Rows(synthetic(specs, 2, seed=0)).map(lambda t, n=size: _largest(t, n))
        try:
            function(largest)
        except (tf.errors.InvalidArgumentError, ValueError):
            continue
        return size
    return _VOCABULARIES[-1]


def _largest(tensor, size):
    if tensor.dtype.is_floating or tensor.dtype in (tf.string, tf.bool):
        return tensor
    return tf.fill(tf.shape(tensor), tf.cast(min(size - 1, tensor.dtype.max), tensor.dtype))
