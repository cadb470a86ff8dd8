"""Private models of tables: statistics of columns, rules for the training, and estimators."""
