"""The estimators in scikit-learn's hands: its own checks, pipelines, folds, searches and files."""

import collections
import dataclasses
import itertools
import pickle
import re
import warnings

import joblib
import keras
import numpy as np
import pytest
import scipy.sparse
from scipy import optimize, stats
from sklearn import (
    base,
    calibration,
    compose,
    ensemble,
    model_selection,
    multiclass,
    pipeline,
    preprocessing,
    semi_supervised,
)
from sklearn.experimental import enable_halving_search_cv  # noqa: F401
from sklearn.utils import estimator_checks

import tfdpx
from tfdpx import account
from tfdpx.accounting.ledger import Ledger
from tfdpx.heads.features import clip_factors
from tfdpx.sampling import shared_rows
from tfdpx.sklearn import PrivateClassifier, PrivateRegressor, cross_validate
from tfdpx.tables import estimators, rules

BOUNDS = {"lower": -10.0, "upper": 10.0}
TARGET = {"target_lower": -5.0, "target_upper": 5.0}
SEEDS = itertools.count(1)
ROUNDING = {
    "check_methods_sample_order_invariance": (
        "wants ten digits: the outputs of a Keras model are float32, whose products round by place"
    )
}


def linear_classifier(**arguments):
    return PrivateClassifier(**{"epsilon": 10.0, "steps": 20, "seed": 0} | BOUNDS | arguments)


def linear_regressor(**arguments):
    return PrivateRegressor(
        **{"epsilon": 10.0, "steps": 20, "seed": 0} | BOUNDS | TARGET | arguments
    )


def hidden_layers(inputs):
    return keras.layers.Dense(4, "relu")(inputs)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3))
    y = x @ [1.0, -2.0, 0.5]
    return x, y, np.where(y > 0, "yes", "no")


@pytest.fixture(scope="module")
def with_layers(data):
    """A classifier of a user's own layers, which DP-SGD trains."""
    x, _, labels = data
    return linear_classifier(model=hidden_layers, steps=3).fit(x, labels)


