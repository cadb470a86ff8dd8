"""The estimators in scikit-learn's hands: its own checks, pipelines, folds, searches and files."""

import pickle
import warnings

import keras
import numpy as np
import pytest
import scipy.sparse
from sklearn import base, compose, model_selection, pipeline, preprocessing
from sklearn.utils import estimator_checks

import tfdpx.sklearn
from tfdpx import account, table_rules
from tfdpx.accounting.ledger import Ledger
from tfdpx.heads.features import clip_factors
from tfdpx.sklearn import PrivateClassifier, PrivateRegressor, cross_validate

BOUNDS = {"lower": -10.0, "upper": 10.0}
TARGET = {"target_lower": -5.0, "target_upper": 5.0}
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
    """Those of `sample_weight` do not apply, because a private `fit` has none."""
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


@pytest.mark.parametrize("estimator", [linear_classifier(), linear_regressor()])
def test_all_of_epsilon_is_spent_and_no_more(data, estimator):
    x, y, labels = data
    target = labels if base.is_classifier(estimator) else y
    ledger = estimator.set_params(epsilon=3.0).fit(x, target).ledger_
    assert 0.995 * 3 < ledger.epsilon(1e-5) <= 3
    assert ledger.steps == 20 + len(ledger.entries) - 1 + (len(ledger.entries) == 2)
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

    monkeypatch.setattr(table_rules.Releases, "gaussian", exact)
    budget = dict(epsilon=3.0, delta=1e-5, is_regression=not num_classes, steps=3, name="linear")
    training = table_rules.choose(len(x), Ledger(), **budget)._replace(l2_norm_clip=clip)
    head, _ = table_rules.train_linear(x, y, training, num_classes)
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
    other, _ = table_rules.train_head(x, target, training._replace(plan=plan), num_classes)
    for ours, theirs in zip(head.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=2e-5 if num_classes else 0.01)


def test_noise_of_the_updates(data):
    """Over many draws the weights after one update vary as the plan says."""
    x = np.zeros([50, 400], "float32")
    x[:, 0] = 1.0
    budget = dict(epsilon=3.0, delta=1e-5, is_regression=False, steps=1, name="linear")
    training = table_rules.choose(50, Ledger(), **budget)
    head, ledger = table_rules.train_linear(x, np.zeros(50, int), training, 2)
    kernel = np.asarray(head.layers[-1].kernel)[1:]  # The data do not reach these weights.
    wanted = training.learning_rate * training.plan.noise_multiplier / 50
    assert np.std(kernel) == pytest.approx(wanted, rel=0.12)
    assert ledger.entries[0].noise_multiplier == training.plan.noise_multiplier


def test_pickles_hold_the_model_and_the_ledger(with_layers, data):
    loaded = pickle.loads(pickle.dumps(with_layers))
    np.testing.assert_allclose(
        loaded.predict_proba(data[0]), with_layers.predict_proba(data[0]), rtol=1e-5
    )
    assert loaded.ledger_ == with_layers.ledger_
    assert base.clone(loaded).get_params() == with_layers.get_params()
    with pytest.raises(AttributeError):
        base.clone(loaded).ledger_.epsilon(1e-5)


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
    assert spent.steps == classifier.ledger_.steps + 1
    loaded = pickle.loads(pickle.dumps(classifier))
    assert account.ledger_of(loaded.model_.variables).entries == spent.entries
    loaded.model_.compile("sgd", loss)
    loaded.model_.fit(*rows, verbose=0)
    again = pickle.loads(pickle.dumps(loaded))
    assert not account.ledger_of(again.model_.variables).is_complete


def test_a_pipeline_of_a_data_frame_in_all_but_name(data):
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
    told = capsys.readouterr().out
    assert told.startswith("4 private fits at epsilon=1; a row is in 3 of them. Together: epsilon=")
    assert np.mean(report["test_score"]) > 0.55 and report["ledger"].num_examples == 300


