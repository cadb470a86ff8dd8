"""What a training draws from, and the draws of each update."""
