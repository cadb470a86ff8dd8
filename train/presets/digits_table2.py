"""Table 2 in small, on the digits: five additions in the paper's order, each on top of the last.

As in the paper, learning rate and number of updates were tuned for every row, here on a quarter of
the training images (one seed; updates among 300, 1000 and 2000, or 60 and 100 in large batches).
"""

COMMON = dict(
    dataset="digits",
    model="small_cnn",
    epsilon=8.0,
    delta=1e-5,
    l2_norm_clip=0.1,
    report_every=20,
)

BASELINE = dict(
    batch_size=64,
    steps=1000,
    learning_rate=0.25,
    group_norm=False,
    weight_standardization=False,
    ema_momentum=0.0,
)
GROUP_NORM = dict(BASELINE, group_norm=True, steps=300, learning_rate=0.5)
LARGE_BATCH = dict(GROUP_NORM, batch_size=1024, steps=100, learning_rate=4.0)
WEIGHT_STANDARDIZATION = dict(LARGE_BATCH, weight_standardization=True, learning_rate=2.0)
AUGMULT = dict(WEIGHT_STANDARDIZATION, augmult=4, augment_padding=1, learning_rate=1.0)
EMA = dict(AUGMULT, ema_momentum=0.9999)

COLUMNS = {
    "baseline": BASELINE,
    "group_norm": GROUP_NORM,
    "large_batch": LARGE_BATCH,
    "weight_standardization": WEIGHT_STANDARDIZATION,
    "augmult": AUGMULT,
    "ema": EMA,
}
