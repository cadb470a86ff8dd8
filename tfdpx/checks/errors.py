"""The error of everything that is unfit for private training."""


class UnfitForPrivacy(ValueError):
    """A model, loss or option with which the privacy guarantee would not hold."""
