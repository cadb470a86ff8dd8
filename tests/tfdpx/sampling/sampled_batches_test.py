import math

import keras
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import Examples

NUM_EXAMPLES, STEPS, PROBABILITY = 400, 2500, 0.05  # A million draws.


def make(num_examples=20, probability=0.3, capacity=None, **arguments):
    examples = Examples(np.arange(num_examples), np.arange(num_examples) % 3)
    arguments = {"steps": 12, "seed": 0, "capacity": capacity or num_examples} | arguments
    return sampled_batches.poisson_sampler(
        examples, sampling_probability=probability, **arguments
    ).dataset()


def make_shuffled(num_examples=20, batch_size=6, **arguments):
    examples = Examples(np.arange(num_examples), np.arange(num_examples) % 3)
    arguments = {"steps": 12, "seed": 0, "capacity": batch_size} | arguments
    return sampled_batches.shuffled_sampler(examples, batch_size=batch_size, **arguments).dataset()


BOTH = pytest.mark.parametrize("make", [make, make_shuffled], ids=["poisson", "shuffle"])


def read(dataset):
    return [tuple(array.numpy() for array in batch) for batch in dataset]


def assert_same(batches, expected):
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        for array, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(array, same)


def participation(dataset, num_examples):
    """Returns a bool array [steps, num_examples] of the examples in each step."""
    drawn = [np.zeros(num_examples, bool) for _ in range(STEPS)]
    for row, (x, _, weight) in zip(drawn, dataset.as_numpy_iterator(), strict=True):
        row[x[weight > 0]] = True
    return np.stack(drawn)


