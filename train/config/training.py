"""What a private training is asked to do."""

import dataclasses
import math

import tfdpx
from tfdpx._arguments import exactly_one_missing
from tfdpx.models.transfer import PIXELS
from tfdpx.train.config.settings import (
    BELOW_ONE,
    FINITE,
    FROM_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    Check,
    RunSettings,
    setting,
)
from tfdpx.train.errors import checking_flags

# The four quantities that determine each other: three are given, tfdpx.PrivacyPlan solves the last.
# The order is that in which values of the preset are dropped when the flags overdetermine them.
PRIVACY = ("noise_multiplier", "epsilon", "steps", "batch_size")
# The model of a run for which `tfdpx.train.run.auto_settings` chooses one.
AUTO = "auto"
# The model of a run with `features`.
LINEAR_ON_FEATURES = "linear_on_features"
# The model of a run that takes the file of `init_from` as it is.
OF_FILE = "of init_from"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(RunSettings):
    """Everything that determines a run of `classify`; each field is the flag of that name.

    Attributes that their flags do not explain:
        private: False neither clips nor adds noise, in the same step: then noise_multiplier is 0,
            epsilon is None, and l2_norm_clip infinite.

    Raises:
        UserError: If a value is out of its range, or values do not go together.
    """

    private: bool = setting("False: the same step without clipping and noise.", default=True)
    epsilon: float | None = setting("Privacy budget.", default=None)
    delta: float = setting(
        "The delta of (epsilon, delta)-differential privacy.",
        Check(lambda v: 0 < v < 1, "lie strictly between 0 and 1"),
    )
    noise_multiplier: float | None = setting(
        "Noise deviation over l2_norm_clip; 0: no privacy.", FINITE, default=None
    )
    sampling: str = setting(
        "How batches are drawn.", choices=("poisson", "shuffle"), default="poisson"
    )
    accountant: str = setting("Who computes epsilon.", choices=("pld", "rdp"), default="pld")
    optimizer: str = setting("Optimizer.", choices=("dpsgd", "dpadam", "dpadamw"), default="dpsgd")
    l2_norm_clip: float | str | None = setting(
        "Bound on the norm of each example's gradient, or automatic: each is divided by its norm.",
        Check(lambda v: v == "automatic" or v > 0, "be automatic or positive"),
        default=1.0,
    )
    microbatch_size: int | None = setting(
        "Examples of a microbatch; bounds memory and changes no result.",
        Check(lambda v: v >= 1, "be at least 1"),
        default=None,
    )
    features: str | None = setting(
        "Kinds of fixed features side by side, joined by +, for a linear classifier instead of "
        "--model: scatter, and working folders or .keras files of pretrain.",
        default=None,
    )
    augmult: int = setting("Augmented views of each example; 0: none.", NOT_NEGATIVE, default=0)
    batch_norm: str | None = setting(
        "What becomes of batch normalization in --init_from; default: freeze.",
        choices=("freeze", "replace"),
        default=None,
    )
    pixels: str | None = setting(
        "Values of pixels that the Keras model of --init_from was trained on, if it does not scale "
        "them itself: from ... to ..., or as keras.applications prepares images of ImageNet.",
        choices=PIXELS,
        default=None,
    )
    head_steps: int = setting(
        "Updates of the last layer alone, the first of the run.", NOT_NEGATIVE, default=0
    )
    head_learning_rate: float | None = setting(
        "Learning rate of these; default: --learning_rate.", POSITIVE, default=None
    )
    augment_mix: int = setting(
        "Of the --augmult views so many are mixtures of two of the others.", NOT_NEGATIVE, default=0
    )
    augment_mix_alpha: float | None = setting(
        "Alpha of the Beta distribution of the weights of --augment_mix; default 0.2.",
        POSITIVE,
        default=None,
    )
    allow_seen_data: bool = setting(
        "Start from weights that saw these images without an account: epsilon is infinite.",
        default=False,
    )
    user: str | None = setting(
        "Of folder:PATH: protect people, not images. Whose each is: parent_folder, of images as "
        "PATH/CLASS/PERSON/NAME, or a regular expression for the path below the folders of "
        "training images.",
        default=None,
    )
    examples_per_user: int = setting(
        "Images of a person in an update, with --user; more are drawn from.", FROM_ONE, default=4
    )
    individual: bool = setting(
        "Clip each image at its own last norm, and write an epsilon for each to a private folder.",
        default=False,
    )
    individual_rounding: float = setting(
        "Norms of --individual are rounded up to multiples of this part of l2_norm_clip.",
        Check(lambda v: 1e-4 <= v <= 1, "lie in [0.0001, 1]"),
        default=0.01,
    )
    individual_refreshes: int = setting(
        "How often an epoch --individual measures all norms.", NOT_NEGATIVE, default=0
    )
    individual_release: float | None = setting(
        "Report the mean and quantiles of --individual, at this noise multiplier.",
        POSITIVE,
        default=None,
    )
    ema_momentum: float | None = setting(
        "Decay of the average of the weights; 0: no average.", BELOW_ONE, default=0.9999
    )

    def __post_init__(self):
        super().__post_init__()
        solvable = {name: getattr(self, name) for name in PRIVACY}
        if not (self.open and None in solvable.values()):
            with checking_flags():
                exactly_one_missing(solvable, "--{}")
        for name, optimizer, unset in (("momentum", "dpsgd", 0), ("weight_decay", "dpadamw", None)):
            self._refuse_if(
                getattr(self, name) != unset and self.optimizer != optimizer,
                f"Flag --{name} belongs to --optimizer={optimizer}.",
                *("optimizer", name),
            )
        without = (self.noise_multiplier, self.epsilon, self.l2_norm_clip) == (0, None, math.inf)
        self._refuse_if(
            self.private and self.l2_norm_clip == math.inf,
            "Flag --l2_norm_clip must be finite for a private run; for one without privacy use "
            "--private=false.",
            "l2_norm_clip",
        )
        self._refuse_if(
            not self.private and not without,
            "Flag --private=false means no noise, no clipping and no epsilon: leave out "
            "--noise_multiplier, --l2_norm_clip and --epsilon.",
            *("noise_multiplier", "l2_norm_clip", "epsilon"),
        )
        self._refuse_if(
            self.head_learning_rate and not self.head_steps,
            "Flag --head_learning_rate belongs to --head_steps.",
            *("head_learning_rate", "head_steps"),
        )
        self._refuse_if(
            self.head_steps and self.trainable == "last",
            "Flag --head_steps trains the last layer before all layers: leave out "
            "--trainable=last.",
            *("head_steps", "trainable"),
        )
        on_features = self.features is not None
        self._refuse_if(
            on_features
            and (self.model not in (AUTO, LINEAR_ON_FEATURES) or self.init_from or self.head_steps),
            "Flag --features takes the place of --model and --init_from, and trains nothing but "
            f"the last layer: give --model={AUTO} and leave the others out.",
            *("features", "model", "init_from", "head_steps"),
        )
        self._refuse_if(
            self.model == LINEAR_ON_FEATURES and not on_features,
            f"Flag --model={LINEAR_ON_FEATURES} needs --features, such as --features=scatter.",
            *("model", "features"),
        )
        self._refuse_if(
            self.individual and (not self.private or self.sampling != "poisson" or self.head_steps),
            "Flag --individual needs a private run, Poisson sampling and no --head_steps.",
            *("private", "sampling", "head_steps"),
        )
        self._refuse_if(
            self.user is not None
            and bool(self.individual or self.validation or self.sampling != "poisson"),
            "Flag --user needs Poisson sampling, and no --individual or --validation.",
            *("user", "individual", "validation", "sampling"),
        )
        self._refuse_if(
            not self.individual and (self.individual_release or self.individual_refreshes),
            "Flags --individual_release and --individual_refreshes belong to --individual.",
            *("individual", "individual_release", "individual_refreshes"),
        )
        augments = self.augment_padding or self.augment_flip or self.augment_resize > 1
        self._refuse_if(
            bool(augments) != bool(self.augmult),
            "Flag --augmult is the number of augmented views of each example and needs "
            "--augment_padding, --augment_resize or --augment_flip, which need it.",
            *("augmult", "augment_padding", "augment_resize", "augment_flip"),
        )
        self._refuse_if(
            self.augment_mix and self.augment_mix > self.augmult - 2,
            "Flag --augment_mix mixes two of the other --augmult views and must leave at least 2.",
            *("augment_mix", "augmult"),
        )
        self._refuse_if(
            self.augment_mix_alpha is not None and not self.augment_mix,
            "Flag --augment_mix_alpha belongs to --augment_mix.",
            *("augment_mix_alpha", "augment_mix"),
        )

    @property
    def open(self):
        """Whether something is left for `tfdpx.train.run.auto_settings` to choose."""
        chosen = (self.learning_rate, self.l2_norm_clip, self.ema_momentum)
        return self.model == AUTO or None in chosen

    def privacy_plan(self, num_examples):
        """Returns the `tfdpx.PrivacyPlan` of the run on so many training images, or people.

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
                unit="example" if self.user is None else "user",
            )
