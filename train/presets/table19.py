"""Table 19: CIFAR-10, fine-tuning all layers of a WRN-40-4 from CIFAR-100.

The paper does not say so, but only with 45,000 training images are these the epsilons it gives.
"""

COMMON = dict(
    dataset="cifar10",
    validation=0.1,
    eval_split="test",
    model="wrn_40_4",
    pretrained_on="cifar100",
    trainable="all",
    delta=1e-5,
    batch_size=4096,
    l2_norm_clip=1.0,
    augmult=16,
    augment_padding=4,
    augment_flip=True,
    ema_momentum=0.9999,
    microbatch_size=32,
    report_every=50,
)

COLUMNS = {
    "eps0.5": dict(batch_size=1024, learning_rate=0.125, noise_multiplier=5.0, steps=781),
    "eps1": dict(learning_rate=1.0, noise_multiplier=5.0, steps=164),
    "eps1.5": dict(learning_rate=0.3, noise_multiplier=6.0, steps=531),
    "eps2": dict(learning_rate=0.3, noise_multiplier=6.0, steps=906),
    "eps4": dict(learning_rate=0.3, noise_multiplier=5.0, steps=2171),
    "eps6": dict(learning_rate=0.1, noise_multiplier=6.0, steps=6421),
    "eps8": dict(learning_rate=0.1, noise_multiplier=5.0, steps=7226),
}
