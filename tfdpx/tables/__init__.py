"""Private models of tables: statistics of columns, rules of a training, and estimators."""
