"""Presets: named sets of flag values for experiments. See docs/presets.md for their results.

For example, `--preset=table12/eps8` is the column `eps8` of the group `table12`. `COMMON` has the
values that all columns of a group share. Flags on the command line override a preset. Groups
`table2` to `table21` and `figure4` follow appendix C of De et al. 2022 (arXiv:2204.13650); the
others name their paper.
"""

import math

from tfdpx.train.errors import UserError, did_you_mean

# The key of values that depend on the budget: pairs of a lower limit of epsilon, and values above.
BY_EPSILON = "by_epsilon"
# The budget of such a preset if the user sets none.
EPSILON = 8.0

# tfdpx.train.defaults chooses open values.
_CHOSEN = dict(
    model="auto", epsilon=3.0, delta=1e-5, learning_rate=None, l2_norm_clip=None,
    ema_momentum=None, report_every=20,
)  # fmt: skip
_DIGITS_CNN = dict(
    model="small_cnn", delta=1e-5, l2_norm_clip=0.1, ema_momentum=0.9999, report_every=10
)
_SMALL_TABLE2 = dict(
    dataset="digits", model="small_cnn", epsilon=8.0, delta=1e-5, l2_norm_clip=0.1, report_every=20
)
_SMALL_TABLE5 = dict(_DIGITS_CNN, dataset="digits:5-9", batch_size=512, report_every=20)
# Arguments of a model without the additions of De et al., and with the first of them.
_BARE, _NORMED = "groups=none,weight_standardization=false", "weight_standardization=false"

_CROPS = "RandomCropFlip:padding=4,flip=true"
# Appendix C of De et al.: WRNs from random weights.
_CIFAR10 = dict(
    dataset="cifar10", model="wrn_16_4", delta=1e-5, batch_size=4096, l2_norm_clip=1.0, augmult=16,
    augment=_CROPS, ema_momentum=0.9999, microbatch_size=64, report_every=50,
)  # fmt: skip
# Learning rates, noise and updates of the paper's Table 2 are not printed: these are ours, after
# its Table 12, Figure 6 and Figure 7; the noise is solved for by the paper's accountant.
_TABLE2 = dict(
    dataset="cifar10", validation=0.1, eval_split="validation", model="wrn_40_4", epsilon=8.0,
    delta=1e-5, accountant="rdp", l2_norm_clip=1.0, microbatch_size=64,
)  # fmt: skip
_FROM_IMAGENET32 = dict(
    _CIFAR10, model="wrn_28_10", pretrained_on="imagenet32", trainable="all", batch_size=16384,
    learning_rate=1.0, microbatch_size=16,
)  # fmt: skip
_LAST = dict(trainable="last", learning_rate=4.0)
# This table has the epsilons of the paper only with 45,000 training images.
_FROM_CIFAR100 = dict(
    _CIFAR10, validation=0.1, eval_split="test", model="wrn_40_4", pretrained_on="cifar100",
    trainable="all", microbatch_size=32,
)  # fmt: skip
# 10,000 training images are held out (Table 11); accuracy is on the official validation images.
_IMAGENET = dict(
    dataset="imagenet2012", validation=10_000, eval_split="test", delta=8e-7,
    batch_size=16384, l2_norm_clip=1.0, ema_momentum=0.99999, report_every=500,
)  # fmt: skip
_FROM_JFT = dict(
    _IMAGENET, center_crop=320, model="nf_resnet_200", pretrained_on="jft", trainable="last",
    learning_rate=0.4, microbatch_size=64,
)  # fmt: skip
# The paper's accountant solves for its 136 epochs; PLD allows 166.
_FIGURE4 = dict(_FROM_JFT, batch_size=1024, noise_multiplier=0.6, epsilon=8.0, accountant="rdp")
_PLACES = dict(
    dataset="places365_small", center_crop=256, model="nf_resnet_50",
    pretrained_on="jft", delta=5e-7, label_smoothing=0.1, ema_momentum=0.99999, microbatch_size=32,
    report_every=500,
)  # fmt: skip
_PRIVATE_PLACES = dict(batch_size=4096, l2_norm_clip=1.0, learning_rate=0.1)
_PUBLIC_PLACES = dict(private=False, batch_size=1024)

