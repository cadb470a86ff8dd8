"""Tables 7 to 10 of the paper on heads: what it searched, by table and column.

The paper is "Differentially Private Image Classification from Features". Its learning rates (or
alpha) and regularizations were searched over [1e-8, 1e8], on the 5% of the training images that
were held out; it does not print which were found. Clips, ranges and numbers of trials are as
printed. `epsilon` is not part of a table: --epsilon says it.
"""

from tfdpx.train.config.errors import UserError

# Table -> method, trials, steps (the last of those that the paper compares), and what is searched.
_RATE, _ALPHA = ("learning_rate", "l2_regularization"), ("alpha", "l2_regularization")
_TABLES = {
    "table7": dict(method="dp_adam", trials=200, steps=100, searched=_RATE),
    "table8": dict(method="dp_ls", trials=200, steps=None, searched=_ALPHA),
    "table9": dict(method="dp_newton", trials=300, steps=10, searched=_RATE),
    "table10": dict(method="dp_fc", trials=200, steps=10, searched=_RATE),
}
_RANGE, _HELD_OUT = (1e-8, 1e8), 0.05
_IMAGENET = dict(num_examples=1_281_167, num_classes=1000, delta=8e-7, dataset="imagenet2012")
_DATASETS = {
    "imagenet": _IMAGENET,
    "cifar10": dict(num_examples=50_000, num_classes=10, delta=1e-5, dataset="cifar10"),
    "cifar100": dict(num_examples=50_000, num_classes=100, delta=1e-5, dataset="cifar100"),
}
_BACKBONES = {"vit_g14_jft": 1664, "vit_b16_imagenet21k": 768, "vit_b16_imagenet1k": 768}


def names():
    """The names of all presets, such as "table10/vit_g14_jft/cifar10"."""
    return [
        f"{table}/{backbone}/{data}"
        for table in _TABLES
        for backbone in _BACKBONES
        for data in _DATASETS
        if (backbone, data) != ("vit_b16_imagenet1k", "imagenet")
    ]


def resolve(name):
    """Dict of what a preset says.

    Returns:
        Dict: `method`, `trials`, `steps` (None for least squares), `num_examples`, `num_classes`,
        `delta`, `dataset`, `backbone`, `dimension`, `l2_norm_clip`, `held_out` (the share of the
        training images that trials are measured on), and `ranges`: from each argument that is
        searched to its bounds, as `head_search.by_optuna` takes them.

    Raises:
        UserError: If there is none of that name.
    """
    if name not in names():
        raise UserError(
            f"There is no preset {name!r}. Received: --preset={name}. Use "
            f"({'|'.join(_TABLES)})/({'|'.join(_BACKBONES)})/({'|'.join(_DATASETS)})."
        )
    table, backbone, data = name.split("/")
    large = backbone == "vit_g14_jft" and data == "imagenet"
    values = dict(_TABLES[table])
    ranges = dict.fromkeys(values.pop("searched"), _RANGE)
    return {
        **values,
        **_DATASETS[data],
        "backbone": backbone,
        "dimension": _BACKBONES[backbone],
        "l2_norm_clip": 1.0 if large else 0.005,
        "held_out": _HELD_OUT,
        "ranges": ranges,
    }
