"""Examples to train on, and the random draws of each update."""
