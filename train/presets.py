"""Presets: named sets of flag values for experiments. See docs/presets.md for their results.

For example, `--preset=table12/eps8` is the column `eps8` of the group `table12`. `COMMON` has the
values that all columns of a group share. Flags on the command line override a preset. Groups
`table2` to `table21` and `figure4` follow appendix C of De et al. 2022 (arXiv:2204.13650); the
others name their paper.
"""

import math

from tfdpx.train.errors import UserError, did_you_mean

# A preset may have values that depend on epsilon. Under this key is a dict from a lower limit of
# epsilon to the values for epsilons from this limit on.
BY_EPSILON = "by_epsilon"
# The epsilon of such a preset if the user does not set one.
EPSILON = 8.0


# fmt: off
def _table(names, rows):
    """Converts rows to dicts: `_table("a b", {"x": (1, 2)})` is `{"x": {"a": 1, "b": 2}}`."""
    return {key: dict(zip(names.split(), row, strict=True)) for key, row in rows.items()}


def _additions(**rows):
    """Returns the columns of an ablation study. Each column adds values to the column before it."""
    columns, values = {}, {}
    for name, row in rows.items():
        columns[name] = values = {**values, **row}
    return columns


# Settings that are None are chosen by `tfdpx.train.defaults`.
_CHOSEN = dict(model="auto", epsilon=3.0, delta=1e-5, learning_rate=None, l2_norm_clip=None,
    ema_momentum=None, report_every=20)
_DIGITS_CNN = dict(model="small_cnn", delta=1e-5, l2_norm_clip=0.1, ema_momentum=0.9999,
    report_every=10)
# Arguments of a model without group normalization and weight standardization (the additions of De
# et al.), and with group normalization only.
_BARE, _NORMED = "groups=none,weight_standardization=false", "weight_standardization=false"
_CROPS, _RESIZED = "RandomCropFlip:padding=4,flip=true", "ResizeCropFlip:scale=1.2,flip=true"
# Appendix C of De et al.: wide ResNets that are trained from random weights.
_CIFAR10 = dict(dataset="cifar10", model="wrn_16_4", delta=1e-5, batch_size=4096, l2_norm_clip=1.0,
    augmult=16, augment=_CROPS, ema_momentum=0.9999, microbatch_size=64, report_every=50)
_FROM_IMAGENET32 = dict(_CIFAR10, model="wrn_28_10", pretrained_on="imagenet32", trainable="all",
    batch_size=16384, learning_rate=1.0, microbatch_size=16)
_LAST = dict(trainable="last", learning_rate=4.0)
# 10,000 training images are held out (Table 11). Accuracy is measured on the official validation
# images.
_IMAGENET = dict(dataset="imagenet2012", validation=10_000, eval_split="test", delta=8e-7,
    batch_size=16384, l2_norm_clip=1.0, ema_momentum=0.99999, report_every=500)
_FROM_JFT = dict(_IMAGENET, center_crop=320, model="nf_resnet_200", pretrained_on="jft",
    trainable="last", learning_rate=0.4, microbatch_size=64)
_PRIVATE_PLACES = dict(batch_size=4096, l2_norm_clip=1.0, learning_rate=0.1)
_PUBLIC_PLACES = dict(private=False, batch_size=1024)
# Sander et al. 2023 (arXiv:2210.03403). The network is from their published code, except for biases
# and the normalization of projections.
_TAN = dict(_CIFAR10, model="wrn_16_4:norm_before_relu=false,weight_standardization=false")
# Noise, batch size, epochs and two refreshes per epoch are from Yu et al. 2022, appendix B. Clip
# and learning rates are ours: the paper's clip is the median norm at the start, which no epsilon
# covers.
_INDIVIDUAL = dict(individual=True, individual_refreshes=2, delta=1e-5, l2_norm_clip=1.0,
    ema_momentum=0.0, learning_rate=1.0, report_every=50)
_UTKFACE = dict(_INDIVIDUAL, dataset="folder:PATH", image_size=224, pretrained_on="imagenet",
    trainable="all", batch_size=200, steps=7_500, noise_multiplier=1.5, learning_rate=0.1,
    microbatch_size=16)

