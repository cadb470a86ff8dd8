"""Table 2 in small, on the digits: five additions in the paper's order, each on top of the last.

    python -m tfdpx.train.classify --preset=digits_table2/large_batch --workdir=/runs/large_batch

Test accuracy, row by row, median of five seeds: 92.8, 95.8, 96.7, 96.7, 93.3, 92.8%, in 62, 27, 26,
34, 54, 55 seconds on two cores (docs/ablation.md).

As in the paper, learning rate and number of updates were tuned for every row, here on a quarter of
the training images (one seed; updates among 300, 1000 and 2000, or 60 and 100 in large batches).
"""

from tfdpx.train.presets.table2 import NOTHING, additions

COMMON = dict(
    dataset="digits",
    model="small_cnn",
    epsilon=8.0,
    delta=1e-5,
    l2_norm_clip=0.1,
    report_every=20,
)

COLUMNS = additions(
    baseline=dict(NOTHING, batch_size=64, steps=1000, learning_rate=0.25),
    group_norm=dict(group_norm=True, steps=300, learning_rate=0.5),
    large_batch=dict(batch_size=1024, steps=100, learning_rate=4.0),
    weight_standardization=dict(weight_standardization=True, learning_rate=2.0),
    augmult=dict(augmult=4, augment_padding=1, learning_rate=1.0),
    ema=dict(ema_momentum=0.9999),
)
