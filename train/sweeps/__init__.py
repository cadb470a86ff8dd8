"""A sweep: its grid, its runs, the table of their results and the figures."""