# Sander et al. 2023 (arXiv:2210.03403): the network of their published code but for biases and
# the norms of projections.
_TAN = dict(_CIFAR10, model="wrn_16_4:norm_before_relu=false,weight_standardization=false")

# Tramer and Boneh 2021 (arXiv:2011.11660): their commands, with learning rates for gradients that
# are not divided by the clip.
_SCATTERNET = dict(
    epsilon=3.0, delta=1e-5, l2_norm_clip=0.1, optimizer="dpsgd:momentum=0.9", ema_momentum=0.0,
    microbatch_size=512, report_every=40,
)  # fmt: skip
_SCATTER_CIFAR10 = dict(dataset="cifar10", batch_size=8192, steps=360, learning_rate=0.4)

# Yu et al. 2022, appendix B: noise, batch size and epochs, and two refreshes in an epoch. The clip
# there is the median norm at the start, which no epsilon covers, so clip and learning rates are
# ours.
_INDIVIDUAL = dict(
    individual=True, individual_refreshes=2, delta=1e-5, l2_norm_clip=1.0, ema_momentum=0.0,
    learning_rate=1.0, report_every=50,
)  # fmt: skip
_UTKFACE = dict(
    _INDIVIDUAL, dataset="folder:PATH", image_size=224, pretrained_on="imagenet", trainable="all",
    batch_size=200, steps=7_500, noise_multiplier=1.5, learning_rate=0.1, microbatch_size=16,
)  # fmt: skip

# Public pre-training, appendix C.3 of De et al. Keras applies weight decay separately from the
# momentum, so the values are the paper's times 1 / (1 - 0.9).
_PRETRAIN = dict(
    private=False, sampling="shuffle", noise_multiplier=0.0, l2_norm_clip=math.inf, delta=1e-5,
    ema_momentum=0.0, report_every=1000,
)  # fmt: skip

COMMON = {
    "digits": dict(_CHOSEN, dataset="digits"),
    "folder": dict(_CHOSEN, dataset="folder:PATH"),
    "digits_synthetic": dict(
        _DIGITS_CNN, dataset="digits", pretrained_on="synthetic", batch_size=1024
    ),
    "digits_table2": _SMALL_TABLE2,
    "digits_table5": _SMALL_TABLE5,
    "table2": _TABLE2,
    "table9": dict(_FROM_IMAGENET32, model="wrn_40_4", microbatch_size=32),
    "table12": _CIFAR10,
    "table13": dict(
        _CIFAR10, model="wrn_40_4", batch_size=16384, augmult=32, microbatch_size=16
    ),
    "table14": dict(
        _IMAGENET, center_crop=224, model="nf_resnet_50", augmult=4, microbatch_size=16,
        augment="ResizeCropFlip:scale=1.2,flip=true",
    ),
    "table15": _FROM_IMAGENET32,
    "table16": dict(_FROM_IMAGENET32, **_LAST),
    "table17": dict(_FROM_IMAGENET32, dataset="cifar100"),
    "table18": dict(_FROM_IMAGENET32, **_LAST, dataset="cifar100"),
    "table19": _FROM_CIFAR100,
    "table20": _FROM_JFT,
    "table21": _PLACES,
    "figure4": _FIGURE4,
    "tan": _TAN,
    "randp": dict(_TAN, pretrained_on="synthetic", trainable="all"),
    "dp_mix": dict(
        _TAN, augmult=34, microbatch_size=32,
        augment=f"{_CROPS}+MixViews:mixed_views=18,alpha=0.2",
    ),
    "scatternet": _SCATTERNET,
    "individual": _INDIVIDUAL,
    "pretrain": _PRETRAIN,
}  # fmt: skip

