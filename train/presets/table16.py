"""Table 16: CIFAR-10, fine-tuning the last layer of a WRN-28-10 from ImageNet-32.

The column of epsilon 4 spends 4.020 at these values.
"""

COMMON = dict(
    dataset="cifar10",
    model="wrn_28_10",
    pretrained_on="imagenet32",
    trainable="last",
    delta=1e-5,
    batch_size=16384,
    learning_rate=4.0,
    l2_norm_clip=1.0,
    augmult=16,
    augment_padding=4,
    augment_flip=True,
    ema_momentum=0.9999,
    microbatch_size=16,
    report_every=50,
)

COLUMNS = {
    "eps1": dict(noise_multiplier=21.1, steps=250),
    "eps2": dict(noise_multiplier=15.8, steps=500),
    "eps4": dict(noise_multiplier=12.0, steps=1000),
    "eps8": dict(noise_multiplier=9.4, steps=2000),
}
