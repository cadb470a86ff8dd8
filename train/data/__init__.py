"""Loads data sets by name, folders of images, and tables."""
