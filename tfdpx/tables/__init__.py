"""Private models of tables: noisy statistics of columns, rules for the training, and estimators."""
