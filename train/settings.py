"""The settings of a run of `classify`, and the conflicts between them.

Each field of `Settings` has a flag with the same name, and is stored in the record. If the user
does not set a flag, its value is None, and the preset's value is used.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import flags

import tfdpx
from tfdpx._arguments import exactly_one_missing
from tfdpx.accounting.attack import full_batch_epsilon
from tfdpx.layers.few_weights import WHAT
from tfdpx.models.transfer import PIXELS
from tfdpx.train import objects, presets
from tfdpx.train.data.folder import NONE
from tfdpx.train.data.tfds import TABLES as TABLE_FORMATS
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.objects import AUTO, LINEAR_ON_FEATURES, MODELS

# The kinds of runs: on images, on a table, and of a head on features of images.
IMAGES, TABLES, HEADS = "images", "tables", "heads"
# Three of these settings determine the fourth, which `tfdpx.PrivacyPlan` computes. If flags and
# preset together set all four, the first of them that was not set by a flag is dropped.
PRIVACY = ("noise_multiplier", "epsilon", "steps", "batch_size")


class Check(NamedTuple):
    """A condition on the value of a setting.

    Attributes:
        holds: Function from a value to a bool, whether the condition holds.
        text: String, the words after "must" in the error, for example "be at least 1".
    """

    holds: Callable[[Any], bool]
    text: str


POSITIVE = Check(lambda v: 0 < v < math.inf, "be positive and finite")
NOT_NEGATIVE = Check(lambda v: v >= 0, "not be negative")
FINITE = Check(lambda v: 0 <= v < math.inf, "be at least 0 and finite")
FROM_ONE = Check(lambda v: v >= 1, "be at least 1")
BELOW_ONE = Check(lambda v: 0 <= v < 1, "lie in [0, 1)")
SHARE = Check(lambda v: 0 < v < 1, "lie strictly between 0 and 1")


def setting(
    flag_help, check=None, *, default=None, choices=None, objects=None, of=(IMAGES,), needs=None
):
    """Returns a field of `Settings`. The code below makes a flag from each field.

    Args:
        flag_help: The help text of the flag.
        check: `Check` for all values except None.
        default: The value if neither a flag nor the preset sets one.
        choices: Tuple of strings, all valid values.
        objects: `objects.Objects`, the objects that the setting can name.
        of: Tuple of the kinds of runs that have the setting.
        needs: Name of another setting. If that setting is not set, this one would have no effect,
            so a value for it is an error.
    """
    if choices:
        check = Check(lambda v: v in choices, f"be {' or '.join(choices)}")
    metadata = dict(help=flag_help, check=check, choices=choices, objects=objects, of=of)
    return dataclasses.field(default=default, metadata=metadata | {"needs": needs})


_ALL, _PHOTOS = (IMAGES, TABLES, HEADS), (IMAGES, HEADS)


# The formatter is off, so the tables of flags and of conflicts stay readable.
# fmt: off
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run of `classify`.

    If `private` is False, updates neither clip nor add noise. Then `noise_multiplier` is 0,
    `epsilon` is None and `l2_norm_clip` is infinite.

    Raises:
        UserError: If a value is out of range, or values contradict each other.
    """

    dataset: str | None = setting("Training data: digits, any image data set of TensorFlow "
        "Datasets, NAME:FIRST-LAST for some of its classes, or folder:PATH for images as "
        "PATH/CLASS/*.jpg (or PATH/train/CLASS and PATH/test/CLASS). For a table: csv:PATH or "
        "parquet:PATH.", of=_ALL)
    data_name: str | None = setting("Name of the data in statement, page and card, such as "
        "'Skin photos, 2026'. Default: --dataset without its path.",
        Check(lambda v: v.strip() and v.isprintable(), "be printable"), of=_ALL)
    test_fraction: float | None = setting("For folder:PATH and tables: the fraction to test on. "
        "Default: 0.2. Leave it out if PATH has folders train and test.", BELOW_ONE, of=_ALL)
    test_seed: int = setting("For folder:PATH and tables: another number selects other images or "
        "rows to test on.", Check(lambda v: 0 <= v < 2**63, "be a number from 0 on"), of=_ALL,
        default=0)
    skip_broken: bool = setting("For folder:PATH: leave out images that cannot be read, and count "
        "them.", of=_PHOTOS, default=False)
    image_size: int | None = setting("Height and width, in pixels, to which images are resized. "
        "Default: their size if all have the same; for folder:PATH, chosen from the files.",
        FROM_ONE, of=_PHOTOS)
    center_crop: int | None = setting("Cut a square with sides of this many pixels out of the "
        "middle of each image, after its shorter side is scaled to --image_size (default: the same "
        "number). Without this flag, images are squeezed to the size.", FROM_ONE, of=_PHOTOS)
    validation: float = setting("Training images to hold out: a fraction below 1, or a number "
        "from 2 on.", Check(lambda v: 0 <= v < 1 or (v >= 2 and float(v).is_integer()),
        "be a fraction in [0, 1), or a number of images from 2 on"), default=0.0)
    eval_split: str | None = setting("Images to measure accuracy on: validation (those held out) "
        "or test. Default: validation if images are held out, else test.",
        choices=("validation", "test"))
    public_test: bool = setting("Declares that the test images are public. The learning curve and "
        "TensorBoard then show the accuracy on them, and the page of the run shows some wrong "
        "predictions. Data sets that tfdpx knows do not need this flag.", default=False)
    model: str | None = setting(f"One of: {', '.join(MODELS.names)}, with arguments as in "
        "wrn_16_4:groups=none. For tables: linear or network.", objects=MODELS, of=(IMAGES, TABLES))
    init_from: str | None = setting("Start from this .keras file, of tfdpx or any Keras image "
        "model, or from the run folder that has it. With a --model, only weights are taken from "
        "the file, which may also end in .weights.h5. The last layer is always new.", of=_PHOTOS)
    pretrained_on: str | None = setting("Data that --init_from was trained on; presets set it.")
    init_data: str | None = setting("Data set that --init_from was trained on, if the file does "
        "not say.", of=_PHOTOS)
    trainable: str = setting("Weights to train: all; only the last layer (last); or the last layer "
        "and those that tfdpx.layers.trainable calls bias, norm or lora.", choices=("all", *WHAT),
        default="all")
    lora_rank: int = setting("Rank of --trainable=lora.", FROM_ONE, default=8)
    steps: int | None = setting("Number of updates.", FROM_ONE, of=_ALL)
    batch_size: int | None = setting("Expected number of examples in an update.", FROM_ONE,
        of=(IMAGES, TABLES))
    learning_rate: float | None = setting("Learning rate, independent of l2_norm_clip.", POSITIVE,
        of=_ALL)
    label_smoothing: float = setting("Weight of the uniform distribution over all classes in the "
        "targets.", BELOW_ONE, default=0.0)
    precision: str = setting("Keras dtype policy.", choices=("float32", "mixed_bfloat16"),
        default="float32")
    jit_compile: bool | None = setting("Compile with XLA. Default: as Keras decides.")
    report_every: int = setting("Number of updates between reports, which is a Keras epoch.",
        FROM_ONE, default=100)
    seed: int | None = setting("Makes experiments repeatable. Anyone who knows the seed can remove "
        "the noise, so never set it for a release.", NOT_NEGATIVE, of=_ALL)

    private: bool = setting("False trains by the same step, without clipping and noise.",
        default=True)
    epsilon: float | None = setting("Privacy budget. For heads, inf means no clipping and no "
        "noise.", Check(lambda v: v > 0, "be positive"), of=_ALL)
    right_guesses: float | None = setting("In place of --epsilon: the most guesses in 100 that may "
        "be right, if an attacker knows everything except whether one example was in the data; 50 "
        "is tossing a coin.", Check(lambda v: 50 < v < 100, "lie between 50 and 100"), of=_ALL)
    delta: float = setting("Delta of the guarantee, well below 1 / examples.", SHARE, of=_ALL,
        default=1e-5)
    noise_multiplier: float | None = setting("Standard deviation of the noise, divided by the "
        "clip; 0 gives no privacy. For heads: the same for every release.", FINITE, of=_PHOTOS)
    sampling: str = setting("How batches are drawn.", choices=("poisson", "shuffle"),
        default="poisson")
    accountant: str | None = setting("Privacy accountant. Default: pld; for heads gdp, which is "
        "exact.", choices=("pld", "rdp", "gdp", "zcdp"), of=_ALL)
    optimizer: str = setting(f"One of: {', '.join(objects.OPTIMIZERS.names)}, with arguments of "
        "its constructor as in dpsgd:momentum=0.9.", objects=objects.OPTIMIZERS, default="dpsgd")
    schedule: str | None = setting("Schedule of the learning rate. cosine:warmup_steps=50: it "
        "rises from 0, then falls to 0. step:decay_steps=500..750: it falls to a tenth after each "
        "of these updates. Default: it is constant.", objects=objects.SCHEDULES)
    l2_norm_clip: float | str | None = setting("Bound on the L2 norm of each example's gradient, "
        "or automatic: each gradient is divided by its norm. For heads: bound on features or "
        "gradients. For tables: a number, such as 4, gives better probabilities.",
        Check(lambda v: v == "automatic" or v > 0, "be automatic or positive"), of=_ALL)
    microbatch_size: int | None = setting("Number of examples in a microbatch; limits memory.",
        FROM_ONE)
    features: str | None = setting("Train a linear classifier on fixed features, instead of "
        "--model: scatter, working folders or .keras files; join several by +.")
    whiten: str | None = setting("Whiten the features from files in --features by statistics of "
        "generated images; helps at small budgets.", choices=("synthetic",), needs="features")
    warm_start: bool = setting("First train --model, except its last layer, on generated images. "
        "Takes minutes, and costs no privacy.", default=False)
    augmult: int = setting("Number of augmented views of each example; 0: no augmentation.",
        NOT_NEGATIVE, needs="augment", default=0)
    augment: str | None = setting("Augmentation that makes the views: layers of Keras and KerasCV "
        "joined by +, as in RandomFlip+RandomRotation:factor=0.1, or RandomCropFlip, "
        "ResizeCropFlip or MixViews of tfdpx.augment.", objects=objects.AUGMENTATIONS,
        needs="augmult")
    batch_norm: str | None = setting("Batch normalization in --init_from: freeze it (the default), "
        "or replace it by group normalization.", choices=("freeze", "replace"))
    pixels: str | None = setting("Range of pixels that the Keras model of --init_from was trained "
        "on, if the model does not scale pixels itself. imagenet and caffe: as the modes torch and "
        "caffe of keras.applications.", choices=PIXELS, of=_PHOTOS)
    head_steps: int = setting("Number of first updates, which train only the last layer.",
        NOT_NEGATIVE, default=0)
    head_learning_rate: float | None = setting("Learning rate of --head_steps. Default: "
        "--learning_rate.", POSITIVE, needs="head_steps")
    user: str | None = setting("Protect people instead of single images or rows. For folder:PATH: "
        "parent_folder if images are PATH/CLASS/PERSON/NAME, else a regular expression that finds "
        "the person in the path of an image below the folder of training images. For tables: the "
        "column with the person of each row. none declares that every person has one image or row; "
        "heads take only none.", of=_ALL)
    examples_per_user: int = setting("With --user: the most images or rows of a person in an "
        "update, drawn at random if there are more.", FROM_ONE, of=(IMAGES, TABLES), default=4)
    individual: bool = setting("Clip the gradient of each image at its last norm, and write the "
        "epsilon of each image to a private folder.", default=False)
    individual_refreshes: int = setting("How often in an epoch --individual measures all norms.",
        NOT_NEGATIVE, needs="individual", default=0)
    individual_release: float | None = setting("Report mean and quantiles of the epsilons of "
        "--individual, with noise of this multiplier.", POSITIVE, needs="individual")
    ema_momentum: float | None = setting("Decay of the moving average of the weights; 0: no "
        "average.", BELOW_ONE, default=0.9999)

    threshold: float = setting("With two classes, predict the second (by name) if its probability "
        "is at least this. Choose it on public data, never on private test rows.", SHARE, of=_ALL,
        default=0.5)
    target: str | None = setting("Column to predict.", of=(TABLES,))
    drop: list | None = setting("Columns to leave out.", of=(TABLES,))
    categorical: list | None = setting("Columns of numbers that name categories, such as "
        "postcodes.", of=(TABLES,))
    bounds: list | None = setting("Publicly known ranges of columns of numbers, as "
        "COLUMN:LOWER:UPPER, or *:LOWER:UPPER for all other columns. Other ranges are found "
        "privately, which costs budget.", of=(TABLES,))
    classes: list | None = setting("All labels of the target. Default: those in the column, which "
        "then count as public.", of=(TABLES,))
    target_lower: float | None = setting("Predict a number instead of a label. This is the least "
        "possible number, publicly known; targets outside of the range are clipped.", of=(TABLES,),
        needs="target_upper")
    target_upper: float | None = setting("The largest possible number to predict.", of=(TABLES,),
        needs="target_lower")

    head: str | None = setting("Fit only the last layer, by a head of tfdpx.heads, on features of "
        f"--init_from (default: scattering features). One of: {', '.join(objects.HEADS.names)}, "
        "with arguments as in adamix:shots=2,quantile=0.9.", objects=objects.HEADS, of=(HEADS,))

    # Each entry has three parts: a condition that is an error, the flags to show, and the sentence.
    conflicts: typing.ClassVar[tuple] = (
        (lambda s: (s.center_crop or 0) > (s.image_size or s.center_crop or 0),
            "center_crop image_size", "Flag --center_crop must be at most --image_size."),
        (lambda s: s.eval_split == "validation" and not s.validation, "validation",
            "Flag --eval_split=validation measures on the images that --validation holds out."),
        (lambda s: s.public_test and s.validation and s.eval_split != "test",
            "public_test validation", "Flag --public_test is about test images, and this run "
            "measures on images held out: leave it out, or give --eval_split=test."),
        (lambda s: s.trainable != "all" and not (s.init_from or s.pretrained_on
            or s.warm_start), "trainable", "Flag --trainable keeps all other weights as they are "
            "and needs a trained model: give --init_from."),
        (lambda s: s.kind == IMAGES and math.inf in (s.epsilon, s.private and
            s.l2_norm_clip), "epsilon l2_norm_clip", "Flags --epsilon and --l2_norm_clip must be "
            "finite; for a run without privacy use --private=false."),
        (lambda s: s.epsilon and s.right_guesses, "epsilon right_guesses",
            "Give one of --epsilon and --right_guesses."),
        (lambda s: not s.private
            and (s.noise_multiplier, s.budget, s.l2_norm_clip) != (0, None, math.inf),
            "noise_multiplier l2_norm_clip epsilon", "Flag --private=false means no noise, no "
            "clipping and no epsilon: leave out --noise_multiplier, --l2_norm_clip and --epsilon."),
        (lambda s: s.head_steps and s.trainable == "last", "head_steps trainable", "Flag "
            "--head_steps trains the last layer before all layers: leave out --trainable=last."),
        (lambda s: s.features is not None
            and (s.model not in (AUTO, LINEAR_ON_FEATURES) or s.init_from or s.head_steps),
            "features model init_from head_steps", "Flag --features takes the place of --model and "
            f"--init_from, and trains only the last layer: give --model={AUTO}, without them."),
        (lambda s: s.model == LINEAR_ON_FEATURES and s.features is None, "model features",
            f"Flag --model={LINEAR_ON_FEATURES} needs --features, such as --features=scatter."),
        (lambda s: s.whiten and set((s.features or "scatter").split("+")) == {"scatter"},
            "whiten features",
            "Flag --whiten is for files of --features; scattering is whitened always."),
        (lambda s: s.warm_start and (s.init_from or s.model in (None, AUTO,
            "scatter_linear", "scatter_cnn", LINEAR_ON_FEATURES)), "warm_start model init_from",
            "Flag --warm_start is for a network from random weights: give its --model."),
        (lambda s: s.individual and (not s.private or s.sampling != "poisson"
            or s.head_steps), "private sampling head_steps",
            "Flag --individual needs a private run, Poisson sampling and no --head_steps."),
        (lambda s: s.has_people and (s.individual or s.validation
            or s.sampling != "poisson"), "user individual validation sampling",
            "Flag --user needs Poisson sampling, and no --individual or --validation."),
        (lambda s: s.kind == HEADS and s.has_people, "user head", "Heads protect single "
            "images: leave out --head (with --init_from, give --trainable=last, which protects "
            "people), or give --user=none if every person has one image."),
        (lambda s: s.classes and s.target_lower is not None, "classes target_lower",
            "Flag --classes is for labels, and --target_lower for numbers: leave one of them out."),
        (lambda s: s.kind == TABLES and not s.target, "dataset target",
            "Name the column to predict: --target=COLUMN."),
    )

    def __post_init__(self):
        problems = []
        for field in dataclasses.fields(self):
            value, check = getattr(self, field.name), field.metadata["check"]
            if value is not None and check and not check.holds(value):
                problems.append(
                    f"Flag --{field.name} must {check.text}. Received: --{field.name}={value}."
                )
            if value and field.metadata["objects"] and self.kind != TABLES:
                problems += field.metadata["objects"].problems(value)
            needed = field.metadata["needs"]
            if needed and self._has(field.name) and not self._has(needed):
                problems.append(
                    f"Flag --{field.name} has no effect without --{needed}: give both, or none. "
                    f"Received: --{field.name}={value}."
                )
        # The conditions assume that all values are in range.
        for holds, names, sentence in () if problems else self.conflicts:
            if holds(self):
                values = [f"--{name}={getattr(self, name)}" for name in names.split()]
                problems.append(f"{sentence} Received: {' '.join(values)}.")
        if problems:
            raise UserError(" ".join(problems))
        self.ranges  # noqa: B018 - refuses invalid --bounds.
        quantities = {name: getattr(self, name) for name in PRIVACY} | {"epsilon": self.budget}
        if self.kind == IMAGES and not (self.open and None in quantities.values()):
            with checking_flags():
                exactly_one_missing(quantities, "--{}")

    def _has(self, name):
        return getattr(self, name) not in (None, "", self.__dataclass_fields__[name].default)

    @property
    def kind(self):
        """The kind of the run: `IMAGES`, `TABLES` or `HEADS`."""
        return kind_of(self.dataset, self.head)

    @property
    def is_regression(self):
        """Bool, whether the model predicts a number."""
        return self.target_lower is not None

    @property
    def budget(self):
        """`epsilon`, or the largest epsilon that `right_guesses` allows; None if neither is set."""
        if self.right_guesses is None:
            return self.epsilon
        return full_batch_epsilon(self.right_guesses / 100, self.delta)

    @property
    def goal(self):
        """Dict with the argument of `tfdpx.PrivacyPlan` that limits the privacy loss."""
        if self.right_guesses is None:
            return {"epsilon": self.epsilon}
        return {"right_guesses": self.right_guesses / 100}

    @property
    def open(self):
        """Bool, whether any setting is left for `tfdpx.train.defaults` to choose."""
        chosen = (self.learning_rate, self.l2_norm_clip, self.ema_momentum)
        return self.model == AUTO or None in chosen

    @property
    def ranges(self):
        """Dict of `bounds`: its keys are columns or "*", and its values are pairs of floats."""
        ranges = {}
        for text in self.bounds or ():
            try:
                name, lower, upper = text.rsplit(":", 2)
                ranges[name] = float(lower), float(upper)
                if math.isnan(sum(ranges[name])):
                    raise ValueError("A bound is NaN.")
            except ValueError as error:
                raise UserError(
                    "Flag --bounds must be COLUMN:LOWER:UPPER, with two numbers; separate several "
                    f"by commas. Received: --bounds={text}."
                ) from error
        return ranges

    @property
    def has_people(self):
        """Bool, whether updates draw people (see --user) instead of images or rows."""
        return self.user not in (None, NONE)

    def privacy_plan(self, num_examples):
        """Returns the `tfdpx.PrivacyPlan` of a run on `num_examples` images, rows or people.

        Raises:
            UserError: If the values contradict each other.
        """
        with checking_flags():
            return tfdpx.PrivacyPlan(
                num_examples=num_examples,
                batch_size=self.batch_size,
                steps=self.steps,
                noise_multiplier=self.noise_multiplier,
                delta=self.delta,
                **self.goal,
                sampling=self.sampling,
                accountant=self.accountant or "pld",
                unit="user" if self.has_people else "example",
            )


