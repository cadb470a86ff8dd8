"""Private heads on features: comparisons, searches, and free features of small images."""