@pytest.mark.parametrize("estimator", [linear_classifier(), linear_regressor()])
def test_the_checks_of_scikit_learn(estimator):
    """Those of `sample_weight` do not apply: a private `fit` has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Deltas above 1 / rows, and checks that are skipped.
        results = estimator_checks.check_estimator(
            estimator, on_fail=None, expected_failed_checks=ROUNDING
        )
    failed = [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"]
    assert len(results) >= 45 and failed == []


def test_private_models_learn(data):
    x, y, labels = data
    assert linear_classifier(steps=None).fit(x, labels).score(x, labels) > 0.95
    assert linear_regressor(steps=None).fit(x, y).score(x, y) > 0.9
    classifier = linear_classifier(lower=None, upper=None, epsilon=30.0, model="linear")
    assert classifier.fit(x * 1e-4, labels).score(x * 1e-4, labels) > 0.95  # Bounds were found.


def test_right_guesses_take_the_place_of_epsilon(data):
    x, _, labels = data
    classifier = linear_classifier(epsilon=None, right_guesses=0.65)
    ledger = base.clone(classifier).fit(x, labels).ledger_
    assert 0.6499 < ledger.attack_bounds(1e-5).right_guesses <= 0.65
    assert 3.24 < ledger.epsilon(1e-5) < 3.2456
    assert PrivateClassifier()._budget == 3.0
    for arguments in ({"epsilon": 1.0}, {"right_guesses": 65}):
        with pytest.raises(ValueError, match="`right_guesses`"):
            base.clone(classifier).set_params(**arguments).fit(x, labels)


@pytest.mark.parametrize("estimator", [linear_classifier(), linear_regressor()])
def test_all_of_epsilon_is_spent_and_no_more(data, estimator):
    x, y, labels = data
    target = labels if base.is_classifier(estimator) else y
    ledger = estimator.set_params(epsilon=3.0).fit(x, target).ledger_
    assert 0.995 * 3 < ledger.epsilon(1e-5) <= 3
    # Narrower bounds and moments, and a count of labels.
    assert ledger.steps == 20 + 2 + base.is_classifier(estimator)
    assert ledger.is_seeded and "300" in ledger.statement()


def test_a_callable_model_is_in_the_ledger(with_layers, data):
    assert with_layers.ledger_.epsilon(1e-5) <= 10
    assert with_layers.model_.get_layer("tfdpx.head").layers[1].units == 4
    assert with_layers.predict_proba(data[0]).shape == (300, 2)


def trained_linear(monkeypatch, x, y, num_classes, clip):
    """The updates that a linear model releases, and their sensitivity, without noise."""
    released = []

    def exact(self, name, value, sensitivity):
        released.append((value, sensitivity))
        return value

    monkeypatch.setattr(rules.Releases, "gaussian", exact)
    asked = PrivateClassifier(steps=3, model="linear", l2_norm_clip=clip)
    training = rules.choose(asked, 3.0, len(x), Ledger(), is_regression=not num_classes)
    head, _ = estimators._fit_linear(x, y, training, num_classes, None, None)
    return released, training, head


@pytest.mark.parametrize("num_classes", [0, 2])
@pytest.mark.parametrize("clip", ["automatic", 0.3])
def test_a_row_moves_the_first_update_by_at_most_its_clip(monkeypatch, data, num_classes, clip):
    x, y, labels = data
    target = (labels == "yes").astype(int) if num_classes else y
    x = np.vstack([x[:20], [[1e6, -1e6, 1e6]]]).astype("float32")
    all_rows, *_ = trained_linear(monkeypatch, x, target[:21], num_classes, clip)
    without, *_ = trained_linear(monkeypatch, x[:-1], target[:20], num_classes, clip)
    moved = np.linalg.norm(all_rows[0][0] - without[0][0])
    assert 0.99 * all_rows[0][1] < moved <= all_rows[0][1]


@pytest.mark.planted("a clip that leaves gradients as they are")
def test_a_clip_that_does_nothing_is_seen(monkeypatch, data):
    monkeypatch.setattr("tfdpx.heads.gradients.clip_factors", lambda norms, clip: 0 * norms + 1)
    with pytest.raises(AssertionError):
        test_a_row_moves_the_first_update_by_at_most_its_clip(monkeypatch, data, 2, "automatic")


def test_automatic_clipping_stays_below_one():
    norms = 10.0 ** np.arange(-12, 13)
    assert np.all(norms * clip_factors(norms, "automatic") < 1)


@pytest.mark.parametrize("num_classes", [0, 2])
def test_the_short_cut_of_linear_models_is_dp_sgd(monkeypatch, data, num_classes):
    """Without noise both give the same weights; half an error is nearer to the stability."""
    x, y, labels = data
    x, target = x.astype("float32"), (labels == "yes").astype(int) if num_classes else y / 10
    _, training, head = trained_linear(monkeypatch, x, target, num_classes, "automatic")
    plan = tfdpx.PrivacyPlan(len(x), len(x), 3, noise_multiplier=0.0, delta=1e-5)
    training = training._replace(plan=plan)
    other, _ = estimators._fit_layers(x, target, training, num_classes, None, None)
    for ours, theirs in zip(head.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5 if num_classes else 0.01)


def test_noise_of_the_updates(data):
    """Over many draws the weights after one update vary as the plan says."""
    x = np.zeros([50, 400], "float32")
    x[:, 0] = 1.0
    asked = PrivateClassifier(steps=1, model="linear")
    training = rules.choose(asked, 3.0, 50, Ledger(), is_regression=False)
    head, ledger = estimators._fit_linear(x, np.zeros(50, int), training, 2, None, None)
    kernel = np.asarray(head.layers[-1].kernel)[1:]  # The data do not reach these weights.
    wanted = training.learning_rate * training.plan.noise_multiplier / 50
    assert np.std(kernel) == pytest.approx(wanted, rel=0.12)
    assert ledger.entries[0].noise_multiplier == training.plan.noise_multiplier


def test_a_pickle_does_not_hide_later_training_of_its_model(data):
    x, _, labels = data
    classifier = linear_classifier().fit(x, labels)
    assert account.ledger_of(classifier.model_.variables).is_complete
    before = account.ledger_of(classifier.model_.variables)
    plan = tfdpx.PrivacyPlan(300, 300, 2, noise_multiplier=9.0, delta=1e-5, spent=before)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rows = x.astype("float32"), (labels == "yes").astype("int32")
    classifier.model_.compile(tfdpx.DPSGD(0.1, plan=plan), loss)
    classifier.model_.train_on_batch(*rows)
    spent = account.ledger_of(classifier.model_.variables)
    assert spent.steps == before.steps + 1
    assert classifier.ledger_ == spent and classifier.ledger_.delta == 1e-5
    assert classifier.ledger_.epsilon(1e-5) > before.epsilon(1e-5)
    loaded = pickle.loads(pickle.dumps(classifier))
    assert account.ledger_of(loaded.model_.variables).entries == spent.entries
    loaded.model_.compile("sgd", loss)
    loaded.model_.fit(*rows, verbose=0)
    again = pickle.loads(pickle.dumps(loaded))
    assert not account.ledger_of(again.model_.variables).is_complete


def test_the_model_of_an_estimator_is_reported_at_its_delta(tmp_path, data):
    x, _, labels = data
    classifier = PrivateClassifier(2.0, 1e-6, model="linear", **BOUNDS).fit(x, labels)
    joblib.dump(classifier, tmp_path / "classifier.joblib")
    loaded = joblib.load(tmp_path / "classifier.joblib")
    for place, model in enumerate([classifier.model_, loaded.model_]):
        record = tfdpx.report(model, tmp_path / str(place), data="made up")
        assert record["delta"] == 1e-6 and 1.98 < record["epsilon"] <= 2.0


def test_a_pipeline_of_a_data_frame_in_all_but_name(data, capsys):
    x, _, labels = data
    table = np.array([[*row, city] for row, city in zip(x, ["Rome", "Oslo"] * 150, strict=True)])
    table = table.astype(object)
    table[:9, 0], table[:9, 3] = np.nan, None
    encoder = preprocessing.OneHotEncoder(
        categories=[["Oslo", "Rome"]], handle_unknown="ignore", sparse_output=False
    )
    columns = compose.make_column_transformer((encoder, [3]), remainder="passthrough")
    limits = {"lower": [0, 0, -4, -4, -4], "upper": [1, 1, 4, 4, 4]}
    model = pipeline.make_pipeline(columns, linear_classifier(**limits))
    report = cross_validate(model, table, labels, cv=3, seed=0, scoring=["accuracy", "roc_auc"])
    assert "steps before it (columntransformer) learn from rows, no" in capsys.readouterr().out
    assert np.all(report["test_roc_auc"] > 0.8) and len(report["estimator"]) == 3


def folds_are_counted(data):
    """Each row is in three of four fits, and the ledger has all that these spent."""
    x, _, labels = data
    report = cross_validate(linear_classifier(epsilon=1.0), x, labels, cv=4, seed=0)
    fits = [fitted.ledger_ for fitted in report["estimator"]]
    assert report["ledger"].steps == sum(ledger.steps for ledger in fits[:3])
    assert len({entry.run for entry in report["ledger"].entries}) >= 3
    told = linear_classifier(epsilon=1.0)._epsilon_of(3)
    assert report["ledger"].epsilon(1e-5) == pytest.approx(told, rel=0.01) and 1.7 < told < 3
    return report


def test_folds_add_up(data, capsys):
    report = folds_are_counted(data)
    text = capsys.readouterr().out
    assert text.startswith("4 private fits at epsilon=1; a row is in 3 of them. Together: epsilon=")
    # With fits of other tests on these rows, a second line follows.
    first = text.splitlines()[0]
    assert epsilons(first)[-1] == pytest.approx(report["ledger"].epsilon(1e-5), rel=0.01)
    assert np.mean(report["test_score"]) > 0.55 and report["ledger"].num_examples == 300


@pytest.mark.planted("a fold that no ledger counts")
def test_a_fold_that_is_not_counted_is_seen(monkeypatch, data):
    monkeypatch.setattr(estimators, "sum", lambda x, start: sum(x[1:], start), raising=False)
    with pytest.raises(AssertionError):
        folds_are_counted(data)


def test_a_part_that_is_held_out_is_in_no_fit(data, capsys):
    x, y, _ = data
    report = cross_validate(linear_regressor(), x, y, cv=0.25, seed=0)
    assert capsys.readouterr().out.startswith("1 private fit at epsilon=10; a row is in 1 of them.")
    [fitted] = report["estimator"]
    assert fitted.ledger_.num_examples == 225
    assert report["ledger"].entries == fitted.ledger_.entries


def test_folds_do_not_depend_on_labels(monkeypatch, data):
    """Stratified ones do: a label of one row then moves others to another fold."""
    x, _, labels = data
    splits = []
    monkeypatch.setattr(
        estimators.model_selection,
        "cross_validate",
        lambda *arguments, cv, **others: splits.append(cv) or {"estimator": [linear_fit] * 2},
    )
    monkeypatch.setattr(shared_rows.Copies, "with_others", lambda copies: "")
    linear_fit = linear_classifier(steps=1).fit(x, labels)
    for target in (labels, np.roll(labels, 7)):
        cross_validate(linear_classifier(), x, target, cv=2, seed=3)
    for one, other in zip(*splits, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
        assert sorted([*one[0], *one[1]]) == list(range(300))


def gaussian_epsilon(mu):
    """The epsilon of a Gaussian mechanism at delta 1e-5, by its closed form."""

    def excess(epsilon):
        upper = stats.norm.cdf(mu / 2 - epsilon / mu)
        return upper - np.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)) - 1e-5

    return optimize.brentq(excess, 0.0, 500.0)


class Fits:
    """Counts the rows of all fits, and what these spent on the dearest row."""

    def __init__(self, monkeypatch):
        self.squared_mu = collections.Counter()
        self.squared_mu_if_shared = 0.0
        self.count = 0
        original = estimators._PrivateEstimator.fit

        def fit(estimator, x, y):
            original(estimator, x, y)
            runs = [(e.noise_multiplier, e.steps) for e in estimator.ledger_.entries]
            squared = sum(steps / noise**2 for noise, steps in runs)
            for row, times in collections.Counter(map(bytes, x)).items():
                self.squared_mu[row] += times**2 * squared
            self.squared_mu_if_shared += squared
            self.count += 1
            return estimator

        monkeypatch.setattr(estimators._PrivateEstimator, "fit", fit)

    @property
    def epsilon(self):
        return gaussian_epsilon(max(self.squared_mu.values()) ** 0.5)


@pytest.fixture
def fits(monkeypatch):
    return Fits(monkeypatch)


@pytest.fixture
def rows():
    """Rows that no other test has."""
    rng = np.random.default_rng(next(SEEDS))
    x = rng.normal(size=(90, 3))
    return x, np.digitize(x[:, 0], [-0.5, 0.5])


def quick(epsilon=1.0, **arguments):
    return linear_classifier(epsilon=epsilon, steps=2, model="linear", **arguments)


def told(action):
    """Returns the texts and files of the warnings about sums of fits."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    words = [str(w.message) for w in caught if "private fit" in str(w.message)]
    assert all(w.filename == __file__ for w in caught if "private fit" in str(w.message))
    return words, result


