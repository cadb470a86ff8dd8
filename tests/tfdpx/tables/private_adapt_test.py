"""Private statistics of columns: exact without noise, bounded in each row, and accounted."""

import functools
import math

import keras
import numpy as np
import pytest
import small
from cases import nightly
from hypothesis import given, settings
from hypothesis import strategies as st

import tfdpx
from tfdpx.accounting import Ledger
from tfdpx.audit.bounds import gdp_mu_lower_bound
from tfdpx.checks.adapted import spent_on
from tfdpx.tables import private_adapt as statistics
from tfdpx.tables.private_adapt import private_adapt

layers = keras.layers
TINY = 1e-6  # Almost no noise.


def exact(compute):
    """Returns the result of `compute`, and its releases with their sensitivities."""
    releases = []

    def released(value, sensitivity):
        releases.append((value, sensitivity))
        return releases[-1][0], TINY

    return compute(released), releases


def test_without_noise_they_are_what_keras_computes():
    rng = np.random.default_rng(0)
    x = rng.normal(5.0, [1.0, 2.0, 0.3], size=(4000, 3))
    theirs, ours = layers.Normalization(), layers.Normalization()
    theirs.adapt(x)
    private_adapt(ours, x, noise_multiplier=TINY, lower=[-20, -20, 0], upper=30.0)
    np.testing.assert_allclose(ours(x), theirs(x), atol=2e-3)
    unbounded = layers.Normalization()
    assert private_adapt(unbounded, x, noise_multiplier=TINY).steps == 2  # One for the bounds.
    np.testing.assert_allclose(unbounded(x), theirs(x), atol=2e-3)


def test_quantiles_and_categories():
    rng = np.random.default_rng(0)
    x = rng.exponential(size=20_000)
    layer = layers.Discretization(num_bins=4)
    private_adapt(layer, x, noise_multiplier=TINY, lower=0.0, upper=20.0)
    np.testing.assert_allclose(layer.bin_boundaries, np.quantile(x, [0.25, 0.5, 0.75]), atol=0.02)
    names = rng.choice(["a", "b", "c", "rare"], size=5000, p=[0.5, 0.3, 0.199, 0.001])
    layer = layers.StringLookup()
    private_adapt(layer, names, noise_multiplier=5.0, seed=1)
    assert layer.get_vocabulary(False) == ["a", "b", "c"]  # "rare" has five rows.
    layer = layers.IntegerLookup(max_tokens=3)
    private_adapt(layer, rng.integers(0, 4, 5000), noise_multiplier=5.0, seed=1)
    assert len(layer.get_vocabulary(False)) == 2


VALUES = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True, width=64), st.sampled_from([1e30, 0.0, -1e-9])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=6), st.tuples(VALUES, VALUES))
def test_a_row_moves_a_release_by_at_most_its_sensitivity(rows, row):
    """Tries rows of 1e30, NaN and infinity too: the release is bounded before noise."""
    x, more = np.array(rows), np.array([*rows, row])
    limits = np.array([-1.0, 0.0]), np.array([3.0, 1.0])
    for compute in (
        lambda data, released: statistics.bounds(data, released),
        lambda data, released: statistics.moments(data, *limits, released),
        lambda data, released: statistics.narrow(data, *limits, released),
        lambda data, released: statistics.quantiles(data[:, 0], -1.0, 3.0, 4, released),
    ):
        pairs = [exact(functools.partial(compute, data))[1] for data in (x, more)]
        for (one, bound), (other, same) in zip(*pairs, strict=True):
            assert bound == same
            assert np.linalg.norm(np.asarray(one) - other) <= bound * (1 + 1e-9)


def test_a_row_moves_the_cells_of_every_column():
    """A sensitivity without sqrt(d), as if the columns of a row were one count, is too small."""
    limits = np.full(9, -1.0), np.full(9, 3.0)
    x = np.random.default_rng(0).normal(size=(5, 9))
    [(fewer, bound)], [(more, _)] = (
        exact(lambda released, data=data: statistics.narrow(data, *limits, released))[1]
        for data in (x[1:], x)
    )
    moved = np.linalg.norm(more - fewer)
    assert moved <= bound and moved > bound / math.sqrt(9) * 1.01