_IMAGENET32_COLUMNS = {
    "eps1": dict(noise_multiplier=21.1, steps=250),
    "eps2": dict(noise_multiplier=15.8, steps=500),
    "eps4": dict(noise_multiplier=12.0, steps=1000),
    "eps8": dict(noise_multiplier=9.4, steps=2000),
}


def _additions(**rows):
    """Returns the columns of an ablation, in which each row adds its values to the rows before."""
    columns, values = {}, {}
    for name, row in rows.items():
        columns[name] = values = {**values, **row}
    return columns


COLUMNS = {
    # Chosen on a quarter of the training images held out, one seed.
    "digits_synthetic": {
        None: {
            BY_EPSILON: (
                (5.0, dict(trainable="all", steps=60, learning_rate=2.0)),
                (1.5, dict(trainable="all", steps=30, learning_rate=4.0)),
                (0.0, dict(trainable="last", steps=15, learning_rate=4.0)),
            )
        }
    },
    "digits_table2": _additions(
        baseline=dict(
            model=f"small_cnn:{_BARE}", ema_momentum=0.0, batch_size=64, steps=1000,
            learning_rate=0.25,
        ),
        group_norm=dict(model=f"small_cnn:{_NORMED}", steps=300, learning_rate=0.5),
        large_batch=dict(batch_size=1024, steps=100, learning_rate=4.0),
        weight_standardization=dict(model="small_cnn", learning_rate=2.0),
        augmult=dict(
            augmult=4, augment="RandomCropFlip:padding=1,flip=false", learning_rate=1.0
        ),
        ema=dict(ema_momentum=0.9999),
    ),
    # Updates and learning rate by epsilon, tuned on a quarter of the 716 images, three seeds.
    "digits_table5": {
        "all": {
            "pretrained_on": "digits:0-4",
            BY_EPSILON: (
                (5.0, dict(steps=20, learning_rate=4.0)),
                (3.0, dict(steps=20, learning_rate=2.0)),
                (1.5, dict(steps=20, learning_rate=4.0)),
                (0.0, dict(steps=20, learning_rate=2.0)),
            ),
        },
        "last": {
            "pretrained_on": "digits:0-4",
            "trainable": "last",
            BY_EPSILON: (
                (1.5, dict(steps=20, learning_rate=4.0)),
                (0.0, dict(steps=20, learning_rate=2.0)),
            ),
        },
        "scratch": {
            BY_EPSILON: (
                (5.0, dict(steps=20, learning_rate=4.0)),
                (1.5, dict(steps=60, learning_rate=1.0)),
                (0.0, dict(steps=20, learning_rate=1.0)),
            ),
        },
    },
    "table2": _additions(
        baseline=dict(
            model=f"wrn_40_4:{_BARE}", ema_momentum=0.0, batch_size=256, steps=20_000,
            learning_rate=0.5, report_every=500,
        ),
        group_norm=dict(model=f"wrn_40_4:{_NORMED}"),
        large_batch=dict(batch_size=4096, steps=2468, learning_rate=4.0, report_every=50),
        weight_standardization=dict(model="wrn_40_4"),
        augmult=dict(augmult=16, augment=_CROPS, microbatch_size=32),
        ema=dict(ema_momentum=0.9999),
    ),
    "table9": _IMAGENET32_COLUMNS,
    "table12": {
        "eps1": dict(learning_rate=2.0, noise_multiplier=10.0, steps=875),
        "eps2": dict(learning_rate=2.0, noise_multiplier=6.0, steps=1125),
        "eps3": dict(learning_rate=2.0, noise_multiplier=5.0, steps=1593),
        "eps4": dict(learning_rate=2.0, noise_multiplier=4.0, steps=1687),
        "eps6": dict(learning_rate=4.0, noise_multiplier=3.0, steps=1843),
        # This epsilon is 8 only with 45,000 training images.
        "eps8": dict(
            learning_rate=4.0, noise_multiplier=3.0, steps=2468, validation=0.1, eval_split="test"
        ),
    },
    "table13": {
        "eps1": dict(learning_rate=2.0, noise_multiplier=40.0, steps=906),
        "eps2": dict(learning_rate=2.0, noise_multiplier=24.0, steps=1156),
        "eps3": dict(learning_rate=2.0, noise_multiplier=20.0, steps=1656),
        "eps4": dict(learning_rate=2.0, noise_multiplier=16.0, steps=1765),
        "eps6": dict(learning_rate=4.0, noise_multiplier=12.0, steps=2007),
        "eps8": dict(learning_rate=4.0, noise_multiplier=9.4, steps=2000),
    },
    "table14": {"eps8": dict(learning_rate=4.0, noise_multiplier=2.5, steps=71_589)},
    "table15": _IMAGENET32_COLUMNS,
    "table16": _IMAGENET32_COLUMNS,
    "table17": _IMAGENET32_COLUMNS,
    "table18": _IMAGENET32_COLUMNS,
    "table19": {
        "eps0.5": dict(batch_size=1024, learning_rate=0.125, noise_multiplier=5.0, steps=781),
        "eps1": dict(learning_rate=1.0, noise_multiplier=5.0, steps=164),
        "eps1.5": dict(learning_rate=0.3, noise_multiplier=6.0, steps=531),
        "eps2": dict(learning_rate=0.3, noise_multiplier=6.0, steps=906),
        "eps4": dict(learning_rate=0.3, noise_multiplier=5.0, steps=2171),
        "eps6": dict(learning_rate=0.1, noise_multiplier=6.0, steps=6421),
        "eps8": dict(learning_rate=0.1, noise_multiplier=5.0, steps=7226),
    },
    "table20": {
        "eps0.5": dict(noise_multiplier=12.7, steps=12_500),
        "eps1": dict(noise_multiplier=9.4, steps=25_000),
        "eps2": dict(noise_multiplier=7.0, steps=50_000),
        "eps4": dict(noise_multiplier=5.3, steps=100_000),
        "eps8": dict(noise_multiplier=4.0, steps=193_318),
    },
    "table21": {
        "all_eps8": dict(_PRIVATE_PLACES, trainable="all", noise_multiplier=1.0, steps=223_939),
        "last_eps8": dict(_PRIVATE_PLACES, trainable="last", noise_multiplier=2.0, steps=1_374_116),
        "all_inf": dict(_PUBLIC_PLACES, trainable="all", learning_rate=0.3, steps=8_250),
        "last_inf": dict(_PUBLIC_PLACES, trainable="last", learning_rate=0.1, steps=46_500),
    },
    "figure4": {
        f"{trainable}_{depth}": dict(trainable=trainable, model=f"nf_resnet_{depth}")
        for depth in (50, 101, 152, 200)
        for trainable in ("last", "all")
    },
    "tan": {"eps8": dict(learning_rate=4.0, noise_multiplier=3.0, steps=2500)},
    # Tang et al. 2023 (arXiv:2306.06076), their published code; the first 8 epochs train the last
    # layer alone.
    "randp": {
        "eps1": dict(
            learning_rate=0.4, noise_multiplier=9.3, steps=875, head_steps=96,
            head_learning_rate=15.0,
        )
    },
    # Bao et al. 2023 (arXiv:2311.01295), DP-Mix_Self; all values are ours.
    "dp_mix": {"eps8": dict(epsilon=8.0, learning_rate=4.0, steps=2500)},
    "scatternet": {
        "mnist": dict(
            dataset="mnist", model="scatter_linear", batch_size=4096, steps=560, learning_rate=0.8
        ),
        "fashion_mnist": dict(
            dataset="fashion_mnist", model="scatter_linear", batch_size=8192, steps=280,
            learning_rate=1.6,
        ),
        "cifar10": dict(_SCATTER_CIFAR10, model="scatter_cnn"),
        "cifar10_linear": dict(_SCATTER_CIFAR10, model="scatter_linear"),
    },
    "individual": {
        "cifar10": dict(
            dataset="cifar10", model="resnet_20", batch_size=4000, steps=2_600,
            noise_multiplier=3.2, microbatch_size=64,
        ),
        "mnist": dict(
            dataset="mnist", model="resnet_20", batch_size=4000, steps=1_500,
            noise_multiplier=6.0, microbatch_size=64,
        ),
        "utkface_gender": _UTKFACE,
        "utkface_age": _UTKFACE,
    },
    "pretrain": {
        "digits": dict(
            dataset="digits", model="small_cnn", batch_size=128, steps=600, learning_rate=0.05,
            optimizer="dpsgd:momentum=0.9,weight_decay=0.005", schedule="cosine:warmup_steps=50",
        ),
        "cifar100": dict(
            dataset="cifar100", model="wrn_40_4", batch_size=128, steps=100_000, learning_rate=0.1,
            optimizer="dpsgd:momentum=0.9,weight_decay=0.005",
            schedule="step:decay_steps=50000..75000", augmult=1, augment=_CROPS,
        ),
        # The paper holds 10,000 images out (Table 11).
        "imagenet32": dict(
            dataset="imagenet32", validation=10_000, model="wrn_28_10", batch_size=1024,
            steps=240_000, learning_rate=0.3, optimizer="dpsgd:momentum=0.9,weight_decay=0.0005",
            augmult=1, augment=_CROPS,
        ),
        # JFT-300M is not public: 10 epochs of as many images of another --dataset.
        "jft": dict(
            dataset="folder:PATH", image_size=224, model="nf_resnet_50:skip_init=0",
            batch_size=1024, steps=2_929_688, learning_rate=0.4,
            optimizer="dpsgd:momentum=0.9,weight_decay=0.00001",
            schedule="cosine:warmup_steps=5000", augmult=1,
            augment="ResizeCropFlip:scale=1.2,flip=true",
        ),
    },
}  # fmt: skip

