"""The parts of private training: optimizers, the private step, sessions, and stages of `fit`."""
