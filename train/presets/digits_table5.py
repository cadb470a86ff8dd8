r"""Table 5 in small: fine-tuning on the digits 5 to 9 what was trained on the digits 0 to 4.

    python -m tfdpx.train.pretrain --recipe=digits --dataset=digits:0-4 --workdir=/runs/pretrained
    python -m tfdpx.train.classify --preset=digits_table5/last --workdir=/runs/fine_tuned \
        --init_from=/runs/pretrained/model.keras

The column `scratch` starts from nothing and needs no model. Test accuracy at epsilon 1, 2, 4, 8,
median of five seeds (docs/fine_tuning.md): last 91.7, 94.4, 96.1, 96.7%; all 90.6, 93.3, 95.6,
96.1%; scratch 93.3, 95.0, 96.1, 96.1%. All sixty runs take nine minutes on two cores.

Updates and learning rate were tuned for every column and epsilon on a quarter of the 716 training
images, three seeds, updates among 20 and 60.
"""

EPSILON = 8.0

COMMON = dict(
    dataset="digits:5-9",
    model="small_cnn",
    delta=1e-5,
    batch_size=512,
    l2_norm_clip=0.1,
    ema_momentum=0.9999,
    report_every=20,
)

# From epsilon, up to the next: updates, learning rate.
_ALL = {5.0: (20, 4.0), 3.0: (20, 2.0), 1.5: (20, 4.0), 0.0: (20, 2.0)}
_LAST = {1.5: (20, 4.0), 0.0: (20, 2.0)}
_SCRATCH = {5.0: (20, 4.0), 1.5: (60, 1.0), 0.0: (20, 1.0)}


def _tuned(budgets, **common):
    def settings(epsilon):
        steps, learning_rate = budgets[max(low for low in budgets if low < epsilon)]
        return dict(common, steps=steps, learning_rate=learning_rate)

    return settings


COLUMNS = {
    "all": _tuned(_ALL, pretrained_on="digits:0-4"),
    "last": _tuned(_LAST, pretrained_on="digits:0-4", trainable="last"),
    "scratch": _tuned(_SCRATCH),
}