def p_values(drawn, probability):
    """Returns p-values of a bool array [steps, examples] under Poisson sampling."""

    def binomial(counts, trials):
        """Chi-square against Binomial(trials, probability), in cells of at least ten."""
        edges = scipy.stats.binom.ppf(np.linspace(0, 1, len(counts) // 20), trials, probability)
        edges = np.unique(edges[1:-1])
        cells = np.diff(
            np.concatenate([[0], scipy.stats.binom.cdf(edges, trials, probability), [1]])
        )
        observed = np.bincount(np.searchsorted(edges, counts), minlength=len(cells))
        return scipy.stats.chisquare(observed, cells * len(counts)).pvalue

    def independent(one, other):
        table = [[np.sum(one & other), np.sum(one & ~other)]]
        table += [[np.sum(~one & other), np.sum(~one & ~other)]]
        return scipy.stats.chi2_contingency(table).pvalue

    steps, examples = drawn.shape
    return {
        "total": scipy.stats.binomtest(int(drawn.sum()), drawn.size, probability).pvalue,
        "participations": binomial(drawn.sum(axis=0), steps),
        "batch sizes": binomial(drawn.sum(axis=1), examples),
        "two examples": independent(drawn[:, ::2], drawn[:, 1::2]),
        "two steps": independent(drawn[::2], drawn[1::2]),
    }


def is_poisson(drawn, probability=PROBABILITY):
    return min(p_values(drawn, probability).values()) > 1e-4


@pytest.fixture(scope="module")
def drawn():
    return participation(make(NUM_EXAMPLES, PROBABILITY, steps=STEPS, seed=1), NUM_EXAMPLES)


def test_draws_are_independent_of_the_right_probability(drawn):
    assert is_poisson(drawn), p_values(drawn, PROBABILITY)


@pytest.mark.planted("a sampling probability off by 5%")
def test_the_check_rejects_a_probability_off_by_five_per_cent(drawn):
    assert not is_poisson(drawn, PROBABILITY * 1.05)
    assert not is_poisson(drawn, PROBABILITY / 1.05)


@pytest.mark.planted("shuffled batches for Poisson samples")
def test_the_check_rejects_shuffled_batches():
    batch_size = round(NUM_EXAMPLES * PROBABILITY)
    shuffled = make_shuffled(NUM_EXAMPLES, batch_size, steps=STEPS)
    assert not is_poisson(participation(shuffled, NUM_EXAMPLES))


@pytest.mark.planted("batches of a fixed size")
def test_the_check_rejects_fixed_sizes_without_replacement():
    generator = np.random.default_rng(0)
    ranks = generator.random([STEPS, NUM_EXAMPLES]).argsort(axis=1)
    drawn = ranks < round(NUM_EXAMPLES * PROBABILITY)
    values = p_values(drawn, PROBABILITY)
    assert not is_poisson(drawn)
    assert values["batch sizes"] < 1e-4 < values["participations"]


@pytest.mark.planted("draws that depend on each other")
def test_the_check_rejects_dependence(drawn):
    pairs, repeated, constant = drawn.copy(), drawn.copy(), drawn.copy()
    pairs[: STEPS // 25, 1::2] = pairs[: STEPS // 25, ::2]
    repeated[1 : STEPS // 25 : 2] = repeated[: STEPS // 25 : 2]
    constant[:, : NUM_EXAMPLES // 10] = constant[0, : NUM_EXAMPLES // 10]
    assert p_values(pairs, PROBABILITY)["two examples"] < 1e-4
    assert p_values(repeated, PROBABILITY)["two steps"] < 1e-4
    assert p_values(constant, PROBABILITY)["participations"] < 1e-4


def test_probability_one_draws_everything():
    for x, _, weight in read(make(probability=1.0)):
        np.testing.assert_array_equal(x, np.arange(20))
        np.testing.assert_array_equal(weight, 1.0)


@pytest.mark.parametrize("probability", [0.5, 1 - 2**-40])
def test_probabilities_near_one(probability):
    sizes = [weight.sum() for _, _, weight in read(make(1000, probability, steps=20))]
    assert abs(np.mean(sizes) - 1000 * probability) < 5 * math.sqrt(1000 * 0.25 / 20)


@BOTH
def test_any_step_can_be_resumed_from_and_a_variable_is_read_at_every_pass(make):
    whole, variable = read(make()), keras.Variable(7, dtype="int64", trainable=False)
    assert_same(read(make(start=7)), whole[7:])
    dataset = make(start=variable)
    assert_same(read(dataset), whole[7:])
    variable.assign(5)
    assert_same(read(dataset), whole[5:])


@BOTH
def test_seeds(make):
    assert_same(read(make(seed=3)), read(make(seed=3)))
    for one, other in [(3, 4), (None, None), (None, 0)]:
        with pytest.raises(AssertionError):
            assert_same(read(make(seed=one)), read(make(seed=other)))


def test_epochs_are_permutations():
    batches = [x for x, _, _ in read(make_shuffled(num_examples=20, batch_size=6, steps=12))]
    epochs = [np.concatenate(batches[i : i + 3]) for i in range(0, 12, 3)]
    assert all(len(set(epoch)) == 18 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    # Other examples are left out in each epoch too.
    assert len({frozenset(range(20)) - set(epoch) for epoch in epochs}) > 1


@pytest.mark.slow
def test_permutations_are_uniform():
    batches = read(make_shuffled(num_examples=4, batch_size=4, steps=400))
    orders = np.stack([x for x, _, _ in batches])
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == math.factorial(4)
    assert scipy.stats.chisquare(counts).pvalue > 1e-4


@BOTH
def test_shapes_are_fixed_and_padding_is_empty(make):
    dataset = make(num_examples=30, capacity=25)
    assert [spec.shape for spec in dataset.element_spec] == [[25], [25], [25]]
    for x, y, weight in read(dataset):
        drawn = int(weight.sum())
        assert 0 < drawn < 25
        np.testing.assert_array_equal(weight, np.arange(25) < drawn)
        np.testing.assert_array_equal(y[:drawn], x[:drawn] % 3)
        assert len(set(x[:drawn])) == drawn
        assert not x[drawn:].any() and not y[drawn:].any()


@pytest.mark.parametrize(
    "make, arguments, message",
    [
        (make, {"probability": 0.0}, r"`sampling_probability` must lie in \(0, 1\]"),
        (make_shuffled, {"batch_size": 21}, "`batch_size` must lie between 1 and.*=21, for 20"),
        (make, {"start": -1}, "`start` must lie between 0 and `steps`.*start=-1, steps=12"),
        (make, {"start": 0.5}, "`start` must be an int or a scalar integer variable"),
        (make, {"seed": "0"}, "`seed` must be"),
    ],
)
def test_unfit_arguments(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_overflow_is_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="more examples than the batch has"):
        read(make(capacity=6))