def test_rough_bounds_are_narrowed():
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(2000, 4))) * [1, 1000, 1, 1] + [0, 0, 40, 0]
    x[:, 3] = rng.uniform(-1, 1, 2000)
    x[::3] = np.nan
    inside = np.nanquantile(x, [0.1, 0.8], axis=0)
    for factor in (3, 10, 100):
        lower = np.array([0.0, -1e4 * factor, 0.0, -factor])
        upper = np.array([30.0, 3e4, 70.0, 1.0]) * factor
        (least, most), [(cells, _)] = exact(
            lambda released, limits=(lower, upper): statistics.narrow(x, *limits, released)
        )
        assert np.all((lower <= least) & (least <= inside[0]) & (inside[1] <= most))
        assert np.all(most <= upper) and np.all(cells.sum(axis=0) == 2000)
        assert np.all(most - least <= [13, 25_000, 60, 2.5])
    bounds = np.zeros(1), np.ones(1)
    (least, most), _ = exact(lambda released: statistics.narrow(x[:0, :1], *bounds, released))
    assert 0 <= least < most <= 1


@pytest.mark.parametrize(
    "noise, honest",
    [
        nightly(0.7, True),
        pytest.param(0.35, False, marks=pytest.mark.planted("statistics with half the noise")),
    ],
)
def test_an_audit_by_what_the_layer_holds(noise, honest):
    """Runs with and without the worst row can be told apart as well as accounted, and no better.

    Half the noise, the planted bug, is detected.
    """
    rows = np.repeat([-0.7, 0.7], 20)[:, np.newaxis]
    statistics = []
    for x in (rows, np.vstack([rows, [[1e30]]])):
        for _ in range(400):
            layer = layers.Normalization()
            private_adapt(layer, x, noise_multiplier=noise, lower=-1.0, upper=1.0)
            mean, variance = layer.mean[0, 0], layer.variance[0, 0]
            statistics.append(len(x) * float(mean + 0.5 * (variance + mean**2 - 0.5)))
    without, with_it = np.reshape(statistics, (2, -1))
    errors = [np.sum(without > 0.425), np.sum(with_it <= 0.425)]
    proved = gdp_mu_lower_bound(int(errors[0]), 400, int(errors[1]), 400)
    assert (0.5 / 0.7 < proved <= 1 / 0.7) if honest else proved > 1 / 0.7


def test_a_category_of_one_row_is_never_named():
    """Its noisy count would have to be eight deviations too high."""
    x = np.array([*["a"] * 500, "secret"])
    for seed in range(50):
        layer = layers.StringLookup()
        private_adapt(layer, x, noise_multiplier=2.0, seed=seed)
        assert layer.get_vocabulary(False) == ["a"]
    deviations = (statistics._RARE * 2.0) / 2.0
    assert 0.5 * math.erfc(deviations / math.sqrt(2)) < 1e-15


def test_one_public_bound_that_no_row_is_within():
    """The noisy bounds are used as they are: an error would tell where the rows are."""
    for limits in (dict(lower=1e9), dict(upper=-1e9)):
        layer = layers.Normalization()
        assert private_adapt(layer, NUMBERS, noise_multiplier=1.0, **limits).steps == 2
        assert np.all(np.isfinite(layer.mean)) and np.all(np.abs(layer.mean) > 5e8)


def test_the_noise_is_there():
    x = np.tile([[0.0, 1.0]], [1000, 1])
    means = []
    for seed in range(100):
        layer = layers.Normalization()
        private_adapt(layer, x, noise_multiplier=10.0, lower=-1.0, upper=1.0, seed=seed)
        means.append(layer.mean.numpy()[0, 0])
    wanted = 10.0 * math.sqrt(1.25 * 2) / 1000
    assert np.std(means) == pytest.approx(wanted, rel=0.25)


def train(layer, spent, plan=None, inputs=(2,), x=None):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, *inputs)) if x is None else x
    y = rng.integers(0, 3, 64)
    plan = plan or tfdpx.PrivacyPlan(64, 16, steps=3, epsilon=5.0, delta=1e-3, spent=spent)
    optimizer = tfdpx.DPSGD(0.1, plan=plan)
    return small.model(optimizer, [layer, layers.Dense(3)]), x, y, plan


@pytest.mark.slow
def test_one_ledger_holds_statistics_and_training():
    x = np.random.default_rng(0).normal(size=(64, 2))
    layer = layers.Normalization()
    spent = private_adapt(layer, x, noise_multiplier=3.0)
    model, x, y, plan = train(layer, spent, x=x)
    history = model.fit(x, y, verbose=0)
    ledger = model.optimizer.ledger
    assert sorted((e.noise_multiplier, e.steps) for e in ledger.entries) == sorted(
        [(3.0, 2), (plan.noise_multiplier, 3)]
    )
    assert ledger.epsilon(1e-3) == pytest.approx(plan.epsilon, rel=1e-3)
    assert history.history["epsilon"][-1] == pytest.approx(5.0, rel=1e-3)


