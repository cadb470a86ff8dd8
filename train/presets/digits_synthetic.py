r"""Digits after pre-training on synthetic strokes, which costs no privacy (Tang et al. 2023).

    python -m experiments.free_features.pretrain --workdir=/runs/pretrained
    python -m tfdpx.train.classify --preset=digits_synthetic --epsilon=3 --workdir=/runs/digits \
        --init_from=/runs/pretrained/model.keras

Test accuracy at epsilon 1, 3, 8, median of three seeds: 93.9, 96.9, 98.3% (docs/fine_tuning.md).

Settings were chosen on a quarter of the training images held out, one seed.
"""

EPSILON = 8.0

# From epsilon, up to the next: layers to train, updates, learning rate.
BUDGETS = {
    5.0: ("all", 60, 2.0),
    1.5: ("all", 30, 4.0),
    0.0: ("last", 15, 4.0),
}


def settings(epsilon):
    """Returns the flag values for a budget."""
    trainable, steps, learning_rate = BUDGETS[max(low for low in BUDGETS if low < epsilon)]
    return dict(
        dataset="digits",
        model="small_cnn",
        pretrained_on="synthetic",
        trainable=trainable,
        delta=1e-5,
        batch_size=1024,
        steps=steps,
        learning_rate=learning_rate,
        l2_norm_clip=0.1,
        ema_momentum=0.9999,
        report_every=10,
    )
