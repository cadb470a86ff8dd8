"""Presets: one short module each, with the flag values of an experiment.

A preset defines `EPSILON`, the budget when the user names none, and `settings(epsilon)`, which
returns the flag values to use for a budget as a dict. Flags on the command line win over it.
"""
