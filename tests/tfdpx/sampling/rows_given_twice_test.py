"""Examples that are given more than once: refused, or told with their common epsilon."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdpx
from tfdpx.accounting import group_epsilon
from tfdpx.sampling.repeated_rows import largest_repeat, row_digests

RNG = np.random.default_rng(8)
X, Y = RNG.normal(size=(200, 8)).astype("float32"), RNG.integers(0, 2, 200)
MORE = np.concatenate([np.arange(200), *[np.arange(20)] * 10])  # 20 rows, eleven times each.


def make_plan(rows, **arguments):
    return tfdpx.PrivacyPlan(
        rows, batch_size=rows // 10, steps=20, noise_multiplier=1.0, delta=1e-4, **arguments
    )


def told(*data, plan=None, **arguments):
    """Returns the numbers of the warning: how often a row comes, and the two epsilons; or None."""
    plan = plan or make_plan(len(data[0]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.batches(*data, **arguments)
    texts = [str(warning.message) for warning in caught if "chance" in str(warning.message)]
    if not texts:
        return None
    [text] = texts
    numbers = re.search(r"^(.*) examples are .* is (.*) at delta=0.0001, not (.*)\. Give", text)
    assert numbers is not None and "Do not publish" in text
    return numbers.groups()


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays)


@pytest.mark.parametrize(
    "count, make_data",
    [
        (11, lambda: (X[MORE], Y[MORE])),
        (11, lambda: (X[MORE],)),
        (11, lambda: ({"a": X[MORE, :4], "b": X[MORE, 4:]}, Y[MORE].astype("float64"))),
        (11, lambda: ((X[MORE] * 20).astype("uint8"), np.eye(2)[Y[MORE]])),
        (2, lambda: (np.concatenate([X, X]), np.concatenate([Y, Y]))),
    ],
)
def test_rows_given_more_than_once_are_told_with_their_common_epsilon(count, make_data):
    data = make_data()
    rows = len(tf.nest.flatten(data)[0])
    plan = make_plan(rows)
    of_all = group_epsilon(plan, count)
    assert told(*data, plan=plan) == (str(count), f"{of_all:.4g}", f"{plan.epsilon:.4g}")
    assert of_all > count * plan.epsilon


@pytest.mark.slow
def test_fit_and_data_sets_tell_it_too():
    plan = make_plan(400)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(2)])
    model.compile(tfdpx.DPSGD(0.1, plan=plan), "mse")
    with pytest.warns(UserWarning, match="^11 examples are equal"):
        model.fit(X[MORE], X[MORE, :2], epochs=1, steps_per_epoch=1, verbose=0)
    data = dataset(X, Y).concatenate(dataset(X, Y))
    assert told(data, plan=plan)[0] == "2"
    assert told(data.batch(64), plan=plan)[0] == "2"


def test_a_row_that_is_absent_or_held_out_is_not_told():
    weights = np.ones(400)
    weights[200:] = 0
    assert told(X[MORE], Y[MORE], weights) is None
    assert told(X[MORE], Y[MORE], weights[:, np.newaxis] * np.ones(3)) is None
    assert told(X[MORE], Y[MORE], plan=make_plan(200), validation_split=0.5) is None


def test_people_and_sources_that_are_read_later_are_not_told():
    people = tfdpx.PrivacyPlan(
        200, batch_size=20, steps=20, noise_multiplier=1.0, delta=1e-4, unit="user"
    )
    assert told(X[MORE], Y[MORE], plan=people, user_ids=MORE) is None
    source = [(X[i], Y[i]) for i in MORE]
    assert told(tfdpx.RandomAccess(source), plan=make_plan(400)) is None


def _short_texts(rng):
    tokens, lengths = np.zeros([5000, 30], int), rng.integers(1, 4, 5000)
    for row, length in zip(tokens, lengths, strict=True):
        row[:length] = rng.zipf(1.5, length) % 1000
    return tokens, rng.integers(0, 2, 5000)


def _blank_images(rng):
    images = rng.random([1000, 28, 28])
    images[:30] = 0
    return images, np.zeros(1000)


def _correlated_table(rng):
    latent = rng.normal(size=(30000, 1))
    columns = np.round(latent + rng.normal(size=(30000, 6)) / 2)
    return np.concatenate([columns, latent > 0], axis=1), (latent[:, 0] > 0.5).astype(int)


ORDINARY = {
    "columns of two values": lambda rng: (rng.integers(0, 2, [5000, 4]), rng.integers(0, 2, 5000)),
    "one-hot": lambda rng: (np.eye(10)[rng.integers(0, 10, 5000)], rng.integers(0, 2, 5000)),
    "label follows from it": lambda rng: (np.eye(9)[np.arange(4500) % 9], np.arange(4500) % 9),
    "autoencoder": lambda rng: 2 * (np.eye(9)[np.arange(4500) % 9],),
    "labels only": lambda rng: (rng.integers(0, 10, [5000, 1]), rng.integers(0, 10, 5000)),
    "rounded": lambda rng: (np.round(rng.normal(size=(5000, 4)), 1), rng.integers(0, 2, 5000)),
    "constant": lambda rng: (np.ones([500, 7]), np.zeros(500)),
    "bag of words": lambda rng: ((rng.random([5000, 500]) < 0.004) * 1.0, np.zeros(5000)),
    "missing": lambda rng: (np.where(rng.random([500, 3]) < 0.9, np.nan, 1.0), np.zeros(500)),
    "correlated": _correlated_table,
    "blank images": _blank_images,
    "short texts": _short_texts,
    "a twin": lambda rng: (np.round(rng.normal(size=(150, 4)), 1)[[*range(150), 7]], None),
}


def test_rows_that_are_all_different_are_not_told():
    texts = np.array([b"text %d" % i for i in range(200)], object)
    for arrays in ([X], [X, Y], [texts, Y], [np.arange(5.0)], [np.arange(1)], [X[:, :0], Y[:2]]):
        rows = min(map(len, arrays))
        assert largest_repeat([array[:rows] for array in arrays]) == 1
    assert told(texts, Y) is None


@pytest.mark.parametrize("name", ORDINARY)
def test_rows_that_are_equal_by_chance_are_not_told(name):
    for seed in range(3):
        x, y = ORDINARY[name](np.random.default_rng(seed))
        arrays = [x] if y is None else [x, y]
        assert len(np.unique(row_digests(arrays))) < len(x)
        assert largest_repeat(arrays) == 1
    if x[0].size > 6:  # Many copies of one are told.
        copies = np.repeat(np.random.default_rng(1).normal(size=x[:1].shape), len(x) // 20, axis=0)
        assert largest_repeat([np.concatenate([x, copies])]) == len(x) // 20


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.repeat(2),
        lambda data: data.batch(8).repeat(2).prefetch(1),
        lambda data: data.repeat().take(400),
        lambda data: data.repeat(2).map(lambda x, y: (x + tf.random.normal([8]), y)),
        lambda data: tf.data.Dataset.zip(data.repeat(2), data.concatenate(data)).map(
            lambda a, b: (a[0], b[1])
        ),
        lambda data: tf.data.Dataset.zip(
            *[tf.data.Dataset.from_tensors(X[0]).repeat(400) for _ in range(2)]
        ),
    ],
)
def test_a_data_set_that_is_repeated_is_refused(change):
    with pytest.raises(ValueError, match="`x` must be .* once.*Leave out `repeat`"):
        make_plan(400).batches(change(dataset(X, Y)))


def test_a_constant_next_to_the_examples_repeats_none():
    constant = tf.data.Dataset.from_tensors(np.float32(1)).repeat()
    zipped = tf.data.Dataset.zip(dataset(X), constant).map(lambda x, one: (x[0], one))
    series = keras.utils.timeseries_dataset_from_array(X, Y[:-4], 5)
    for data, rows in ((zipped, 200), (series, 196)):
        assert told(data, plan=make_plan(rows)) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:delta")
def test_of_many_rows_some_are_looked_at():
    x = RNG.normal(size=(150_000, 6)).astype("float32")
    x[100_000:] = x[:50_000]
    plan = make_plan(150_000)
    count, of_all, _ = told(x, plan=plan)
    assert (count, of_all) == ("2 or more", f"{group_epsilon(plan, 2):.4g} or more")
    x = np.repeat(RNG.normal(size=(10, 6)), 40, axis=0)  # For more, epsilon takes minutes.
    assert told(x)[1].endswith(" or more")
