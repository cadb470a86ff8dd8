"""What public examples may decide of a private training, and what a run did to each example.

Everything here but `gradients` and `instances` reads public examples and released weights alone.
"""
