"""Presets: one short module each, with the flag values of an experiment.

A module of a table defines `COMMON`, the flag values that all of its columns share, and `COLUMNS`,
from the name of a column to the flag values of its own: `--preset=table12/eps8`. Those named
`table` are the tables of De et al. 2022, "Unlocking High-Accuracy Differentially Private Image
Classification through Scale" (arXiv:2204.13650), whose appendix C they follow; others name the
paper that they follow, and say which values are its authors' and which are ours.

Any other module defines `EPSILON`, the budget when the user names none, and `settings(epsilon)`,
which returns the flag values to use for a budget: `--preset=digits`. Such functions may stand in
`COLUMNS` too.

Flags on the command line win over both. The first lines of each module say how to run it and what
to expect: of a paper's runs what the paper reports, not what this library was seen to reach. Of
runs whose hours are not measured `--dry_run --seconds_per_update=S` estimates them.
"""
