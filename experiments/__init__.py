"""The papers' studies, comparisons and benchmarks; not installed, run from the repository's root."""
