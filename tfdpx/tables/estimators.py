"""Private estimators with the interface of scikit-learn. Users import them from `tfdpx.sklearn`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops
from numpy.typing import ArrayLike
from scipy import sparse
from scipy.special import softmax
from sklearn import base, model_selection
from sklearn.pipeline import Pipeline
from sklearn.utils import multiclass, validation

from tfdpx import account
from tfdpx._arguments import (
    check_choice,
    check_positive_integer,
    is_integer,
    is_number,
    refuse_elsewhere,
    require,
)
from tfdpx.accounting import accountants
from tfdpx.accounting.ledger import EXAMPLE, USER, Ledger
from tfdpx.accounting.plan import PrivacyPlan, largest_epsilon
from tfdpx.heads.gradients import FirstOrder
from tfdpx.heads.head import norm_bound, optional, positive
from tfdpx.sampling import shared_rows
from tfdpx.sampling.inputs import unfit_column
from tfdpx.sampling.users import DEFAULT_PER_USER, numbered
from tfdpx.tables import rules
from tfdpx.tables.private_adapt import limits, text_of
from tfdpx.training.optimizers import DPSGD

_AUTOMATIC = "automatic"
_EPSILON = 3.0  # The default, if the user sets neither epsilon nor right guesses.
_MATRIX = ""  # The name of X in `rules.Columns` if X is one array of all columns.
_LEDGER = "_ledger"  # The name of the ledger in a pickle.
_BATCH = 8192  # The number of rows in a batch of a prediction.
# From a kind of column that is an error to the remedy in the error.
_NO_NUMBERS = {
    "dates": "Replace them by numbers, such as days since a public date, or leave the column out.",
    "texts": "Encode them before, for example by OneHotEncoder(categories=[...], "
    "handle_unknown='ignore') in a ColumnTransformer, with categories that are publicly known. Or "
    "pass a data frame, or a dict from the names of columns to arrays, with texts as they are.",
}


@dataclasses.dataclass(eq=False, repr=False)
class _PrivateEstimator(base.BaseEstimator):
    """The base class of both estimators, with their arguments, training, copying and pickling."""

    epsilon: float | None = None
    delta: float = 1e-5
    _: dataclasses.KW_ONLY
    lower: ArrayLike | None = None
    upper: ArrayLike | None = None
    model: str | Callable[[Any], Any] | None = None
    batch_size: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    l2_norm_clip: float | str | None = None
    accountant: str = "pld"
    right_guesses: float | None = None
    seed: int | None = None

    def __new__(cls, *arguments, **named):
        refuse_elsewhere(cls.__name__, named)
        return super().__new__(cls)

    def __sklearn_clone__(self):
        copy = super().__sklearn_clone__()
        shared_rows.on_clone(self, copy)
        return copy

    def __sklearn_tags__(self):
        shared_rows.on_use(self)
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True  # NaN, a missing number, is replaced by the mean.
        tags.non_deterministic = self.seed is None
        return tags

    def fit(
        self,
        X: ArrayLike | dict[str, ArrayLike],
        y: ArrayLike,
        *,
        user_ids: Any = None,
        examples_per_user: int = DEFAULT_PER_USER,
        **others: Any,
    ) -> _PrivateEstimator:
        """Trains on private rows, and records the privacy loss in `ledger_`.

        Args:
            X: Array of numbers `[rows, columns]`, or a data frame, or a dict from the names of
                columns to arrays `[rows]`, of numbers, booleans or texts. Frequent texts are
                one-hot encoded. A text that only one row has is published with a probability below
                1e-15.
            y: Labels `[rows]`, or numbers for a regressor.
            user_ids: Optional array `[rows]` of ints or strings, the person of each row. The ledger
                then protects all rows of a person together, and the number of people is public.
            examples_per_user: Int, only with `user_ids`: the largest number of rows of a person in
                an update. The statistics of columns use one row of each person.
            **others: Other arguments of scikit-learn, such as `sample_weight`. They are an error.

        Returns:
            The estimator.

        Raises:
            TypeError: If there are other arguments, such as `sample_weight`.
            ValueError: If an argument is invalid, or there are too few rows to find bounds.
        """
        refuse_elsewhere("fit", others)
        if others:
            raise TypeError(f"fit takes no argument `{min(others)}`. Leave it out.")
        is_regression = isinstance(self, base.RegressorMixin)
        if is_regression:
            _check_numbers("y", y)
        arrays, y = self._read(X, y, ensure_min_samples=2, y_numeric=is_regression)
        y, num_classes, rescaling = self._targets(y)
        if not callable(self.model):
            check_choice("model", self.model, (None, rules.LINEAR, rules.NETWORK))
        optional(positive)("learning_rate", self.learning_rate)
        optional(check_positive_integer)("batch_size", self.batch_size)
        optional(check_positive_integer)("steps", self.steps)
        if self.l2_norm_clip != _AUTOMATIC:
            for check in (positive, norm_bound):
                optional(check)("l2_norm_clip", self.l2_norm_clip)
        columns, unit, people = rules.Columns(arrays, *self._limits(arrays)), EXAMPLE, {}
        sample, target = columns, y
        if user_ids is not None:
            # The statistics take a random row of each person. The choice does not depend on other
            # people.
            owners, _ = numbered(user_ids, len(y))
            order = np.random.default_rng(self.seed).permutation(len(y))
            places = order[np.unique(owners[order], return_index=True)[1]]
            sample, target, unit = columns.rows(places), y[places], USER
            people = {"user_ids": owners, "examples_per_user": examples_per_user}
        budget = self._budget, self.delta, self.seed
        statistics = rules.Preprocessing(sample, num_classes, *budget, unit)
        shares = statistics.rare_shares(target)
        preprocessing, spent = statistics.model()
        rare_columns = 0 if shares is None else columns.lower.size + len(columns.texts)
        task = is_regression, rare_columns, unit
        training = self.training_ = rules.choose(self, budget[0], len(sample), spent, *task)
        inputs = {}
        for name, tensor in zip(map(input_name, arrays), preprocessing.inputs, strict=True):
            inputs[name] = keras.Input(tensor.shape[1:], dtype=tensor.dtype, name=name or None)
        features = preprocessing(list(inputs.values()))
        inputs = inputs.get(_MATRIX, inputs)
        x = predict(keras.Model(inputs, features), arrays)
        data = x, y, training, num_classes, shares, self.seed
        if training.name == rules.LINEAR and training.plan.batch_size == len(y) and not people:
            head, ledger = _fit_linear(*data)
        else:
            head, ledger = _fit_layers(*data, self.model, **people)
        outputs = rescaling(head(features)) if rescaling else head(features)
        self.model_ = keras.Model(inputs, outputs, name=f"{training.name}_on_table")
        ledger = dataclasses.replace(ledger, delta=self.delta, num_examples=len(sample))
        account.attach(ledger, self.model_.variables)
        shared_rows.on_fit(self, list(arrays.values()), ledger)
        return self

    @property
    def _budget(self):
        """Float, the epsilon of one fit, or the largest epsilon that `right_guesses` allows."""
        if self.right_guesses is None:
            return _EPSILON if self.epsilon is None else self.epsilon
        return largest_epsilon(self.right_guesses, self.epsilon, self.delta)

    @property
    def ledger_(self) -> Ledger:
        """The ledger of the weights of `model_`."""
        return account.ledger_of(self.model_.weights)

    def _limits(self, arrays):
        """Returns `lower` and `upper` as float64 arrays; NaN marks a limit that must be found."""
        pair = self.lower, self.upper
        names = [name for name, values in arrays.items() if values.dtype.kind != "U"]
        if names == [_MATRIX]:
            names = list(getattr(self, "feature_names_in_", range(arrays[_MATRIX].shape[1])))
        if all(isinstance(limit, dict) and limit.keys() <= set(names) for limit in pair):
            pair = tuple([limit.get(name, math.nan) for name in names] for limit in pair)
        columns = f"{len(names)} columns of numbers in X ({', '.join(map(str, names))})"
        hint = ""
        if 0 in names:  # Numbers in place of names: X often comes from other steps of a pipeline.
            hint = " Their names in a pipeline: `pipeline[:-1].get_feature_names_out()`."
        return limits(*pair, len(names), f"be two numbers, or one for each of the {columns}", hint)

    def _read(self, X, y=None, reset=True, **checks):
        """Checks X and y. Returns X as a dict of arrays, as in `rules.Columns`, and y."""
        if hasattr(X, "columns") and (
            unfit_column(X)[1] == "texts" if reset else isinstance(self.model_.input, dict)
        ):
            X = {name: X[name] for name in X.columns}
        _check_rows(X, y)
        if _is_dict(X):
            names = list(X) if reset else self.feature_names_in_
            self.n_features_in_, self.feature_names_in_ = len(names), np.array(names)
            arrays = {name: _column(name, X[name]) for name in names}
            validation.assert_all_finite(y)
            return arrays if y is None else (arrays, validation.column_or_1d(y))
        checks |= {"dtype": "float64", "ensure_all_finite": "allow-nan", "accept_sparse": "csr"}
        _check_numbers("X", X)
        y = "no_validation" if y is None and not reset else y
        data = validation.validate_data(self, X, y, reset=reset, **checks)
        x, *rest = data if isinstance(data, tuple) else (data,)
        arrays = {_MATRIX: x.toarray() if sparse.issparse(x) else x}
        return (arrays, *rest) if rest else arrays

    def _predicted(self, X):
        """Returns the outputs of the model, float32 `[rows, outputs]`."""
        validation.check_is_fitted(self)
        return predict(self.model_, self._read(X, reset=False))

    def _epsilon_of(self, fits):
        """Returns the epsilon of several fits on the same rows, as if all batches were full."""
        steps = self.steps or rules.FEW_STEPS
        plan = PrivacyPlan(1, 1, steps, epsilon=self._budget, delta=self.delta, accountant="gdp")
        run = plan.noise_multiplier, 1.0, fits * steps
        return accountants.composed_epsilon((run,), self.delta)

    def __getstate__(self):
        state = super().__getstate__()
        if "model_" in state:
            return {**state, _LEDGER: self.ledger_}
        shared_rows.on_pickle(self)
        return state

    def __setstate__(self, state):
        ledger = state.get(_LEDGER)
        super().__setstate__({name: value for name, value in state.items() if name != _LEDGER})
        if ledger is not None:
            variables = self.model_.variables
            account.mark_known(variables)  # The ledger belongs to exactly these weights.
            account.attach(ledger, variables)  # Unknown again if the ledger is incomplete.


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class PrivateClassifier(base.ClassifierMixin, _PrivateEstimator):
    """A private scikit-learn classifier for tables.

    A tenth of the budget is spent on scaling the columns (and on counting the labels, if there are
    enough rows). The rest is spent on training a Keras model by DP-SGD. For columns of texts, pass
    a dict of columns, or encode them first, by a public list of categories. A missing number (NaN)
    is replaced by the mean of its column.

    Guarantee: `model_`, and all predictions on rows outside the training data, are (epsilon,
    delta)-differentially private under adding or removing one row of X and y. The numbers of rows
    and columns, `classes_` and all arguments count as public, so do not compute them from the data.
    Each fit on the same rows spends its epsilon again, for example in a search over settings. A
    warning then tells the epsilon of all fits in this process together. Scores on private rows have
    no guarantee, because they are computed without noise. The same applies to a calibrator that is
    fitted to private rows (`CalibratedClassifierCV`). If you need better probabilities, pass a
    float as `l2_norm_clip` instead.

    Args:
        epsilon: Float > 0, the budget of one `fit`, preprocessing included. Defaults to 3.
        delta: Float in (0, 1), well below 1 / rows.
        classes: Optional list of all labels, which are public. With None, the labels are read from
            y; then a label that only one row has reveals that row.
        lower: The smallest possible value: a float, or a list with one for each column of X. It
            must be publicly known, but may be rough. With None, a bound for each column is found
            privately, a power of two; this needs more rows. With a dict from names of columns to
            values, bounds are found only for the other columns. Bounds of [0, 1] count as exact;
            others may be narrowed privately.
        upper: Like `lower`, the largest possible value.
        model: "linear", or "network" for one hidden layer of 64 units. None chooses the network if
            epsilon times the number of rows is at least 3,500. You can also pass a function from a
            symbolic Keras tensor of scaled columns `[rows, columns]` to the last hidden tensor; the
            estimator adds the dense layer for the outputs.
        batch_size: Int, the expected number of rows in an update. None takes all rows, up to
            65,536.
        steps: Int, the number of updates. None means 180, or 60 if epsilon times the number of rows
            is below 300.
        learning_rate: Float. None follows the rule in docs/tables.md.
        l2_norm_clip: Float, the bound on the norm of a row's gradient, or "automatic". None chooses
            "automatic", or a float if a noisy count finds a rare label.
        accountant: "pld" or "rdp", see `tfdpx.PrivacyPlan`.
        right_guesses: Float in (0.5, 1), instead of epsilon, see `tfdpx.PrivacyPlan`.
        seed: Optional int for repeatable experiments, also passed to Keras. There is no privacy if
            the seed is known, because the noise can then be repeated.

    Attributes:
        classes_: Array of the labels, sorted; public.
        ledger_: `tfdpx.accounting.Ledger` of the last `fit` and of later training of `model_`.
        model_: `keras.Model` that maps X to logits. Its input is float32 `[rows, columns]`, or a
            dict of arrays `[rows, 1]`. It includes the scaling.
        n_features_in_: Int, the number of columns of X.
        training_: Named tuple of the last `fit`: name of the model, `plan`, `learning_rate` and
            `l2_norm_clip`.

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

    def _targets(self, y):
        """Sets `classes_`. Returns class indices `[rows]`, the number of classes, and None.

        The third value is None because only a regressor has a layer that rescales its outputs.
        """
        multiclass.check_classification_targets(y)
        self.classes_ = np.unique(y if self.classes is None else self.classes)
        if len(self.classes_) < 2 or not np.all(np.isin(y, self.classes_)):
            raise ValueError(
                "Argument `classes` must hold two or more labels, with all of `y`; None takes the "
                f"classes of `y`, of which there must be two. Received: classes={self.classes}."
            )
        return np.searchsorted(self.classes_, y), len(self.classes_), None

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
        epsilon: Float > 0, the budget of one `fit`, preprocessing included. Defaults to 3.
        delta: Float in (0, 1), well below 1 / rows.
        target_lower: Float, the smallest possible target, publicly known; required.
        target_upper: Float, the largest possible target; required.
        lower: As in `PrivateClassifier`; the same applies to all arguments below.
        upper: Like `lower`, the largest possible value.
        model: None, "linear", "network" or a function.
        batch_size: Int, or None.
        steps: Int, or None.
        learning_rate: Float, or None.
        l2_norm_clip: Float, "automatic", or None for "automatic".
        accountant: "pld" or "rdp".
        right_guesses: Float in (0.5, 1), instead of epsilon.
        seed: Optional int for repeatable experiments.

    Attributes:
        ledger_: `tfdpx.accounting.Ledger` of the last `fit` and of later training of `model_`.
        model_: `keras.Model` with the same inputs as the classifier's, and the predicted numbers as
            outputs.
        n_features_in_: Int, the number of columns of X.
        training_: As for `PrivateClassifier`.
    """

    target_lower: float | None = None
    target_upper: float | None = None

    def _targets(self, y):
        limits = self.target_lower, self.target_upper
        is_valid = all(is_number(v) and math.isfinite(v) for v in limits) and limits[0] < limits[1]
        must = "be two numbers, publicly known, the first below the second"
        require(is_valid, "target_lower, target_upper", limits, must)
        middle, half = (limits[1] + limits[0]) / 2, (limits[1] - limits[0]) / 2
        rescaling = keras.layers.Rescaling(half, middle, name="tfdpx.rescaling")
        return (y - middle) / half, 0, rescaling

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the predicted number of each row, float64 `[rows]`.

        Args:
            X: As for `fit`.
        """
        return self._predicted(X)[:, 0].astype("float64")


