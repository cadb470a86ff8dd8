"""Private estimators with the interface of scikit-learn, and a ledger after `fit`.

    from tfdpx.sklearn import PrivateClassifier, cross_validate

    classifier = PrivateClassifier(epsilon=3.0, lower=0.0, upper=100.0)
    classifier.fit(X, y)
    print(classifier.ledger_.statement())

Other steps of a pipeline that learn from private rows, for example a `StandardScaler` or a
`OneHotEncoder` without `categories`, add no noise, and no ledger counts them. See
docs/data_scientists.md.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from numpy.typing import ArrayLike
from scipy import sparse
from sklearn import base, model_selection
from sklearn.pipeline import Pipeline
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from tfdpx import account
from tfdpx import table_rules as rules
from tfdpx._arguments import (
    check_choice,
    check_positive_integer,
    is_integer,
    is_number,
    require,
)
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import Ledger
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.heads.head import norm_bound, optional, positive
from tfdpx.sampling import shared_rows
from tfdpx.sampling.inputs import unfit_column

__all__ = ["PrivateClassifier", "PrivateRegressor", "cross_validate"]

_PREDICT_BATCH = 8192
# Kinds of columns that are refused, with the remedy.
_NO_NUMBERS = {
    "dates": "Replace them by numbers, such as days since a public date, or leave the column out.",
    "texts": "Encode them before, for example by OneHotEncoder(categories=[...], "
    "handle_unknown='ignore') in a ColumnTransformer, with categories that are publicly known.",
}


@dataclasses.dataclass(eq=False, repr=False)
class _PrivateEstimator(base.BaseEstimator):
    """The base of both estimators: their arguments, training, copies and pickling."""

    epsilon: float = 3.0
    delta: float = 1e-5
    _: dataclasses.KW_ONLY
    lower: ArrayLike | None = None
    upper: ArrayLike | None = None
    model: str | Callable[[Any], Any] | None = None
    batch_size: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    l2_norm_clip: float | str | None = None
    seed: int | None = None

    def __sklearn_clone__(self):
        copy = super().__sklearn_clone__()
        shared_rows.on_clone(self, copy)
        return copy

    def __sklearn_tags__(self):
        shared_rows.on_use(self)
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True  # A missing number is replaced by the mean.
        tags.non_deterministic = self.seed is None
        return tags

    def _train(self, x, y, num_classes):
        """Fits `model_`, with its ledger.

        Args:
            x: float64 `[rows, columns]`.
            y: Int labels `[rows]`, or numbers in about [-1, 1].
            num_classes: Int; 0 for a regression.
        """
        if not callable(self.model):
            check_choice("model", self.model, (None, "linear", "network"))
        optional(positive)("learning_rate", self.learning_rate)
        optional(check_positive_integer)("batch_size", self.batch_size)
        optional(check_positive_integer)("steps", self.steps)
        if self.l2_norm_clip != "automatic":
            for check in (positive, norm_bound):
                optional(check)("l2_norm_clip", self.l2_norm_clip)
        rows, columns = x.shape
        lower, upper = self._limits(columns)
        is_rough = np.zeros(columns, bool)
        if lower is not None:  # One-hot columns have exact bounds.
            is_rough = (lower != 0) | (upper != 1)
        counts = {"unbounded" if lower is None else "bounded": columns}
        counts |= {"rough": int(np.sum(is_rough)), "num_classes": num_classes}
        plan = rules.plan_releases(rows, self.epsilon, self.delta, **counts)
        releases = plan.releases(self.seed)
        shares = rules.rare_shares(y, num_classes, plan, releases)
        layer, spent = rules.number_scaling(x, lower, upper, is_rough, plan, releases, self.seed)
        inputs = keras.Input((columns,))
        scaled = rules.cut_numbers(layer(inputs))
        training = rules.choose(
            rows,
            spent + releases.ledger(),
            epsilon=self.epsilon,
            delta=self.delta,
            is_regression=not num_classes,
            rare_columns=None if shares is None else columns,
            name="network" if callable(self.model) else self.model,
            batch_size=self.batch_size,
            steps=self.steps,
            learning_rate=self.learning_rate,
        )
        if self.l2_norm_clip is not None:
            training = training._replace(l2_norm_clip=self.l2_norm_clip)
        data = _outputs(keras.Model(inputs, scaled), x), y, training, num_classes, shares
        if training.name == "linear" and training.plan.batch_size == rows:
            head, ledger = rules.train_linear(*data, seed=self.seed)
        else:
            if self.seed is not None:
                keras.utils.set_random_seed(self.seed)
            hidden = self.model if callable(self.model) else None
            head, optimizer = rules.train_head(*data, hidden=hidden, seed=self.seed)
            ledger = optimizer.ledger
        self.model_ = keras.Model(inputs, head(scaled), name=f"{training.name}_on_table")
        ledger = dataclasses.replace(ledger, delta=self.delta, num_examples=rows)
        account.attach(ledger, self.model_.variables)
        account.uncounted.discard(layer)
        shared_rows.on_fit(self, x, ledger)
        return self

    @property
    def ledger_(self) -> Ledger:
        """Ledger of the weights of `model_`."""
        return account.ledger_of(self.model_.weights)

    def _limits(self, columns):
        """Returns `lower` and `upper` as float64 arrays `[columns]`, or None for both."""
        if self.lower is None and self.upper is None:
            return None, None
        try:
            limits = [
                np.broadcast_to(np.asarray(limit, "float64"), (columns,))
                for limit in (self.lower, self.upper)
            ]
            is_valid = bool(np.all(limits[0] < limits[1])) and np.all(np.isfinite(limits))
        except (TypeError, ValueError):
            is_valid = False
        must = (
            f"be two numbers, lower < upper, or lists of one for each of the {columns} columns of X"
        )
        require(is_valid, "lower, upper", (self.lower, self.upper), must)
        return limits

    def _read(self, X, y="no_validation", **checks):
        """Returns X as float64, and y, after the checks of scikit-learn."""
        checks |= {"dtype": "float64", "ensure_all_finite": "allow-nan", "accept_sparse": "csr"}
        _check_numbers("X", X)
        data = validate_data(self, X, y, **checks)
        x, *rest = data if isinstance(data, tuple) else (data,)
        x = x.toarray() if sparse.issparse(x) else x
        return (x, *rest) if rest else x

    def _predicted(self, X):
        """Returns the outputs of the model, float32 `[rows, outputs]`."""
        check_is_fitted(self)
        return _outputs(self.model_, self._read(X, reset=False))

    def _epsilon_of(self, fits):
        """Returns the epsilon of several fits on the same rows, as if all had full batches."""
        steps = self.steps or rules.FEW_STEPS
        plan = PrivacyPlan(1, 1, steps, epsilon=self.epsilon, delta=self.delta, accountant="gdp")
        run = plan.noise_multiplier, 1.0, fits * steps
        return accountants.composed_epsilon((run,), self.delta)

    def __getstate__(self):
        state = super().__getstate__()
        if "model_" in state:
            model = state["model_"]
            state = {**state, "model_": (_to_bytes(model), account.ledger_of(model.weights))}
        else:
            shared_rows.on_pickle(self)
        return state

    def __setstate__(self, state):
        if "model_" in state:
            content, ledger = state["model_"]
            model = _from_bytes(content)
            account.mark_known(model.variables)  # The ledger belongs to exactly these weights.
            account.attach(ledger, model.variables)  # Makes them unknown again if it is incomplete.
            state = {**state, "model_": model}
        super().__setstate__(state)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class PrivateClassifier(base.ClassifierMixin, _PrivateEstimator):
    """A private scikit-learn classifier for tables of numbers.

    A tenth of the budget is spent on scaling the columns (and on counting the labels, if there are
    enough rows), and the rest on training a Keras model by DP-SGD. Encode strings first, with a
    list of categories that is publicly known. A missing number (NaN) is replaced by the mean of its
    column.

    Guarantee: `model_`, and all predictions on rows of others, are (epsilon, delta)-differentially
    private under adding or removing one row of X and y. The numbers of rows and columns, `classes_`
    and all arguments count as public: do not read them off the data. Each fit on the same rows
    spends its epsilon again, for example in a search over settings; a warning tells the sum of this
    process. Scores on private rows are exact, without noise, and so is a calibrator that is fitted
    to them (`CalibratedClassifierCV`). Give a float as `l2_norm_clip` for better probabilities.

    Args:
        epsilon: Float > 0, the budget of one `fit`, preprocessing included.
        delta: Float in (0, 1), well below 1 / rows.
        classes: Optional list of the labels; public. None reads them off y, and then a label that
            only one row has reveals that row.
        lower: Float, or one for each column of X: the smallest possible value, publicly known, even
            if roughly. If both bounds are None, powers of two are found privately, which takes more
            rows. [0, 1] counts as exact.
        upper: Like `lower`, the largest possible value.
        model: None for a linear model, or one hidden layer of 64 units if epsilon times rows is at
            least 3,500; "linear" or "network" to choose; or a function of a symbolic Keras tensor
            of scaled columns `[rows, columns]` that returns the last hidden tensor. The estimator
            adds the dense layer for the outputs.
        batch_size: Int, the expected number of rows in an update; None for all rows, at most
            65,536.
        steps: Int, updates; None for 180, or 60 if epsilon times rows are below 300.
        learning_rate: Float; None for the rule of docs/tables.md.
        l2_norm_clip: Float, the bound on the norm of a row's gradient, or "automatic". None chooses
            "automatic", or a float if a noisy count finds a rare label.
        seed: Optional int for repeatable experiments, also passed to Keras. There is no privacy if
            the seed is known, because the noise can then be repeated.

    Attributes:
        classes_: Array of the labels, sorted; public.
        ledger_: `tfdpx.accounting.Ledger` of the last `fit` and of later training of `model_`.
        model_: `keras.Model` from float32 `[rows, columns]` to logits; it includes the scaling.
        n_features_in_: Int, columns of X.

    Example:
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(0, 100, size=(2_000, 2))
    >>> y = np.where(X[:, 0] > X[:, 1], "yes", "no")
    >>> classifier = PrivateClassifier(1.0, lower=0.0, upper=100.0, model="linear")
    >>> bool(classifier.fit(X, y).score(X, y) > 0.9)
    True
    >>> bool(classifier.ledger_.epsilon(1e-5) <= 1)
    True
    """

    classes: ArrayLike | None = None

    def fit(self, X: ArrayLike, y: ArrayLike) -> PrivateClassifier:
        """Trains on private rows, and records the privacy loss in `ledger_`.

        Args:
            X: Array or data frame of numbers `[rows, columns]`.
            y: Labels `[rows]`.

        Returns:
            The estimator.

        Raises:
            ValueError: If an argument is invalid, or there are too few rows to find bounds.
        """
        X, y = self._read(X, y, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_ = np.unique(y if self.classes is None else self.classes)
        if not np.all(np.isin(y, self.classes_)):
            raise ValueError(
                "Argument `y` has labels that are not in `classes`. Give all that there may be. "
                f"Received: classes={self.classes}."
            )
        if len(self.classes_) < 2:
            raise ValueError(
                "A classifier needs two classes or more. Received: y of one class. Give all that "
                "there may be by `classes`."
            )
        return self._train(X, np.searchsorted(self.classes_, y), len(self.classes_))

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Returns the probabilities of `classes_`, float32 `[rows, classes]`.

        Args:
            X: As for `fit`.
        """
        return keras.ops.convert_to_numpy(keras.ops.softmax(self._predicted(X)))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the most likely label of each row, `[rows]`.

        Args:
            X: As for `fit`.
        """
        labels = np.argmax(self._predicted(X), axis=1)
        return self.classes_[labels]


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class PrivateRegressor(base.RegressorMixin, _PrivateEstimator):
    """A private scikit-learn regressor for tables of numbers.

    Works like `PrivateClassifier`, for a target between two public bounds. Predictions are nearer
    to the median than to the mean, because gradients of the squared error are normalized.

    Args:
        epsilon: Float > 0, the budget of one `fit`, preprocessing included.
        delta: Float in (0, 1), well below 1 / rows.
        target_lower: Float, the smallest possible target, publicly known; required.
        target_upper: Float, the largest possible target; required.
        lower: This and the following arguments are those of `PrivateClassifier`.
        upper: Like `lower`, the largest possible value.
        model: None, "linear", "network" or a function.
        batch_size: Int, or None.
        steps: Int, or None.
        learning_rate: Float, or None.
        l2_norm_clip: Float, "automatic", or None for "automatic".
        seed: Optional int for repeatable experiments.

    Attributes:
        ledger_: `tfdpx.accounting.Ledger` of the last `fit` and of later training of `model_`.
        model_: `keras.Model` from float32 `[rows, columns]` to targets between -1 and 1, the two
            bounds.
        n_features_in_: Int, columns of X.
    """

    target_lower: float | None = None
    target_upper: float | None = None

    def fit(self, X: ArrayLike, y: ArrayLike) -> PrivateRegressor:
        """Trains on private rows, and records the privacy loss in `ledger_`.

        Args:
            X: Array or data frame of numbers `[rows, columns]`.
            y: Numbers `[rows]`.

        Returns:
            The estimator.

        Raises:
            ValueError: If an argument is invalid, or there are too few rows to find bounds.
        """
        _check_numbers("y", y)
        X, y = self._read(X, y, ensure_min_samples=2, y_numeric=True)
        middle, half = self._target_scale()
        return self._train(X, (y - middle) / half, 0)

    def _target_scale(self):
        """Returns the middle between the bounds of the target, and half of their distance."""
        limits = self.target_lower, self.target_upper
        is_valid = all(is_number(v) and math.isfinite(v) for v in limits) and limits[0] < limits[1]
        must = "be two numbers, publicly known, the first below the second"
        require(is_valid, "target_lower, target_upper", limits, must)
        return (limits[1] + limits[0]) / 2, (limits[1] - limits[0]) / 2

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the predicted number of each row, float64 `[rows]`.

        Args:
            X: As for `fit`.
        """
        outputs = self._predicted(X)[:, 0].astype("float64")
        middle, half = self._target_scale()
        return middle + half * outputs


