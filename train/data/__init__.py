"""Data sets by name, their images on disk, and what a run loads of them."""