def _check_numbers(name, values, names=None):
    """Raises ValueError for dates and texts. Errors of scikit-learn would show private values."""
    column, kind = (None, None) if sparse.issparse(values) else unfit_column(values, names)
    if kind in _NO_NUMBERS:
        raise ValueError(
            f"Argument `{name}` must hold numbers. Received: {kind} in column {column!r}. "
            f"{_NO_NUMBERS[kind]}"
        )


def _is_dict(X):
    return isinstance(X, dict) and not sparse.issparse(X)


def _check_rows(X, y=None):
    """Raises ValueError unless X, or every column of a dict, and y have the same number of rows."""
    parts = {f"X[{name!r}]": X[name] for name in X} if _is_dict(X) else {"X": X}
    parts |= {} if y is None else {"y": y}
    try:
        validation.check_consistent_length(*parts.values())
    except ValueError as error:
        counts = {name: np.shape(part)[0] for name, part in parts.items()}
        first = next(iter(counts))
        odd = next(name for name, count in counts.items() if count != counts[first])
        raise ValueError(
            f"Arguments `X` and `y` must have the same number of rows. Received: {counts[first]} "
            f"in {first}, {counts[odd]} in {odd}. Take the same rows of both: `X[:n], y[:n]`."
        ) from error


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

    The function first prints the epsilon of all fits together. Their privacy losses compose,
    because each row is used by several fits. Every row is held out from one of the `cv` fits and
    used by all others, so the ledger counts all fits except the cheapest one. With a single
    held-out part there is only one fit.

    Guarantee: all fitted estimators together have the epsilon of the ledger. The scores have no
    guarantee, because they are computed from private rows without noise. Folds depend only on the
    number of rows, and are not stratified by label. (In the stratified folds of scikit-learn, the
    label of one row can move other rows to another fold.)

    Args:
        estimator: `PrivateClassifier` or `PrivateRegressor`, or a `Pipeline` that ends with one.
        X: As for the estimator's `fit`, but not a dict.
        y: As for the estimator's `fit`. If the estimator has no `classes`, the labels in y count as
            public.
        cv: Int >= 2, the number of folds; or float in (0, 1), the share of the rows to hold out.
        scoring: As for `sklearn.model_selection.cross_validate`.
        seed: Optional int, the seed of the folds.

    Returns:
        Dict as from `sklearn.model_selection.cross_validate`, with "test_score" (or an entry for
        each score) and "estimator", the list of fitted estimators. In addition, "ledger" is the
        `tfdpx.accounting.Ledger` of all fits.

    Raises:
        TypeError: If `estimator` is not a private estimator or such a `Pipeline`, or `X` is a dict.
        ValueError: If `cv` is invalid, or `X` and `y` have different numbers of rows.
    """
    estimator, rows = base.clone(estimator), len(y)
    private = _last(estimator)
    if not isinstance(private, _PrivateEstimator):
        raise TypeError(
            "Argument `estimator` must be a PrivateClassifier or PrivateRegressor, or a Pipeline "
            f"that ends with one. Received: {type(private).__name__}. Write "
            "`cross_validate(make_pipeline(..., PrivateClassifier(...)), X, y)`."
        )
    if _is_dict(X):
        raise TypeError("Argument `X` must not be a dict here. Write `pandas.DataFrame(X)`.")
    _check_rows(X, y)
    is_share = is_number(cv) and 0 < cv < 1
    must = f"be an int from 2 to {rows}, or a share between 0 and 1"
    require(is_share or (is_integer(cv, 2) and cv <= rows), "cv", cv, must)
    if isinstance(private, PrivateClassifier) and private.classes is None:
        private.set_params(classes=np.unique(y))  # A label may be missing from a fold.
    if is_share:
        folds = model_selection.ShuffleSplit(1, test_size=cv, random_state=seed)
    else:
        folds = model_selection.KFold(cv, shuffle=True, random_state=seed)
    splits = list(folds.split(range(rows)))
    fits = max(1, len(splits) - 1)
    copies = shared_rows.copies_of(private)
    copies.role = "silent"  # No warnings, because the ledger here has all fits.
    print(
        f"{len(splits)} private fit{'s' * (len(splits) > 1)} at epsilon={private._budget:.3g}; a "
        f"row is in {fits} of them. Together: epsilon={private._epsilon_of(fits):.3g} at "
        f"delta={private.delta:g}."
    )
    if isinstance(estimator, Pipeline) and len(estimator) > 1:
        print(
            f"If the steps before it ({', '.join(list(estimator.named_steps)[:-1])}) learn from "
            "rows, no epsilon covers this: leave scaling and missing numbers to the estimator, and "
            "write `OneHotEncoder(categories=[...])`."
        )
    report = model_selection.cross_validate(
        estimator, X, y, cv=splits, scoring=scoring, return_estimator=True, error_score="raise"
    )
    if text := copies.with_others():
        print(f"With the other fits on these rows in this process: {text}.")
    ledgers = [_last(fitted).ledger_ for fitted in report["estimator"]]
    ledgers.sort(key=lambda ledger: ledger.composed_epsilon(private.delta))
    total = sum(ledgers[-fits:], Ledger())
    report["ledger"] = dataclasses.replace(total, delta=private.delta, num_examples=rows)
    return report


def _last(estimator):
    return estimator[-1] if isinstance(estimator, Pipeline) else estimator


def predict(model: keras.Model, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the outputs of an estimator's `model_` for some rows, float32 `[rows, outputs]`.

    Args:
        model: `keras.Model`, the `model_` of an estimator.
        arrays: Dict from the name of a column to an array `[rows]` of float64 or of texts.
    """
    largest, parts = np.finfo("float32").max, {}
    for name, values in arrays.items():
        if values.dtype.kind != "U":  # The model can clip any finite number, but not infinity.
            values = np.clip(values, -largest, largest).astype("float32")
        parts[input_name(name)] = values.reshape(len(values), -1)
    outputs = []
    for start in range(0, max(len(values), 1), _BATCH):
        chunk = slice(start, start + _BATCH)
        batch = {name: ops.convert_to_tensor(part[chunk]) for name, part in parts.items()}
        outputs.append(ops.convert_to_numpy(model(batch.get(_MATRIX, batch))))
    return np.concatenate(outputs)