def _check_numbers(name, values):
    """Raises ValueError for dates and texts, because scikit-learn's errors quote private values."""
    column, kind = (None, None) if sparse.issparse(values) else unfit_column(values)
    if kind in _NO_NUMBERS:
        raise ValueError(
            f"Argument `{name}` must hold numbers. Received: {kind} in column {column!r}. "
            f"{_NO_NUMBERS[kind]}"
        )


def cross_validate(
    estimator: base.BaseEstimator,
    X: Any,
    y: Any,
    *,
    cv: int | float = 5,
    scoring: Any = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Scores a private estimator on folds, or on one held-out part, with one ledger for all fits.

    It first prints the epsilon of all fits together. Their privacy losses compose, because training
    folds share rows. Every row is in all training folds but one, so the ledger counts all of the
    `cv` fits but the cheapest. With a single held-out part there is one fit.

    Guarantee: all fitted estimators together have the epsilon of the ledger. The scores have no
    guarantee, because they are exact functions of private rows. Folds depend on the number of rows
    alone. Stratified folds, the default of scikit-learn for classifiers, would not do, because the
    label of one row can move other rows to another fold.

    Args:
        estimator: `PrivateClassifier` or `PrivateRegressor`, or a `Pipeline` that ends with one.
        X: As for its `fit`.
        y: As for its `fit`. If the estimator has no `classes`, the labels in y count as public.
        cv: Int >= 2, the number of folds; or float in (0, 1), the share of the rows to hold out.
        scoring: As for `sklearn.model_selection.cross_validate`.
        seed: Optional int, which draws the folds.

    Returns:
        Dict of `sklearn.model_selection.cross_validate`, with "test_score", or one entry for each
        score, and "estimator", the list of fitted estimators; and "ledger", the
        `tfdpx.accounting.Ledger`.

    Raises:
        TypeError: If the estimator is not one of these.
        ValueError: If `cv` is invalid.
    """
    estimator = base.clone(estimator)
    private, rows = _private_part(estimator), len(y)
    is_share = is_number(cv) and 0 < cv < 1
    must = f"be an int from 2 to {rows}, or a share between 0 and 1"
    require(is_share or (is_integer(cv, 2) and cv <= rows), "cv", cv, must)
    if isinstance(private, PrivateClassifier) and private.classes is None:
        private.set_params(classes=np.unique(y))  # A fold may lack a label.
    order = np.random.default_rng(seed).permutation(rows)
    parts = [order[: math.ceil(cv * rows)]] if is_share else np.array_split(order, cv)
    splits = [(np.setdiff1d(order, part), np.sort(part)) for part in parts]
    fits = max(1, len(splits) - 1)
    shared_rows.copies_of(private).role = "silent"  # Its ledger has all folds.
    print(
        f"{len(splits)} private fit{'s' * (len(splits) > 1)} at epsilon={private.epsilon:g}; a row "
        f"is in {fits} of them. Together: epsilon={private._epsilon_of(fits):.3g} at "
        f"delta={private.delta:g}."
    )
    report = model_selection.cross_validate(
        estimator, X, y, cv=splits, scoring=scoring, return_estimator=True, error_score="raise"
    )
    ledgers = [_private_part(fitted).ledger_ for fitted in report["estimator"]]
    ledgers.sort(key=lambda ledger: ledger.composed_epsilon(private.delta))
    total = sum(ledgers[-fits:], Ledger())
    report["ledger"] = dataclasses.replace(total, delta=private.delta, num_examples=rows)
    return report


def _private_part(estimator):
    """Returns `estimator` if it is private, or the private last step of a pipeline."""
    last = estimator[-1] if isinstance(estimator, Pipeline) else estimator
    if not isinstance(last, _PrivateEstimator):
        raise TypeError(
            "Argument `estimator` must be a PrivateClassifier or PrivateRegressor, or a Pipeline "
            f"that ends with one. Received: {type(last).__name__}."
        )
    return last


def _outputs(model, x):
    """Returns the outputs of a model, float32 `[rows, outputs]`, on float64 `[rows, columns]`."""
    largest = np.finfo("float32").max
    x = np.clip(x, -largest, largest).astype("float32")
    chunks = [x[i : i + _PREDICT_BATCH] for i in range(0, len(x), _PREDICT_BATCH)]
    return np.concatenate([keras.ops.convert_to_numpy(model(chunk)) for chunk in chunks])


def _to_bytes(model):
    """Returns the bytes of the .keras file of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        model.save(path)
        return path.read_bytes()


def _from_bytes(content):
    """Returns the model in the bytes of a .keras file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        path.write_bytes(content)
        return keras.saving.load_model(path)
