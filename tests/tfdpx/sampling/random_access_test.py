"""Examples that are read when they are drawn: the same batches as from arrays, in little memory."""

import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdpx
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3)).astype("uint8")
LABELS = np.arange(50) % 3


class Source:
    """Counts the reads, and the threads that read."""

    def __init__(self, pairs):
        self.pairs, self.reads, self.threads = pairs, [], set()

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        self.reads.append(index)
        self.threads.add(threading.get_ident())
        return self.pairs[index]


class Batched(Source):
    def __getitem__(self, index):
        raise AssertionError("__getitems__ is to be called")

    def __getitems__(self, indices):
        return [super(Batched, self).__getitem__(index) for index in indices]


@pytest.fixture
def source():
    return Source(list(zip(IMAGES, LABELS, strict=True)))


def plan(**arguments):
    common = dict(num_examples=50, batch_size=12, steps=6, noise_multiplier=1.0, delta=1e-5)
    return tfdpx.PrivacyPlan(**{**common, **arguments})


@pytest.mark.parametrize("kind, how", [(Source, "poisson"), (Batched, "shuffle")])
def test_batches_are_those_of_arrays_in_the_same_order(how, kind):
    examples = tfdpx.RandomAccess(kind(list(zip(IMAGES, LABELS, strict=True))))
    of_disk = plan(sampling=how).batches(examples, seed=3, start=2)
    of_memory = plan(sampling=how).batches(IMAGES, LABELS, seed=3, start=2)
    assert of_disk.element_spec == of_memory.element_spec
    for batch, same in zip(of_disk, of_memory, strict=True):
        for array, expected in zip(batch, same, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_only_what_is_drawn_is_read_and_by_several_threads(source):
    batches = plan(sampling="shuffle", batch_size=40).batches(
        tfdpx.RandomAccess(source, num_threads=2), seed=0
    )
    source.reads.clear()
    x, y, _ = next(iter(batches.take(1)))
    # prefetch(1) may have read the next batch too.
    assert len(source.reads) in (40, 80)
    assert source.threads != {threading.get_ident()}
    by_image = {image.tobytes(): label for image, label in zip(IMAGES, LABELS, strict=True)}
    assert [by_image[image.tobytes()] for image in x.numpy()] == y.numpy().tolist()


def test_nests_and_float64():
    pairs = [({"a": np.full([2], i, "float64"), "b": i}, (i, np.float32(0.5))) for i in range(3)]
    (x, (y, z), weight) = tfdpx.RandomAccess(pairs).batch(tf.constant([2, 0], tf.int64), 3)
    assert x["a"].dtype == tf.float32 and x["b"].dtype == tf.int64
    np.testing.assert_array_equal(x["a"], [[2, 2], [0, 0], [0, 0]])
    np.testing.assert_array_equal(y, [2, 0, 0])
    np.testing.assert_array_equal(z, [0.5, 0.5, 0])
    np.testing.assert_array_equal(weight, [1, 1, 0])


@pytest.mark.parametrize(
    "odd", [(np.zeros([4, 4, 1], "uint8"), 1), (np.zeros([4, 4, 3], "float32"), 1)]
)
def test_an_odd_example_is_an_error_and_never_stretched(odd):
    pairs = [(IMAGES[0], 1)] * 4 + [odd]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Example 4 has an array of shape"):
        list(sampled_batches.in_order(tfdpx.RandomAccess(pairs), 5))


def test_goes_alone_and_must_have_the_size_that_was_planned(source):
    examples = tfdpx.RandomAccess(source)
    with pytest.raises(
        ValueError, match="no other data may be passed. Received also: `y`, `sample_weight`"
    ):
        as_examples(examples, LABELS, np.ones(50))
    with pytest.raises(ValueError, match="50 examples, num_examples=60"):
        plan(num_examples=60).batches(examples)
    for pairs, message in [([], "at least one"), ([np.zeros(3)], r"tuples \(x, y\).*ndarray")]:
        with pytest.raises(ValueError, match=message):
            tfdpx.RandomAccess(pairs)


def test_fingerprint_tells_data_apart(source):
    pairs = source.pairs
    other = [(IMAGES[0], LABELS[1]), *pairs[1:]]
    prints = [tfdpx.RandomAccess(p).fingerprint() for p in (pairs, list(pairs), other, pairs[:-1])]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
