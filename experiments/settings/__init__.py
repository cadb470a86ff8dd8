"""Studies of the best learning rate for networks with 1,000 to 10 million trained weights."""
