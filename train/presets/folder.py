"""A folder of your own images, PATH/CLASS/NAME.jpg; taken unasked for --dataset=folder:PATH.

    python -m tfdpx.train.classify --dataset=folder:PATH --epsilon=8

What to expect of 200 to 5,000 images: docs/own_images.md.

The size to read images at comes from the files, and model, batch size, steps, learning rate and
clip from the number of training images (`tfdpx.train.run.auto_settings`); all is printed. Up to
20,000 images it is a linear classifier on fixed features, which cost no privacy (docs/features.md).
"""

EPSILON = 8.0


def settings(epsilon):
    """Returns the flag values for a budget; None is left to the choice."""
    del epsilon
    return dict(
        dataset="folder:PATH",
        model="auto",
        delta=1e-5,
        learning_rate=None,
        l2_norm_clip=None,
        ema_momentum=None,
        report_every=10,
    )