@pytest.mark.planted("a fold that no ledger counts")
def test_a_fold_that_is_not_counted_is_seen(monkeypatch, data):
    monkeypatch.setattr(tfdpx.sklearn, "sum", lambda x, start: sum(x[1:], start), raising=False)
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
        tfdpx.sklearn.model_selection,
        "cross_validate",
        lambda *arguments, cv, **others: splits.append(cv) or {"estimator": [linear_fit] * 2},
    )
    linear_fit = linear_classifier(steps=1).fit(x, labels)
    for target in (labels, np.roll(labels, 7)):
        cross_validate(linear_classifier(), x, target, cv=2, seed=3)
    for one, other in zip(*splits, strict=True):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
        assert sorted([*one[0], *one[1]]) == list(range(300))


@pytest.mark.parametrize("refit", [False, True])
def test_a_search_that_nothing_adds_up_warns_once(monkeypatch, data, refit):
    monkeypatch.setattr(tfdpx.sklearn, "_is_search_told", False)
    x, _, labels = data
    model = pipeline.make_pipeline(linear_classifier(epsilon=1.0, steps=2))
    grid = {"privateclassifier__learning_rate": [0.5, 1.0, 2.0]}
    search = model_selection.GridSearchCV(model, grid, cv=2, refit=refit)
    fits = 6 + refit
    spent = linear_classifier(epsilon=1.0)._epsilon_of(fits)
    words = f"GridSearchCV makes {fits} private fits, .* up to epsilon={spent:.3g} at delta=1e-05"
    with pytest.warns(UserWarning, match=words) as seen:
        search.fit(x, labels)
        search.fit(x, labels)
    assert [str(warning.message)[:4] for warning in seen].count("This") == 1
    assert seen[0].filename == __file__


def test_classes_that_a_fold_lacks(data):
    x, _, labels = data
    classifier = linear_classifier(classes=["no", "yes", "rare"]).fit(x, labels)
    assert list(classifier.classes_) == ["no", "rare", "yes"]
    assert classifier.predict_proba(x).shape == (300, 3)
    labels = np.where(np.arange(300) == 7, "rare", labels)
    report = cross_validate(linear_classifier(), x, labels, cv=2, seed=0)
    assert {len(fitted.classes_) for fitted in report["estimator"]} == {3}


def test_one_hot_columns_are_not_narrowed(monkeypatch, data):
    x, _, labels = data
    narrowed = []
    monkeypatch.setattr(
        table_rules,
        "narrow",
        lambda x, lower, upper, released: narrowed.append(x.shape[1]) or (lower, upper),
    )
    x = np.hstack([x, labels[:, np.newaxis] == ["no", "yes"]])
    limits = dict(lower=[-9, -9, -9, 0, 0], upper=[9, 9, 9, 1, 1])
    linear_classifier(steps=1, **limits).fit(x, labels)
    assert narrowed == [3]


REFUSALS = [
    (dict(epsilon=0), "epsilon"),
    (dict(delta=2), "delta"),
    (dict(lower=1.0, upper=0.0), "`lower, upper` must be two numbers, lower < upper"),
    (dict(lower=None), "`lower, upper` must be two numbers"),
    (dict(lower=[0, 1]), "lists of one for each of the 3 columns"),
    (dict(lower=None, upper=None, epsilon=0.1), "300 rows are too few .* as `lower` and `upper`"),
    (dict(model="deep"), "model"),
    (dict(classes=["yes"]), "labels that are not in `classes`"),
    (dict(batch_size=500), "batch_size"),
    (dict(l2_norm_clip=-1.0), "l2_norm_clip"),
    (dict(learning_rate=-1.0), "learning_rate"),
]


@pytest.mark.parametrize("arguments, words", REFUSALS)
def test_arguments_that_do_not_fit(data, arguments, words):
    x, _, labels = data
    with pytest.raises(ValueError, match=words):
        linear_classifier(**arguments).fit(x, labels)


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


def test_what_cross_validate_refuses(data):
    x, y, labels = data
    for cv in (1, 0.0, 401, True, "5"):
        with pytest.raises(ValueError, match="share between 0 and 1"):
            cross_validate(linear_classifier(), x, labels, cv=cv)
    with pytest.raises(TypeError, match="Received: OneHotEncoder"):
        cross_validate(preprocessing.OneHotEncoder(), x, labels)
    with pytest.raises(ValueError, match="target_lower, target_upper.* publicly known"):
        linear_regressor(target_lower=None).fit(x, y)