@pytest.mark.slow
def test_a_layer_in_the_model_counts_without_the_plan_and_the_plan_without_the_layer():
    x = np.random.default_rng(0).normal(size=(64, 2))
    layer = layers.Normalization()
    spent = private_adapt(layer, x, noise_multiplier=3.0)
    free = tfdpx.PrivacyPlan(64, 16, steps=3, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    model, x, y, _ = train(layer, None, free, x=x)
    model.fit(x, y, verbose=0)
    ledger = model.optimizer.ledger
    assert 2 < ledger.steps < 5 and ledger.epsilon(1e-3, "rdp") <= free.epsilon
    model, x, y, plan = train(layers.Dense(2), spent, x=np.asarray(layer(x)))
    model.fit(x, y, verbose=0)
    assert model.optimizer.ledger.steps == 5
    assert model.optimizer.ledger.epsilon(1e-3) == pytest.approx(plan.epsilon, rel=1e-3)


@pytest.mark.parametrize("is_public", [False, True])
def test_a_clone_without_batch_norm_keeps_statistics_and_their_cost(is_public):
    x = np.random.default_rng(0).normal(5, 3, size=(64, 2)).astype("float32")
    layer = layers.Normalization()
    if is_public:
        layer.adapt(x)
        tfdpx.checks.mark_public(layer)
        spent = tfdpx.accounting.Ledger()
    else:
        spent = private_adapt(layer, x, noise_multiplier=30.0, lower=-9.0, upper=20.0)
    model = keras.Sequential([layer, layers.BatchNormalization(), layers.Dense(3)])
    model.build([None, 2])
    clone = tfdpx.layers.replace_batch_norm(model)
    np.testing.assert_allclose(clone.layers[0](x), layer(x), rtol=1e-6)
    plan = tfdpx.PrivacyPlan(64, 16, steps=3, noise_multiplier=4.0, delta=1e-3, spent=spent)
    clone.compile(tfdpx.DPSGD(0.1, plan=plan), "mse")
    clone.fit(x, np.ones([64, 3]), verbose=0)
    assert clone.optimizer.ledger.is_complete
    assert clone.optimizer.ledger.steps == 3 + spent.steps


def test_two_columns_of_the_same_categories_both_count():
    """The layers hold equal vocabularies, but each has a cost."""
    x = np.array([["yes", "no"], ["no", "yes"]] * 200)
    answers = [layers.StringLookup(output_mode="one_hot") for _ in range(2)]
    spent = [private_adapt(layer, x[:, i], noise_multiplier=2.0) for i, layer in enumerate(answers)]
    for layer in answers:
        layer.set_vocabulary(["no", "yes"])  # Noise decides ties.
        spent_on(layer, spent[answers.index(layer)])
    inputs = [keras.Input((1,), dtype="string") for _ in answers]
    both = layers.concatenate(
        [layer(column) for layer, column in zip(answers, inputs, strict=True)]
    )
    model = keras.Model(inputs, layers.Dense(2)(both))
    plan = tfdpx.PrivacyPlan(
        400, 400, steps=2, noise_multiplier=3.0, delta=1e-4, spent=sum(spent, Ledger())
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), loss)
    model.fit([x[:, :1], x[:, 1:]], np.zeros(400), epochs=2, verbose=0)
    assert model.optimizer.ledger.steps == 4


def test_an_ordinary_adapt_after_it_is_refused():
    x = np.random.default_rng(0).normal(size=(64, 2))
    layer = layers.Normalization()
    spent = private_adapt(layer, x, noise_multiplier=3.0)
    layer.adapt(x)
    model, x, y, _ = train(layer, spent, x=x)
    with pytest.raises(tfdpx.checks.UnfitForPrivacy, match="tfdpx.private_adapt"):
        model.fit(x, y, verbose=0)


