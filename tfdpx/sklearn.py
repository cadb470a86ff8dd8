"""Private estimators with the interface of scikit-learn, each with a privacy ledger after `fit`.

    from tfdpx.sklearn import PrivateClassifier, cross_validate

    classifier = PrivateClassifier(epsilon=3.0, lower=0.0, upper=100.0)
    classifier.fit(X, y)
    print(classifier.ledger_.statement())

Only these estimators are private. Other steps of a pipeline may learn from private rows as well,
for example a `StandardScaler` or a `OneHotEncoder` without `categories`. These steps add no noise,
and no ledger counts them. See docs/data_scientists.md.
"""

from tfdpx.tables.estimators import PrivateClassifier, PrivateRegressor, cross_validate

__all__ = ["PrivateClassifier", "PrivateRegressor", "cross_validate"]
