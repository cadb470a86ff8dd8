"""The examples of batches: nests, dtypes and weights, in memory or read when they are drawn."""

import math
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfdpx
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import Examples, as_examples

IMAGES = np.random.default_rng(0).integers(0, 256, (50, 4, 4, 3)).astype("uint8")
LABELS = np.arange(50) % 3


def plan(num_examples=50, batch_size=12, steps=6, **arguments):
    private = {"noise_multiplier": 1.0, "delta": 1e-5, **arguments}
    return tfdpx.PrivacyPlan(num_examples, batch_size, steps, **private)


PLAN = plan(4, 4, 1)


def test_nests_and_dtypes():
    x = {
        "image": np.arange(20, dtype="uint8")[:, None, None] * np.ones([20, 4, 3], "uint8"),
        "meta": (np.arange(20.0), np.arange(20, dtype="float16")),
    }
    y = (np.arange(20) % 2 == 0, [f"label {i}" for i in range(20)])
    examples = Examples(x, y)
    dataset = sampled_batches.poisson_sampler(
        examples, sampling_probability=0.5, capacity=16, steps=2, seed=0
    ).dataset()
    spec_x, spec_y, spec_weight = dataset.element_spec
    assert (spec_x["image"].dtype, spec_x["image"].shape) == (tf.uint8, [16, 4, 3])
    assert [spec.dtype for spec in spec_x["meta"]] == [tf.float32, tf.float16]
    assert [spec.dtype for spec in spec_y] == [tf.bool, tf.string]
    assert spec_weight == tf.TensorSpec([16], tf.float32)
    x, y, weight = next(iter(dataset))
    for row in range(int(tf.reduce_sum(weight))):
        number = int(x["meta"][0][row])
        assert int(x["image"][row, 3, 2]) == number == int(x["meta"][1][row])
        assert y[0][row] == (number % 2 == 0) and y[1][row] == f"label {number}"


def test_weights_of_examples_and_of_classes():
    x, labels, weights = np.zeros([4, 2]), np.array([0, 1, 2, 1]), [0.0, 0.5, 2.0, 1.0]
    [batch] = PLAN.batches(x, labels, weights)
    np.testing.assert_array_equal(batch[2], weights)
    for y in (labels, labels[:, np.newaxis], np.eye(3)[labels], labels.astype("float32")):
        [batch] = PLAN.batches(x, y, class_weight={0: 0.25, 1: 3.0})
        np.testing.assert_array_equal(batch[2], [0.25, 3.0, 1.0, 3.0])
        [batch] = PLAN.batches(x, y, weights, class_weight={0: 0.25, 1: 3.0})
        np.testing.assert_array_equal(batch[2], [0.0, 1.5, 2.0, 3.0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sample_weight": [1.0, -1.0, 1.0, 1.0]}, "finite and >= 0.*from -1.0 to 1.0"),
        ({"sample_weight": [1.0, math.nan, 1.0, 1.0]}, "finite and >= 0"),
        ({"sample_weight": np.ones(3)}, r"`sample_weight` must have shape \(4,\).*\(3,\)"),
        ({"class_weight": {0: -1.0}}, "finite and >= 0"),
        ({"class_weight": {0: math.nan}}, "finite and >= 0"),
        ({"class_weight": {0: 1.0}, "y": None}, "`class_weight` needs a single array `y`"),
        ({"class_weight": {0: 1.0}, "y": np.zeros([4, 2, 2])}, r"Received: shape \(4, 2, 2\)"),
        ({"y": np.zeros(5)}, r"arrays of the same length, at least 1. Received: lengths \[4, 5\]"),
        ({"x": np.zeros([0, 2]), "y": None}, r"Received: lengths \[0\]"),
    ],
)
def test_unfit_examples(arguments, message):
    arguments = {"x": np.zeros([4, 2]), "y": np.zeros(4, int)} | arguments
    with pytest.raises(ValueError, match=message):
        PLAN.batches(**arguments)


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
