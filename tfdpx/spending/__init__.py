"""What was spent on which weights, and what is left of a plan."""
