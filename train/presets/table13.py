"""Table 13: CIFAR-10 from random weights, WRN-40-4."""

COMMON = dict(
    dataset="cifar10",
    model="wrn_40_4",
    delta=1e-5,
    batch_size=16384,
    l2_norm_clip=1.0,
    augmult=32,
    augment_padding=4,
    augment_flip=True,
    ema_momentum=0.9999,
    microbatch_size=16,
    report_every=50,
)

COLUMNS = {
    "eps1": dict(learning_rate=2.0, noise_multiplier=40.0, steps=906),
    "eps2": dict(learning_rate=2.0, noise_multiplier=24.0, steps=1156),
    "eps3": dict(learning_rate=2.0, noise_multiplier=20.0, steps=1656),
    "eps4": dict(learning_rate=2.0, noise_multiplier=16.0, steps=1765),
    "eps6": dict(learning_rate=4.0, noise_multiplier=12.0, steps=2007),
    "eps8": dict(learning_rate=4.0, noise_multiplier=9.4, steps=2000),
}