COMMON = {
    "digits": dict(_CHOSEN, dataset="digits"),
    "folder": dict(_CHOSEN, dataset="folder:PATH"),
    "digits_synthetic": dict(_DIGITS_CNN, dataset="digits", pretrained_on="synthetic",
        batch_size=1024),
    "digits_table2": dict(dataset="digits", model="small_cnn", epsilon=8.0, delta=1e-5,
        l2_norm_clip=0.1, report_every=20),
    "digits_table5": dict(_DIGITS_CNN, dataset="digits:5-9", batch_size=512, report_every=20),
    # The paper does not print the learning rates, noise and updates for its Table 2. We chose them
    # from its Table 12, Figure 6 and Figure 7. The noise is computed by the paper's accountant.
    "table2": dict(dataset="cifar10", validation=0.1, eval_split="validation", model="wrn_40_4",
        epsilon=8.0, delta=1e-5, accountant="rdp", l2_norm_clip=1.0, microbatch_size=64),
    "table9": dict(_FROM_IMAGENET32, model="wrn_40_4", microbatch_size=32),
    "table12": _CIFAR10,
    "table13": dict(_CIFAR10, model="wrn_40_4", batch_size=16384, augmult=32, microbatch_size=16),
    "table14": dict(_IMAGENET, center_crop=224, model="nf_resnet_50", augmult=4,
        microbatch_size=16, augment=_RESIZED),
    "table15": _FROM_IMAGENET32,
    "table16": dict(_FROM_IMAGENET32, **_LAST),
    "table17": dict(_FROM_IMAGENET32, dataset="cifar100"),
    "table18": dict(_FROM_IMAGENET32, **_LAST, dataset="cifar100"),
    # Only with 45,000 training images does this table have the epsilons that the paper states.
    "table19": dict(_CIFAR10, validation=0.1, eval_split="test", model="wrn_40_4",
        pretrained_on="cifar100", trainable="all", microbatch_size=32),
    "table20": _FROM_JFT,
    "table21": dict(dataset="places365_small", center_crop=256, model="nf_resnet_50",
        pretrained_on="jft", delta=5e-7, label_smoothing=0.1, ema_momentum=0.99999,
        microbatch_size=32, report_every=500),
    # With its own accountant the paper computed 136 epochs. PLD would allow 166.
    "figure4": dict(_FROM_JFT, batch_size=1024, noise_multiplier=0.6, epsilon=8.0,
        accountant="rdp"),
    "tan": _TAN,
    "randp": dict(_TAN, pretrained_on="synthetic", trainable="all"),
    "dp_mix": dict(_TAN, augmult=34, microbatch_size=32,
        augment=f"{_CROPS}+MixViews:mixed_views=18,alpha=0.2"),
    # Tramer and Boneh 2021 (arXiv:2011.11660), from the commands in their code. The learning rates
    # are for gradients that are not divided by the clip.
    "scatternet": dict(epsilon=3.0, delta=1e-5, l2_norm_clip=0.1, optimizer="dpsgd:momentum=0.9",
        ema_momentum=0.0, microbatch_size=512, report_every=40),
    "individual": _INDIVIDUAL,
    # Public pre-training, appendix C.3 of De et al. Keras applies weight decay without momentum,
    # so the weight decay is the paper's times 1 / (1 - 0.9).
    "pretrain": dict(private=False, sampling="shuffle", noise_multiplier=0.0,
        l2_norm_clip=math.inf, delta=1e-5, ema_momentum=0.0, report_every=1000),
}

_IMAGENET32_COLUMNS = _table("noise_multiplier steps", {
    "eps1": (21.1, 250), "eps2": (15.8, 500), "eps4": (12.0, 1000), "eps8": (9.4, 2000),
})
_OF_STEPS_AND_RATE = "steps learning_rate"

