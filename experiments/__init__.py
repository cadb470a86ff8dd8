"""The papers' studies, comparisons and benchmarks. Not installed: run them from the root."""