# The only presets of runs on tables and heads.
OF_KIND = {
    "tables": dict(epsilon=3.0, delta=1e-5, accountant="pld", test_fraction=0.2),
    "heads": dict(delta=1e-5),
}


def names():
    """Returns the names of all presets, for example `"digits"` and `"table12/eps8"`."""
    return [
        f"{group}/{column}" if column else group
        for group in COMMON
        for column in COLUMNS.get(group, [None])
    ]


def summary():
    """Returns the names of all presets as a phrase, grouped."""
    columns = {group: [c for c in COLUMNS.get(group, ()) if c] for group in COMMON}
    return ", ".join(
        f"{g}/({'|'.join(options)})" if options else g for g, options in columns.items()
    )


def default_for(kind, dataset):
    """Returns the default preset of a run.

    Args:
        kind: String, "images", "tables" or "heads".
        dataset: String, the value of `--dataset`, or None.
    """
    if kind in OF_KIND:
        return kind
    return "folder" if (dataset or "").startswith("folder:") else "digits"


def values_of(preset, epsilon=None):
    """Returns the values of a preset, a dict.

    Args:
        preset: One of `names()`.
        epsilon: Float, the user's budget, for a preset that depends on it.

    Raises:
        UserError: If there is no such preset.
    """
    if preset in OF_KIND:
        return dict(OF_KIND[preset])
    if preset not in names():
        raise UserError(
            f"There is no preset {preset!r}.{did_you_mean(preset, names())} Received: "
            f"--preset={preset}. Use one of: {summary()}."
        )
    group, _, column = preset.partition("/")
    values = {**COMMON[group], **COLUMNS.get(group, {None: {}})[column or None]}
    if BY_EPSILON in values:
        budgets = values.pop(BY_EPSILON)
        epsilon = EPSILON if epsilon is None else epsilon
        above = next((values for lower, values in budgets if epsilon > lower), {})
        values = {"epsilon": epsilon, **values, **above}
    return values
