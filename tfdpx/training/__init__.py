"""A private training: the optimizers, the private step, the session, and the stages of `fit`."""
