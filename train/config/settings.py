"""What one training run is asked to do."""

import dataclasses
import math

import tfdpx
from tfdpx.train.config.errors import UserError, checking_flags

# The four quantities that determine each other: three are given, tfdpx.PrivacyPlan solves the last.
# The order is that in which values of the preset are dropped when the flags overdetermine them.
PRIVACY = ("noise_multiplier", "epsilon", "steps", "batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run; each field is the flag of that name.

    Attributes that are not plain from their name:
        private: False neither clips nor adds noise, in the same step: then noise_multiplier is 0,
            epsilon is None, and l2_norm_clip infinite.
        validation: Training images to hold out: a fraction below 1, or a number.
        eval_split: Where accuracy is measured, `"validation"` (the images held out) or `"test"`.
            None: on those held out, if there are any.
        image_size: Pixels of height and width that images are resized to; None leaves them.
        augment_resize: Views are crops of images this many times as high and wide.
        init_from: Path of a saved model whose weights the run starts with; the last layer starts
            anew, unless the path is one of weights alone (`.weights.h5`).
        pretrained_on: What that model is to have been trained on. It only says what a preset needs.
        trainable: `"all"`, or `"last"` for the last layer alone.
        group_norm, weight_standardization: False leaves them out of a WRN.

    Raises:
        UserError: If a value is out of its range.
    """

    dataset: str
    model: str
    delta: float
    learning_rate: float
    noise_multiplier: float | None = None
    epsilon: float | None = None
    steps: int | None = None
    batch_size: int | None = None
    private: bool = True
    sampling: str = "poisson"
    accountant: str = "pld"
    optimizer: str = "dpsgd"
    momentum: float = 0.0
    weight_decay: float | None = None
    l2_norm_clip: float = 1.0
    microbatch_size: int | str | None = None
    augmult: int = 0
    augment_padding: int = 0
    augment_flip: bool = False
    augment_resize: float = 1.0
    image_size: int | None = None
    group_norm: bool = True
    weight_standardization: bool = True
    init_from: str | None = None
    pretrained_on: str | None = None
    trainable: str = "all"
    label_smoothing: float = 0.0
    ema_momentum: float = 0.9999
    precision: str = "float32"
    jit_compile: str = "auto"
    validation: float = 0.0
    eval_split: str | None = None
    report_every: int = 100
    seed: int | None = None

    def __post_init__(self):
        for names, holds, rule in _RULES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not holds(value):
                    raise UserError(f"Flag --{name} must {rule}. Received: --{name}={value}.")
        if sum(getattr(self, name) is None for name in PRIVACY) != 1:
            values = {name: getattr(self, name) for name in PRIVACY}
            given = " ".join(f"--{n}={v}" for n, v in values.items() if v is not None)
            raise UserError(
                f"Of {', '.join('--' + name for name in PRIVACY)} exactly three must be given; the "
                f"fourth follows from them. Received: {given or 'none'}."
            )
        if self.momentum and self.optimizer != "dpsgd":
            raise UserError(
                "Flag --momentum belongs to --optimizer=dpsgd. Received: "
                f"--optimizer={self.optimizer} --momentum={self.momentum}."
            )
        if self.weight_decay is not None and self.optimizer != "dpadamw":
            raise UserError(
                "Flag --weight_decay belongs to --optimizer=dpadamw. Received: "
                f"--optimizer={self.optimizer} --weight_decay={self.weight_decay}."
            )
        self._check_privacy()
        self._check_images()
        if self.trainable == "last" and not (self.init_from or self.pretrained_on):
            raise UserError(
                "Flag --trainable=last keeps all other layers as they are and needs a trained "
                "model: give --init_from. Received: --trainable=last."
            )

    def _check_privacy(self):
        if self.private and self.l2_norm_clip == math.inf:
            raise UserError(
                "Flag --l2_norm_clip must be finite for a private run. Received: "
                "--l2_norm_clip=inf. For a run without privacy use --private=false."
            )
        if not self.private and not (
            self.noise_multiplier == 0 and self.epsilon is None and self.l2_norm_clip == math.inf
        ):
            raise UserError(
                "Flag --private=false means no noise, no clipping and no epsilon: leave out "
                "--noise_multiplier, --l2_norm_clip and --epsilon. Received: "
                f"--noise_multiplier={self.noise_multiplier} --l2_norm_clip={self.l2_norm_clip} "
                f"--epsilon={self.epsilon}."
            )

    def _check_images(self):
        augments = self.augment_padding or self.augment_flip or self.augment_resize > 1
        if bool(augments) != bool(self.augmult):
            raise UserError(
                "Flag --augmult is the number of augmented views of each example and needs "
                "--augment_padding, --augment_resize or --augment_flip, which need it. Received: "
                f"--augmult={self.augmult} --augment_padding={self.augment_padding} "
                f"--augment_resize={self.augment_resize} --augment_flip={self.augment_flip}."
            )
        if self.augment_resize > 1 and (self.augment_padding or not self.image_size):
            raise UserError(
                "Flag --augment_resize cuts views of --image_size out of larger images: it needs "
                "--image_size, and takes the place of --augment_padding. Received: "
                f"--augment_resize={self.augment_resize} --image_size={self.image_size} "
                f"--augment_padding={self.augment_padding}."
            )
        if self.eval_split == "validation" and not self.validation:
            raise UserError(
                "Flag --eval_split=validation measures on the images that --validation holds out. "
                f"Received: --validation={self.validation}."
            )

    def privacy_plan(self, num_examples):
        """Returns the `tfdpx.PrivacyPlan` of the run on so many training images.

        Raises:
            UserError: If the values do not go together.
        """
        with checking_flags():
            return tfdpx.PrivacyPlan(
                num_examples=num_examples,
                batch_size=self.batch_size,
                steps=self.steps,
                noise_multiplier=self.noise_multiplier,
                epsilon=self.epsilon,
                delta=self.delta,
                sampling=self.sampling,
                accountant=self.accountant,
            )


_RULES = (
    (("learning_rate",), lambda v: 0 < v < math.inf, "be positive and finite"),
    (("l2_norm_clip",), lambda v: v > 0, "be positive"),
    (("noise_multiplier", "weight_decay"), lambda v: 0 <= v < math.inf, "be at least 0 and finite"),
    (("delta",), lambda v: 0 < v < 1, "lie strictly between 0 and 1"),
    (("momentum", "ema_momentum", "label_smoothing"), lambda v: 0 <= v < 1, "lie in [0, 1)"),
    (
        ("validation",),
        lambda v: 0 <= v < 1 or (v >= 2 and float(v).is_integer()),
        "be a fraction in [0, 1), or a number of images from 2 on",
    ),
    (("trainable",), lambda v: v in ("all", "last"), "be all or last"),
    (("eval_split",), lambda v: v in ("validation", "test"), "be validation or test"),
    (("augment_resize",), lambda v: 1 <= v < math.inf, "be at least 1 and finite"),
    (("steps", "batch_size", "report_every", "image_size"), lambda v: v >= 1, "be at least 1"),
    (("microbatch_size",), lambda v: v == "auto" or v >= 1, "be auto or at least 1"),
    (("augmult", "augment_padding", "seed"), lambda v: v >= 0, "not be negative"),
)