# fmt: on
def kind_of(dataset, head):
    """Returns the kind of a run: `IMAGES`, `TABLES` or `HEADS`.

    Args:
        dataset: String, the value of `--dataset`, or None.
        head: String, the value of `--head`, or None.
    """
    if (dataset or "").partition(":")[0] in TABLE_FORMATS:
        return TABLES
    return HEADS if head else IMAGES


def resolve(preset, overrides):
    """Returns the `Settings` of a preset with some values replaced.

    Exactly one of `noise_multiplier`, `epsilon`, `steps` and `batch_size` is left open, and follows
    from the other three. If `overrides` and the preset together set all four, the first one that is
    not in `overrides` is dropped. For example, if the user sets `epsilon`, the preset's noise
    multiplier is dropped; if the user sets `noise_multiplier`, the preset's epsilon is dropped.
    Without privacy (`private=False`) the preset's noise, clip and epsilon are replaced.

    Args:
        preset: Name of a preset, or None for the default of the data set.
        overrides: Dict from fields of `Settings` to the user's values. None means not set.

    Raises:
        UserError: If there is no such preset, a value is out of range, or a flag belongs to another
            kind of run.
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    kind = kind_of(overrides.get("dataset"), overrides.get("head"))
    foreign = [
        f"Flag --{field.name} belongs to {' and '.join(field.metadata['of'])}, not to {kind}. "
        f"Received: --{field.name}={overrides[field.name]}."
        for field in dataclasses.fields(Settings)
        if field.name in overrides and kind not in field.metadata["of"]
    ]
    if kind != IMAGES and preset is not None:
        foreign.append(f"Flag --preset belongs to {IMAGES}, not to {kind}.")
    if foreign:
        raise UserError(" ".join(foreign))
    goal, epsilon = "epsilon", overrides.get("epsilon")
    if share := overrides.get("right_guesses"):
        goal, delta = "right_guesses", overrides.get("delta", Settings.delta)
        epsilon = epsilon or Settings(right_guesses=share, delta=delta).budget
    preset = preset or presets.default_for(kind, overrides.get("dataset"))
    usual = presets.values_of(preset, epsilon)
    is_private = overrides.get("private", usual.get("private", True))
    if goal == "right_guesses" or not is_private:
        usual.pop("epsilon", None)
    if not is_private:
        usual |= {"noise_multiplier": 0.0, "l2_norm_clip": math.inf}
    values = usual | overrides
    left_open = None in (values.get("steps"), values.get("batch_size"))
    if left_open and "noise_multiplier" in overrides and goal not in overrides:
        values.pop("epsilon", None)  # Epsilon will follow from the values that `defaults` chooses.
    names = [goal if name == "epsilon" else name for name in PRIVACY]
    if all(values.get(name) is not None for name in names):
        values.pop(next((name for name in names if name not in overrides), None), None)
    return Settings(**values)


class _NumberOrAutomatic(flags.FloatParser):
    def convert(self, argument):
        """Returns the number, or the word `automatic`."""
        return argument if argument == "automatic" else super().convert(argument)


# From the type of a field to the function that defines its flag.
_DEFINE = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    bool: flags.DEFINE_bool,
    list: flags.DEFINE_list,
}
for _field in dataclasses.fields(Settings):
    _help, _choices = _field.metadata["help"], _field.metadata["choices"]
    if _choices:
        flags.DEFINE_enum(_field.name, None, _choices, _help)
        continue
    _kinds = set(typing.get_args(_field.type) or (_field.type,)) - {types.NoneType}
    if _kinds == {float, str}:
        flags.DEFINE(_NumberOrAutomatic(), _field.name, None, _help)
    else:
        _DEFINE[_kinds.pop()](_field.name, None, _help)

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for all files of the run. Default: runs/<preset>-<date>-<time>."
)
DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder of TensorFlow Datasets. Default: as in that library."
)
DOWNLOAD = flags.DEFINE_bool("download", False, "Fetch the data set if it is not in --data_dir.")
RESUME = flags.DEFINE_bool("resume", False, "Continue the unfinished run in --workdir, if any.")
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Only print the size of the run and its epsilon, without reading data."
)


def flag_values():
    """Returns a dict from each field of `Settings` to the value of its flag, or None if not set."""
    return {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Settings)}
