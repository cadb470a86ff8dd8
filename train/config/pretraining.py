"""What a non-private pre-training is asked to do: recipes, schedules and weight decay.

The recipes are those of De et al. 2022 (arXiv:2204.13650), appendix C.3.
"""

import dataclasses
import math

import keras

from tfdpx.train.config.errors import UserError

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

SCHEDULES = ("constant", "step", "cosine")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Everything that determines a pre-training; each field is the flag of that name.

    Attributes that are not plain from their name:
        momentum: Of SGD.
        weight_decay: Added times the weight to the gradient of every weight, before the momentum.
        schedule: `"constant"`; `"step"`, a tenth after each of `decay_steps`; or `"cosine"`, up
            from 0 over `warmup_steps` and then down to 0 at the end.
        init_from, pretrained_on, trainable: As for `settings.Config`, to go on from a model.

    Raises:
        UserError: If a value is missing or out of its range.
    """

    dataset: str | None = None
    model: str | None = None
    batch_size: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    decay_steps: list = dataclasses.field(default_factory=list)
    label_smoothing: float = 0.0
    augment_padding: int = 0
    augment_flip: bool = False
    augment_resize: float = 1.0
    image_size: int | None = None
    group_norm: bool = True
    weight_standardization: bool = True
    init_from: str | None = None
    pretrained_on: str | None = None
    trainable: str = "all"
    precision: str = "float32"
    jit_compile: str = "auto"
    validation: float = 0.0
    eval_split: str | None = None
    report_every: int = 1000
    seed: int | None = None

    def __post_init__(self):
        for name in ("dataset", "model", "batch_size", "steps", "learning_rate"):
            if getattr(self, name) is None:
                raise UserError(f"Flag --{name} must be given: the recipe does not say it.")
        for names, holds, rule in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise UserError(f"Flag --{name} must {rule}. Received: --{name}={value}.")
        if self.warmup_steps and (self.schedule != "cosine" or self.warmup_steps >= self.steps):
            raise UserError(
                "Flag --warmup_steps belongs to --schedule=cosine and must lie below --steps. "
                f"Received: --schedule={self.schedule} --warmup_steps={self.warmup_steps} "
                f"--steps={self.steps}."
            )
        if bool(self.decay_steps) != (self.schedule == "step"):
            raise UserError(
                "Flag --decay_steps says after which updates --schedule=step takes a tenth. "
                f"Received: --schedule={self.schedule} --decay_steps={self.decay_steps}."
            )
        if self.eval_split == "validation" and not self.validation:
            raise UserError(
                "Flag --eval_split=validation measures on the images that --validation holds out. "
                f"Received: --validation={self.validation}."
            )
        if self.trainable == "last" and not self.init_from:
            raise UserError(
                "Flag --trainable=last keeps all other layers as they are and needs a trained "
                "model: give --init_from. Received: --trainable=last."
            )
        if self.augment_resize > 1 and (self.augment_padding or not self.image_size):
            raise UserError(
                "Flag --augment_resize needs --image_size, and takes the place of "
                f"--augment_padding. Received: --augment_resize={self.augment_resize} "
                f"--image_size={self.image_size} --augment_padding={self.augment_padding}."
            )

    def learning_rates(self):
        """The learning rate, or a `keras.optimizers.schedules.LearningRateSchedule` of it."""
        rate = self.learning_rate
        if self.schedule == "step":
            rates = [rate / 10**i for i in range(len(self.decay_steps) + 1)]
            # Keras' value up to and including a boundary is the one before it.
            boundaries = [step - 1 for step in self.decay_steps]
            return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, rates)
        if self.schedule == "cosine":
            warmup = self.warmup_steps
            return keras.optimizers.schedules.CosineDecay(
                initial_learning_rate=0.0 if warmup else rate,
                decay_steps=self.steps - warmup,
                warmup_target=rate if warmup else None,
                warmup_steps=warmup,
            )
        return rate

    def optimizer(self):
        """Momentum SGD with the schedule."""
        return keras.optimizers.SGD(self.learning_rates(), momentum=self.momentum)

    def add_weight_decay(self, model):
        """Gives every trained weight the regularizer whose gradient is `weight_decay` times it."""
        if self.weight_decay:
            for variable in model.trainable_variables:
                variable.regularizer = keras.regularizers.L2(self.weight_decay / 2)


_RULES = (
    (("learning_rate",), lambda v: 0 < v < math.inf, "be positive and finite"),
    (("weight_decay",), lambda v: 0 <= v < math.inf, "be at least 0 and finite"),
    (("momentum", "label_smoothing"), lambda v: 0 <= v < 1, "lie in [0, 1)"),
    (("steps", "batch_size", "report_every", "image_size"), lambda v: v >= 1, "be at least 1"),
    (("augment_resize",), lambda v: 1 <= v < math.inf, "be at least 1 and finite"),
    (("augment_padding", "warmup_steps", "seed"), lambda v: v >= 0, "not be negative"),
    (
        ("decay_steps",),
        lambda v: all(a < b for a, b in zip([0, *v], v, strict=False)),
        "rise from above 0",
    ),
    (("schedule",), lambda v: v in SCHEDULES, f"be one of {SCHEDULES}"),
    (
        ("validation",),
        lambda v: 0 <= v < 1 or (v >= 2 and float(v).is_integer()),
        "be a fraction in [0, 1), or a number of images from 2 on",
    ),
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
    values = {**RECIPES[recipe], **given}
    if values.get("schedule", "constant") != "step" and "decay_steps" not in given:
        values.pop("decay_steps", None)
    if values.get("schedule", "constant") != "cosine" and "warmup_steps" not in given:
        values.pop("warmup_steps", None)
    return Pretraining(**values)