def input_name(column: str) -> str:
    """Returns the name of the Keras input for a column, with underscores in place of slashes."""
    return column.replace("/", "_")


def _column(name, values):
    """Converts a column to an array `[rows]` of float64 or of texts."""
    values = validation.column_or_1d(values)
    if values.dtype.kind == "U":
        return values
    if unfit_column(values)[1] == "texts":
        return np.array([text_of(value) for value in values.tolist()])
    _check_numbers("X", values, [name])
    return values.astype("float64")


@dataclasses.dataclass(eq=False)
class _Linear(FirstOrder):
    """The head `FirstOrder` with the softmax cross-entropy, or with the squared error.

    This class does not check its arguments, because the estimator has checked them.
    """

    _checks = {}

    def _link(self, logits):
        return softmax(logits, axis=1) if self.num_classes > 1 else (logits + 1) / 2


def _fit_linear(x, y, training, num_classes, shares, seed):
    """Trains the same linear model as `_fit_layers`, but a hundred times faster.

    Returns the model and its ledger. Every update must use all rows.

    Args:
        x: float32 `[rows, features]`.
        y: Int labels `[rows]`, or numbers `[rows]`, which are clipped to [-1, 1].
        training: `rules.Training`.
        num_classes: Int.
        shares: Noisy shares of the labels, as for `_fit_layers`.
        seed: Optional int.
    """
    plan, clip = training.plan, training.l2_norm_clip
    head = _Linear(
        num_classes or 1,
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        steps=plan.steps,
        optimizer="sgd",
        learning_rate=training.learning_rate / (1.0 if clip == _AUTOMATIC else clip),
        initial_bias=0.0 if shares is None else np.log(shares),
        l2_norm_clip=clip,
        seed=seed,
    )
    # The targets of a head must be in [0, 1].
    head.fit(x, y if num_classes else (np.clip(y, -1, 1)[:, np.newaxis] + 1) / 2)
    layers = [keras.Input(x.shape[1:]), head.to_layer()]
    return keras.Sequential(layers, name="tfdpx.head"), plan.spent + head.ledger