@pytest.mark.slow
def test_a_feature_space():
    rng = np.random.default_rng(0)
    x = {
        "age": rng.uniform(20, 60, 400).astype("float32"),
        "city": rng.choice(["x", "y"], 400),
        "rooms": rng.integers(0, 3, 400),
        "income": rng.exponential(size=400).astype("float32"),
    }
    make = keras.utils.FeatureSpace
    space = make(
        features={
            "age": make.float_normalized(),
            "city": make.string_categorical(num_oov_indices=1),
            "rooms": make.integer_categorical(num_oov_indices=1),
            "income": make.float_discretized(num_bins=4),
        },
        output_mode="concat",
    )
    lower, upper = {"age": 0.0, "income": 0.0}, {"age": 100.0, "income": 10.0}
    spent = private_adapt(space, x, noise_multiplier=4.0, lower=lower, upper=upper, seed=0)
    assert spent.steps == 4
    plan = tfdpx.PrivacyPlan(
        400, 100, steps=3, epsilon=4.0, delta=1e-4, spent=spent, accountant="rdp"
    )
    y = rng.integers(0, 3, 400)
    model = keras.Model(space.get_inputs(), layers.Dense(3)(space.get_encoded_features()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tfdpx.DPSGD(0.1, plan=plan), loss)
    model.fit(x, y, verbose=0)
    assert model.optimizer.ledger.epsilon(1e-4, "rdp") == pytest.approx(4.0, rel=1e-3)


def adapted():
    layer = layers.Normalization()
    layer.adapt(np.ones([3, 1]))
    return layer


def space():
    return keras.utils.FeatureSpace({"age": keras.utils.FeatureSpace.float_normalized()})


NUMBERS, ONE = np.ones([8, 2]), np.ones(8)


def bad_arguments():
    """Yields a layer, data, arguments and words of the error."""
    return [
        (layers.Dense(3), NUMBERS, {}, "Dense"),
        (layers.TextVectorization(), np.array(["a"]), {}, "TextVectorization"),
        (adapted(), NUMBERS, {}, "public values"),
        (layers.Discretization([1.0]), ONE, {}, "public values"),
        (layers.Normalization(), np.array(["2024-01-01"], "datetime64[D]"), {}, "dates"),
        (layers.Normalization(), np.array(["a"]), {}, "numbers"),
        (layers.Discretization(num_bins=3), NUMBERS, {}, "one layer per column"),
        (layers.StringLookup(), ONE, {}, "texts"),
        (layers.IntegerLookup(), ONE, {}, "ints"),
        (layers.Normalization(), NUMBERS, dict(lower=1.0, upper=1.0), "lower < upper"),
        (layers.Normalization(), NUMBERS, dict(lower=[1.0] * 3, upper=2.0), "one per column"),
        (layers.Normalization(), NUMBERS, dict(lower=-1e30, upper=1e30), "below 1e\\+18"),
        (layers.Normalization(), NUMBERS[:, :0], {}, "numbers of shape"),
        (space(), {"age": ONE}, dict(lower=0.0, upper=1.0), "dicts of the features.* age"),
        (layers.Normalization(), NUMBERS, dict(noise_multiplier=np.nan), "noise_multiplier=nan"),
    ]


def test_bad_arguments():
    for layer, x, arguments, words in bad_arguments():
        with pytest.raises((TypeError, ValueError), match=words):
            private_adapt(layer, x, **{"noise_multiplier": 1.0, **arguments})


@pytest.mark.parametrize(
    "layer, x", [(layers.StringLookup(), ["a", "b"]), (layers.IntegerLookup(), [3, 4])]
)
def test_no_frequent_category_is_a_release_as_any_other(layer, x):
    with pytest.warns(UserWarning, match="enough rows"):
        spent = private_adapt(layer, np.array(x), noise_multiplier=1.0)
    assert spent.steps == 1
    assert layer(np.array(x)).numpy().tolist() == [0, 0]


def test_a_plan_of_people_takes_no_ledger_of_rows():
    spent = private_adapt(layers.Normalization(), NUMBERS, noise_multiplier=3.0)
    with pytest.raises(ValueError, match="`spent` must be.*each user"):
        tfdpx.PrivacyPlan(8, 4, 3, epsilon=3.0, delta=1e-3, unit="user", spent=spent)


@pytest.mark.parametrize(
    "epsilon, spent, words",
    [
        (1.0, None, "`spent`, which costs epsilon=4.377"),
        (9.0, [], r"`spent` must be a .*Ledger.*\[\]"),
    ],
)
def test_a_plan_must_pay_for_what_was_spent(epsilon, spent, words):
    if spent is None:
        spent = private_adapt(layers.Normalization(), NUMBERS, noise_multiplier=2**0.5)
    with pytest.raises(ValueError, match=words):
        tfdpx.PrivacyPlan(1000, 100, 3, epsilon=epsilon, delta=1e-5, spent=spent)
