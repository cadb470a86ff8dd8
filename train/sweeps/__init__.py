"""A sweep: its grid, its runs and the table of their results."""