COLUMNS = {
    # Chosen on a held-out quarter of the training images, with one seed.
    "digits_synthetic": {None: {BY_EPSILON: _table("trainable steps learning_rate", {
        5.0: ("all", 60, 2.0), 1.5: ("all", 30, 4.0), 0.0: ("last", 15, 4.0)})}},
    "digits_table2": _additions(
        baseline=dict(model=f"small_cnn:{_BARE}", ema_momentum=0.0, batch_size=64, steps=1000,
            learning_rate=0.25),
        group_norm=dict(model=f"small_cnn:{_NORMED}", steps=300, learning_rate=0.5),
        large_batch=dict(batch_size=1024, steps=100, learning_rate=4.0),
        weight_standardization=dict(model="small_cnn", learning_rate=2.0),
        augmult=dict(augmult=4, augment="RandomCropFlip:padding=1,flip=false", learning_rate=1.0),
        ema=dict(ema_momentum=0.9999),
    ),
    # Numbers of updates and learning rates, tuned on a quarter of the 716 images with three seeds.
    "digits_table5": {
        "all": {"pretrained_on": "digits:0-4", BY_EPSILON: _table(_OF_STEPS_AND_RATE, {
            5.0: (20, 4.0), 3.0: (20, 2.0), 1.5: (20, 4.0), 0.0: (20, 2.0)})},
        "last": {"pretrained_on": "digits:0-4", "trainable": "last", BY_EPSILON: _table(
            _OF_STEPS_AND_RATE, {1.5: (20, 4.0), 0.0: (20, 2.0)})},
        "scratch": {BY_EPSILON: _table(_OF_STEPS_AND_RATE, {
            5.0: (20, 4.0), 1.5: (60, 1.0), 0.0: (20, 1.0)})},
    },
    "table2": _additions(
        baseline=dict(model=f"wrn_40_4:{_BARE}", ema_momentum=0.0, batch_size=256, steps=20_000,
            learning_rate=0.5, report_every=500),
        group_norm=dict(model=f"wrn_40_4:{_NORMED}"),
        large_batch=dict(batch_size=4096, steps=2468, learning_rate=4.0, report_every=50),
        weight_standardization=dict(model="wrn_40_4"),
        augmult=dict(augmult=16, augment=_CROPS, microbatch_size=32),
        ema=dict(ema_momentum=0.9999),
    ),
    "table9": _IMAGENET32_COLUMNS,
    "table12": _table("learning_rate noise_multiplier steps", {
        "eps1": (2.0, 10.0, 875), "eps2": (2.0, 6.0, 1125), "eps3": (2.0, 5.0, 1593),
        "eps4": (2.0, 4.0, 1687), "eps6": (4.0, 3.0, 1843),
        # Only with 45,000 training images is this epsilon 8.
    }) | {"eps8": dict(learning_rate=4.0, noise_multiplier=3.0, steps=2468, validation=0.1,
        eval_split="test")},
    "table13": _table("learning_rate noise_multiplier steps", {
        "eps1": (2.0, 40.0, 906), "eps2": (2.0, 24.0, 1156), "eps3": (2.0, 20.0, 1656),
        "eps4": (2.0, 16.0, 1765), "eps6": (4.0, 12.0, 2007), "eps8": (4.0, 9.4, 2000),
    }),
    "table14": {"eps8": dict(learning_rate=4.0, noise_multiplier=2.5, steps=71_589)},
    "table15": _IMAGENET32_COLUMNS,
    "table16": _IMAGENET32_COLUMNS,
    "table17": _IMAGENET32_COLUMNS,
    "table18": _IMAGENET32_COLUMNS,
    "table19": _table("batch_size learning_rate noise_multiplier steps", {
        "eps0.5": (1024, 0.125, 5.0, 781), "eps1": (4096, 1.0, 5.0, 164),
        "eps1.5": (4096, 0.3, 6.0, 531), "eps2": (4096, 0.3, 6.0, 906),
        "eps4": (4096, 0.3, 5.0, 2171), "eps6": (4096, 0.1, 6.0, 6421),
        "eps8": (4096, 0.1, 5.0, 7226),
    }),
    "table20": _table("noise_multiplier steps", {
        "eps0.5": (12.7, 12_500), "eps1": (9.4, 25_000), "eps2": (7.0, 50_000),
        "eps4": (5.3, 100_000), "eps8": (4.0, 193_318),
    }),
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
    # Tang et al. 2023 (arXiv:2306.06076), from their published code. The first 8 epochs train only
    # the last layer.
    "randp": {"eps1": dict(learning_rate=0.4, noise_multiplier=9.3, steps=875, head_steps=96,
        head_learning_rate=15.0)},
    # DP-Mix_Self, by Bao et al. 2023 (arXiv:2311.01295). We chose all values.
    "dp_mix": {"eps8": dict(epsilon=8.0, learning_rate=4.0, steps=2500)},
    "scatternet": _table("dataset model batch_size steps learning_rate", {
        "mnist": ("mnist", "scatter_linear", 4096, 560, 0.8),
        "fashion_mnist": ("fashion_mnist", "scatter_linear", 8192, 280, 1.6),
        "cifar10": ("cifar10", "scatter_cnn", 8192, 360, 0.4),
        "cifar10_linear": ("cifar10", "scatter_linear", 8192, 360, 0.4),
    }),
    "individual": _table(
        "dataset model batch_size steps noise_multiplier microbatch_size", {
            "cifar10": ("cifar10", "resnet_20", 4000, 2_600, 3.2, 64),
            "mnist": ("mnist", "resnet_20", 4000, 1_500, 6.0, 64),
    }) | {"utkface_gender": _UTKFACE, "utkface_age": _UTKFACE},
    "pretrain": {
        "digits": dict(dataset="digits", model="small_cnn", batch_size=128, steps=600,
            learning_rate=0.05, optimizer="dpsgd:momentum=0.9,weight_decay=0.005",
            schedule="cosine:warmup_steps=50"),
        "cifar100": dict(dataset="cifar100", model="wrn_40_4", batch_size=128, steps=100_000,
            learning_rate=0.1, optimizer="dpsgd:momentum=0.9,weight_decay=0.005",
            schedule="step:decay_steps=50000..75000", augmult=1, augment=_CROPS),
        # As in the paper, 10,000 images are held out (Table 11).
        "imagenet32": dict(dataset="imagenet32", validation=10_000, model="wrn_28_10",
            batch_size=1024, steps=240_000, learning_rate=0.3,
            optimizer="dpsgd:momentum=0.9,weight_decay=0.0005", augmult=1, augment=_CROPS),
        # JFT-300M is not public. The number of updates is for 10 epochs of another data set of this
        # size.
        "jft": dict(dataset="folder:PATH", image_size=224, model="nf_resnet_50:skip_init=0",
            batch_size=1024, steps=2_929_688, learning_rate=0.4, augmult=1, augment=_RESIZED,
            optimizer="dpsgd:momentum=0.9,weight_decay=0.00001",
            schedule="cosine:warmup_steps=5000"),
    },
}
# fmt: on

# The only presets for tables, and for heads.
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
    """Returns the names of all presets as one text, such as "digits, table9/(eps1|eps2)"."""
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
        epsilon: Float, the user's budget. Some presets depend on it.

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
        above = next((values for lower, values in budgets.items() if epsilon > lower), {})
        values = {"epsilon": epsilon, **values, **above}
    return values
