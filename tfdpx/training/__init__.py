"""One training: the optimizer, the private step, the session, and what `fit` needs."""
