"""What a non-private pre-training is asked to do, and recipes for it.

The recipes are those of De et al. 2022 (arXiv:2204.13650), appendix C.3.
"""

import dataclasses

from tfdpx.train.config.settings import NOT_NEGATIVE, Check, RunSettings, setting
from tfdpx.train.errors import UserError

# What a recipe does not say.
_DEFAULTS = dict(momentum=0.9, weight_decay=0.0, report_every=1000)
_CROPS_AND_FLIPS = dict(augment_padding=4, augment_flip=True)

RECIPES = {
    "digits": dict(
        dataset="digits", model="small_cnn", batch_size=128, steps=600, learning_rate=0.05,
        weight_decay=5e-4, schedule="cosine", warmup_steps=50,
    ),
    "cifar100": dict(
        dataset="cifar100", model="wrn_40_4", batch_size=128, steps=100_000, learning_rate=0.1,
        weight_decay=5e-4, schedule="step", decay_steps=[50_000, 75_000], **_CROPS_AND_FLIPS,
    ),
    "imagenet32": dict(
        dataset="imagenet32", model="wrn_28_10", batch_size=1024, steps=240_000,
        learning_rate=0.3, weight_decay=5e-5, **_CROPS_AND_FLIPS,
    ),
    # Of JFT-300M, which is not public: --dataset and --steps (10 epochs) are to be given.
    "jft": dict(
        model="nf_resnet_50", batch_size=1024, learning_rate=0.4, weight_decay=1e-6,
        schedule="cosine", warmup_steps=5_000, image_size=224, augment_resize=1.2,
        augment_flip=True,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(RunSettings):
    """Everything that determines a run of `pretrain`; each field is the flag of that name.

    Attributes whose flags are those of private training, with another meaning:
        momentum: Of SGD.
        weight_decay: Added times the weight to the gradient of every weight, before the momentum.

    Attributes that their flags do not explain:
        schedule: `"constant"`; `"step"`, a tenth after each of `decay_steps`; or `"cosine"`, up
            from 0 over `warmup_steps` and then down to 0 at the end.

    Raises:
        UserError: If a value is out of its range, or values do not go together.
    """

    schedule: str = setting(
        "How the learning rate changes.", choices=("constant", "step", "cosine"), default="constant"
    )
    warmup_steps: int = setting(
        "Updates of the rise before --schedule=cosine falls.", NOT_NEGATIVE, default=0
    )
    decay_steps: list = setting(
        "Updates after which --schedule=step takes a tenth.",
        Check(lambda v: all(a < b for a, b in zip([0, *v], v, strict=False)), "rise from above 0"),
        default_factory=list,
    )

    def __post_init__(self):
        super().__post_init__()
        self._refuse_if(
            self.warmup_steps and (self.schedule != "cosine" or self.warmup_steps >= self.steps),
            "Flag --warmup_steps belongs to --schedule=cosine and must lie below --steps.",
            *("schedule", "warmup_steps", "steps"),
        )
        self._refuse_if(
            bool(self.decay_steps) != (self.schedule == "step"),
            "Flag --decay_steps says after which updates --schedule=step takes a tenth.",
            *("schedule", "decay_steps"),
        )


def resolve(recipe, given):
    """The `Pretraining` of a recipe with the given values in place of its own.

    Args:
        recipe: One of `RECIPES`.
        given: Dict from flag names to values; None for those left out.

    Raises:
        UserError: If there is no such recipe, a value is out of its range, or a flag is of private
            training alone.
    """
    if recipe not in RECIPES:
        raise UserError(
            f"There is no recipe {recipe!r}. Received: --recipe={recipe}. Use one of: "
            f"{', '.join(RECIPES)}."
        )
    given = {name: value for name, value in given.items() if value is not None}
    known = {field.name for field in dataclasses.fields(Pretraining)}
    foreign = sorted(set(given) - known)
    if foreign:
        raise UserError(
            "Pre-training is not private and takes one view of each image: leave out "
            f"{', '.join('--' + name for name in foreign)}."
        )
    values = {**_DEFAULTS, **RECIPES[recipe], **given}
    for name in ("dataset", "model", "batch_size", "steps", "learning_rate"):
        if name not in values:
            raise UserError(f"Flag --{name} must be given: the recipe does not say it.")
    for name, schedule in (("decay_steps", "step"), ("warmup_steps", "cosine")):
        if values.get("schedule") != schedule and name not in given:
            values.pop(name, None)
    return Pretraining(**values)
