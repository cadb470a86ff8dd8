"""Holds the examples to train on, and draws the random batch of each update."""
