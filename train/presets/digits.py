"""Digits of scikit-learn (1,437 training images of 8x8): a minute on one CPU."""

EPSILON = 8.0


def settings(epsilon):
    """Returns the flag values for a budget."""
    del epsilon
    return dict(
        dataset="digits",
        model="small_cnn",
        delta=1e-5,
        batch_size=512,
        steps=100,
        optimizer="dpsgd",
        learning_rate=2.0,
        l2_norm_clip=1.0,
        augmult=4,
        augment_padding=1,
        ema_momentum=0.99,
        report_every=10,
    )