def _fit_layers(x, y, training, num_classes, shares, seed, hidden=None, **people):
    """Trains a model on scaled columns by DP-SGD. Returns the model and its ledger.

    Args:
        x: float32 `[rows, features]`.
        y: Int labels `[rows]`, or numbers in about [-1, 1] for a regression.
        training: `rules.Training`.
        num_classes: Int; 0 for a regression.
        shares: Noisy shares of the labels `[classes]` if one is rare, or None.
        seed: Optional int for repeatable experiments.
        hidden: Function from the symbolic `x` to the input of the last dense layer. With any other
            value, `training.name` decides which model is built.
        **people: `user_ids` and `examples_per_user`, see `PrivacyPlan.batches`.
    """
    if seed is not None:
        keras.utils.set_random_seed(seed % 2**32)
    inputs = values = keras.Input(x.shape[1:])
    if callable(hidden):
        values = hidden(inputs)
    elif training.name == rules.NETWORK:
        values = keras.layers.Dense(rules.HIDDEN_UNITS, "tanh")(inputs)
    last = keras.layers.Dense(num_classes or 1, kernel_initializer="zeros")
    head = keras.Model(inputs, last(values), name="tfdpx.head")
    loss = "mean_squared_error"
    if num_classes:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    else:
        y = y[:, np.newaxis]
    if shares is not None:
        last.bias.assign(np.log(shares))
    plan, clip = training.plan, training.l2_norm_clip
    optimizer = DPSGD(training.learning_rate, plan=plan, l2_norm_clip=clip, seed=seed)
    # A new model with the same layers. If the compiled model were saved, its file would contain the
    # optimizer.
    private = keras.Model(head.input, head.output)
    private.compile(optimizer, loss)
    batches = plan.batches(x, y, optimizer=optimizer, **people)
    private.fit(batches, shuffle=False, verbose=0)
    return head, optimizer.ledger