def epsilons(text):
    return [float(number) for number in re.findall(r"epsilon=([\d.]+\d)", text)]


SEARCHES = {
    "grid": lambda: model_selection.GridSearchCV(quick(), {"epsilon": [1.0, 8.0]}, cv=3),
    "halving": lambda: model_selection.HalvingGridSearchCV(
        quick(), {"epsilon": [1.0, 2.0, 4.0]}, cv=2, min_resources=30
    ),
    "of bags": lambda: model_selection.GridSearchCV(
        ensemble.BaggingClassifier(quick(), n_estimators=2), {"bootstrap": [True, False]}, cv=2
    ),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_tells_once_what_its_fits_spent(fits, rows, name):
    search = SEARCHES[name]()
    [text], _ = told(lambda: search.fit(*rows))
    assert text.startswith(f"This search made {fits.count} private fits: together epsilon=")
    assert epsilons(text)[0] == pytest.approx(fits.epsilon, rel=2e-3)
    assert "other fits" not in text and "no epsilon covers" in text
    if name == "grid":
        assert 15.9 < fits.epsilon < 16.1  # Two folds and the refit of the dearest.


def test_a_second_search_tells_its_sum_and_that_of_both(fits, rows):
    search = SEARCHES["grid"]()
    [first], _ = told(lambda: search.fit(*rows))
    [second], _ = told(lambda: search.fit(*rows))
    assert epsilons(second) == [epsilons(first)[0], pytest.approx(fits.epsilon, rel=2e-3)]


def test_fits_of_a_search_count_together_if_a_step_changes_their_rows(fits, rows):
    model = pipeline.make_pipeline(preprocessing.StandardScaler(), quick())
    grid = {"privateclassifier__epsilon": [0.5, 1.0]}
    [text], _ = told(lambda: model_selection.GridSearchCV(model, grid, cv=3).fit(*rows))
    together = gaussian_epsilon(fits.squared_mu_if_shared**0.5)
    assert together > 1.2 * fits.epsilon  # No row is the same in two folds.
    assert epsilons(text)[0] == pytest.approx(together, rel=2e-3)


META_ESTIMATORS = {
    "bagging": lambda: ensemble.BaggingClassifier(quick(), n_estimators=6),
    "calibration": lambda: calibration.CalibratedClassifierCV(quick(), cv=4),
    "one against one": lambda: multiclass.OneVsOneClassifier(quick()),
    "stacking": lambda: ensemble.StackingClassifier(
        [("first", quick()), ("second", quick())], cv=3
    ),
    "self-training": lambda: semi_supervised.SelfTrainingClassifier(
        quick(10.0, classes=[0, 1, 2]), criterion="k_best", max_iter=3
    ),
    "voting of one against the rest": lambda: ensemble.VotingClassifier(
        [("only", multiclass.OneVsRestClassifier(quick()))]
    ),
}


def check_words(texts, fits, most):
    """The last sum is not above the truth, which is below the announced limit."""
    assert 1 <= len(texts) <= most
    said, limit = epsilons(texts[-1])
    assert said <= 1.002 * fits.epsilon and fits.epsilon <= limit


@pytest.mark.parametrize("name", META_ESTIMATORS)
def test_a_meta_estimator_tells_what_its_fits_spend(fits, rows, name):
    x, labels = rows
    if name == "self-training":
        labels = np.where(np.arange(len(x)) % 3 == 0, -1, labels)
    texts, _ = told(lambda: META_ESTIMATORS[name]().fit(x, labels))
    check_words(texts, fits, most=3)
    if name == "bagging":
        assert "if equal rows in one fit are different people" in texts[-1] and fits.epsilon > 4


def test_folds_of_scikit_learn_and_second_fits_are_told(fits, rows):
    x, labels = rows
    template = quick()
    estimator = base.clone(template)  # A copy that is copied need not be of a search.
    texts, _ = told(lambda: model_selection.cross_val_score(estimator, x, labels, cv=5))
    check_words(texts, fits, most=2)
    assert epsilons(texts[-1])[0] == pytest.approx(fits.epsilon, rel=2e-3)  # Of all four fits.
    texts, _ = told(lambda: [estimator.fit(x, labels) for _ in range(5)])
    check_words(texts, fits, most=1)


def test_searches_that_others_copy_and_keep_are_told(fits, rows):
    grid = SEARCHES["grid"]()
    texts, vote = told(lambda: ensemble.VotingClassifier([("grid", grid)]).fit(*rows))
    assert len(texts) == 1 and epsilons(texts[0])[0] == pytest.approx(fits.epsilon, rel=2e-3)
    assert vote.estimators_[0].best_estimator_.ledger_.steps > 0


def test_no_sum_is_told_of_one_fit_or_of_other_rows(rows, capsys):
    x, labels = rows
    texts, _ = told(lambda: quick().fit(np.vstack([x[:20], x[:20]]), [*labels[:20], *labels[:20]]))
    assert texts == []
    texts, _ = told(lambda: [quick().fit(x[i : i + 20], labels[i : i + 20]) for i in (20, 40)])
    assert texts == []
    texts, _ = told(lambda: cross_validate(quick(), x[60:], labels[60:], cv=3))
    assert texts == [] and "3 private fits" in capsys.readouterr().out
    [text], _ = told(lambda: quick().fit(x[60:], labels[60:]))
    assert text.startswith("3 private fits share rows")


def test_folds_tell_the_sum_with_earlier_fits(fits, rows, capsys):
    quick(3.0).fit(*rows)
    cross_validate(quick(), *rows, cv=3)
    text = capsys.readouterr().out.splitlines()[1]
    assert text.startswith("With the other fits on these rows in this process: epsilon=")
    assert epsilons(text) == [pytest.approx(fits.epsilon, rel=2e-3)]


def test_large_tables_are_recognised_by_some_of_their_rows(monkeypatch, fits, rows):
    monkeypatch.setattr(shared_rows, "_MOST_ROWS", 10)
    [text], _ = told(lambda: SEARCHES["grid"]().fit(*rows))
    assert epsilons(text)[0] == pytest.approx(fits.epsilon, rel=2e-3)


@pytest.mark.slow
def test_fits_on_random_batches_are_added_up(rows):
    x, labels = rows
    estimator = quick(2.0, batch_size=30)
    [text], _ = told(lambda: [estimator.fit(x, labels) for _ in range(2)])
    ledger = Ledger(tuple(dataclasses.replace(e, run=None) for e in estimator.ledger_.entries))
    assert epsilons(text)[0] == pytest.approx((ledger + ledger).epsilon(1e-5), rel=2e-3)


@pytest.mark.slow
def test_fits_in_other_processes_are_told_there_and_named_here(rows, capfd):
    search = SEARCHES["grid"]().set_params(n_jobs=2, refit=False)
    with pytest.warns(UserWarning, match="Copies were sent to other processes.* no epsilon covers"):
        search.fit(*rows)
    assert "private fits share rows" in capfd.readouterr().err


def test_classes_that_a_fold_lacks(data):
    x, _, labels = data
    classifier = linear_classifier(classes=["no", "yes", "rare"]).fit(x, labels)
    assert list(classifier.classes_) == ["no", "rare", "yes"]
    assert classifier.predict_proba(x).shape == (300, 3)
    labels = np.where(np.arange(300) == 7, "rare", labels)
    report = cross_validate(linear_classifier(), x, labels, cv=2, seed=0)
    assert {len(fitted.classes_) for fitted in report["estimator"]} == {3}


REFUSALS = [
    (dict(epsilon=0), "epsilon"),
    (dict(delta=2), "delta"),
    (dict(lower=1.0, upper=0.0), "`lower, upper` must be two numbers.*, lower < upper"),
    (dict(upper=1e30), "`lower, upper` must be two numbers.* below 1e.18"),
    (dict(lower=[0, 1]), r"one for each of the 3 columns of numbers in X \(0, 1, 2\)"),
    (dict(lower=None, upper=None, epsilon=0.1), "300 rows are too few .* as `lower` and `upper`"),
    (dict(model="deep"), "model"),
    (dict(classes=["yes"]), "`classes` must hold two or more labels, with all of `y`"),
    (dict(batch_size=500), "batch_size"),
    (dict(l2_norm_clip=-1.0), "l2_norm_clip"),
    (dict(l2_norm_clip=np.inf), "`l2_norm_clip` must be a positive, finite number"),
    (dict(learning_rate=-1.0), "learning_rate"),
    (dict(steps=2.5), "`steps` must be a positive integer"),
    (dict(batch_size=0), "`batch_size` must be a positive integer"),
]


@pytest.mark.parametrize("arguments, words", REFUSALS)
def test_arguments_that_do_not_fit(data, arguments, words):
    x, _, labels = data
    with pytest.raises(ValueError, match=words):
        linear_classifier(**arguments).fit(x, labels)


def test_arguments_of_scikit_learn_name_those_here(data):
    with pytest.raises(TypeError, match="Classifier takes no .*`random_state`. Write `seed`"):
        PrivateClassifier(random_state=0)
    with pytest.raises(TypeError, match="Regressor takes no .*`class_weight`. Leave it out"):
        PrivateRegressor(class_weight="balanced")
    x, _, labels = data
    for name in ("sample_weight", "weights"):
        with pytest.raises(TypeError, match=f"fit takes no argument `{name}`. Leave it out"):
            linear_classifier().fit(x, labels, **{name: np.ones(300)})


def test_texts_and_sparse_columns(data):
    x, _, labels = data
    with pytest.raises(ValueError, match="OneHotEncoder") as error:
        linear_classifier().fit(np.array([["Oslo"], ["Rome"]] * 150, object), labels)
    assert "Oslo" not in str(error.value) and error.value.__cause__ is None
    with pytest.raises(ValueError, match="`X`.*dates in column 1.*days since a public date"):
        table = [[1.0, day] for day in np.arange(300).astype("datetime64[D]").tolist()]
        linear_classifier().fit(np.array(table, object), labels)
    with pytest.raises(ValueError, match="`y`.*texts") as error:
        linear_regressor().fit(x, ["Oslo"] * 300)
    assert "Oslo" not in str(error.value)
    dense = linear_classifier().fit(x, labels)
    sparse = linear_classifier().fit(scipy.sparse.csr_matrix(x), labels)
    np.testing.assert_allclose(sparse.predict_proba(x), dense.predict_proba(x), rtol=1e-6)


def columns_of(x):
    """A dict of two columns of numbers, one of them with an odd name, a boolean and texts."""
    city = np.where(x[:, 1] > 0, "Bonn", "Rome").astype(object)
    city[:3] = None, np.nan, "Oslo"  # The last one in a single row.
    return {"a/b": x[:, 0], "clip": 100 * x[:, 2], "owns": x[:, 1] > 1, "city": city}


def test_columns_of_a_dict(data):
    x, y, labels = data
    columns = columns_of(x)
    limits = [{"a/b": v, "clip": 100 * v, "owns": max(v / 9, 0)} for v in (-9.0, 9.0)]
    limits = dict(zip(("lower", "upper"), limits, strict=True))
    classifier = linear_classifier(**limits, steps=None, model="linear").fit(columns, labels)
    assert classifier.score(columns, labels) > 0.85
    layers = classifier.model_.get_layer("tfdpx.preprocessing").layers
    [lookup] = [layer for layer in layers if isinstance(layer, keras.layers.StringLookup)]
    assert set(lookup.get_vocabulary(False)) == {"Bonn", "Rome"}
    assert classifier.ledger_.steps == 180 + 4 and classifier.ledger_.epsilon(1e-5) <= 10
    loaded = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(loaded.predict(columns), classifier.predict(columns))
    model = PrivateRegressor(30.0, model="linear", **TARGET)  # All bounds are found.
    assert model.fit(columns, y).score(columns, y) > 0.5
    with pytest.raises(ValueError, match="NaN"):
        model.fit(columns, np.where(y > 0, y, np.nan))
    with pytest.raises(ValueError, match="`X`.*dates in column 'day'"):
        linear_classifier().fit({"day": np.arange(300).astype("datetime64[D]")}, labels)
    with pytest.raises(ValueError, match=r"`lower, upper`.*3 columns.*\(a/b, clip, owns\)"):
        linear_classifier(lower={"city": 0.0}, upper={"city": 1.0}).fit(columns, labels)


class Frame:
    """A data frame, as far as scikit-learn and the estimators use one of pandas."""

    iloc = None

    def __init__(self, columns):
        self.parts, self.columns = columns, list(columns)
        self.shape = len(columns[self.columns[0]]), len(columns)

    def __len__(self):
        return self.shape[0]

    def __getitem__(self, name):
        return self.parts[name]

    def __array__(self, dtype=None, copy=None):
        return np.column_stack([values.astype(object) for values in self.parts.values()])

    def take(self, rows, axis):
        return Frame({name: values[rows] for name, values in self.parts.items()})


def test_folds_of_a_data_frame_with_texts(data):
    x, y, _ = data
    frame = Frame(columns_of(x))
    report = cross_validate(PrivateRegressor(30.0, model="linear", **TARGET), frame, y, cv=2)
    assert set(report["estimator"][0].model_.input) == {"a_b", "clip", "owns", "city"}
    assert np.mean(report["test_score"]) > 0.3
    with pytest.raises(TypeError, match="no.* be a dict here. Write `pandas.DataFrame"):
        cross_validate(linear_regressor(), columns_of(x), y)


def test_other_numbers_of_rows_are_told_with_the_argument(data):
    x, y, labels = data
    words = "`X` and `y` must have the same number of rows. Received: 300 in X, 290 in y. Take"
    for table in (x, x.tolist(), scipy.sparse.csr_matrix(x)):
        with pytest.raises(ValueError, match=words):
            linear_classifier().fit(table, labels[:290])
    with pytest.raises(ValueError, match=words):
        cross_validate(linear_regressor(), x, y[:290])
    with pytest.raises(ValueError, match=r"300 in X\['a'\], 290 in X\['b'\]"):
        linear_classifier().fit({"a": x[:, 0], "b": x[:290, 1]}, labels)


def test_statistics_take_one_row_of_each_person(monkeypatch, data):
    """It is drawn only from a person's rows, so all rows of one change them as one row does."""
    x, _, labels = data
    samples, people = [], np.repeat(np.arange(100), 3)
    original = rules.Preprocessing.__init__
    monkeypatch.setattr(
        rules.Preprocessing,
        "__init__",
        lambda self, columns, *others: samples.append(columns) or original(self, columns, *others),
    )
    classifier = linear_classifier(seed=None, steps=2, model="linear")
    classifier.fit(np.column_stack([people / 50, x]), labels, user_ids=people, examples_per_user=2)
    ledger = classifier.ledger_
    assert {entry.unit for entry in ledger.entries} == {"user"} and ledger.num_examples == 100
    assert 9.9 < ledger.epsilon(1e-5) <= 10
    [chosen] = (columns.arrays[""] for columns in samples)
    assert sorted(chosen[:, 0]) == sorted(set(people / 50))
    places = [np.flatnonzero(x[:, 0] == row[1])[0] % 3 for row in chosen]
    assert set(places) == {0, 1, 2}  # Not always the first row of a person.


def test_what_cross_validate_refuses(data):
    x, y, labels = data
    for cv in (1, 0.0, 401, True, "5"):
        with pytest.raises(ValueError, match="share between 0 and 1"):
            cross_validate(linear_classifier(), x, labels, cv=cv)
    with pytest.raises(TypeError, match="Received: OneHotEncoder"):
        cross_validate(preprocessing.OneHotEncoder(), x, labels)
    with pytest.raises(ValueError, match="target_lower, target_upper.* publicly known"):
        linear_regressor(target_lower=None).fit(x, y)
