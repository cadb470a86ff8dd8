"""What every training run is asked to do, private or not: fields with their flags and checks."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

from tfdpx.layers.private_model import WHAT
from tfdpx.train.errors import UserError
from tfdpx.train.run import classifiers


class Check(NamedTuple):
    """What the value of a setting must fulfil, and the same in words after "must"."""

    holds: Callable
    text: str


POSITIVE = Check(lambda v: 0 < v < math.inf, "be positive and finite")
NOT_NEGATIVE = Check(lambda v: v >= 0, "not be negative")
FINITE = Check(lambda v: 0 <= v < math.inf, "be at least 0 and finite")
FROM_ONE = Check(lambda v: v >= 1, "be at least 1")
BELOW_ONE = Check(lambda v: 0 <= v < 1, "lie in [0, 1)")


def setting(flag_help, check=None, *, choices=None, **default):
    """Returns the field of a dataclass whose flag `setting_flags.define` makes.

    Args:
        flag_help: What `--help` says of it.
        check: `Check` that every value but None must pass.
        choices: Tuple of strings, all values that there are.
        **default: `default` or `default_factory`, as for `dataclasses.field`.
    """
    if choices:
        check = Check(lambda v: v in choices, f"be {' or '.join(choices)}")
    metadata = {"help": flag_help, "check": check, "choices": choices}
    return dataclasses.field(metadata=metadata, **default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What training and pre-training have in common; each field is the flag of that name.

    Attributes that their flags do not explain:
        eval_split: Where accuracy is measured; None: on the images held out, if there are any.
        image_size: None leaves images of one size as they are.
        init_from: The last layer starts anew, unless the path is one of weights alone
            (`.weights.h5`). `classify` takes a file of others as it is, in place of `model`.

    Raises:
        UserError: If a value is out of its range.
    """

    dataset: str = setting(
        "digits, any image data set of TensorFlow Datasets, folder:PATH for images as "
        "PATH/CLASS/*.jpg (or PATH/train/CLASS and PATH/test/CLASS), NAME:FIRST-LAST for a part of "
        "the classes; classify also takes csv:PATH and parquet:PATH."
    )
    test_fraction: float | None = setting(
        "Of folder:PATH: the expected part of the images, or people, to test on; default 0.2. Not "
        "where PATH has train and test.",
        BELOW_ONE,
        default=None,
    )
    test_seed: int = setting(
        "Of folder:PATH: another number tests on other images.",
        Check(lambda v: 0 <= v < 2**63, "be a number from 0 on"),
        default=0,
    )
    skip_broken: bool = setting(
        "Of folder:PATH: leave out images that cannot be read, and count them.", default=False
    )
    validation: float = setting(
        "Hold out this fraction of the training images, or this number from 2 on.",
        Check(
            lambda v: 0 <= v < 1 or (v >= 2 and float(v).is_integer()),
            "be a fraction in [0, 1), or a number of images from 2 on",
        ),
        default=0.0,
    )
    eval_split: str | None = setting(
        "Images to measure on: those held out, or the test images. Default: those held out, if "
        "any.",
        choices=("validation", "test"),
        default=None,
    )
    public_test: bool = setting(
        "Declares that the test images are public: the learning curve and TensorBoard show the "
        "accuracy on them, and the page of the run some that are taken for another class. Known "
        "data sets need no such flag.",
        default=False,
    )
    model: str = setting(f"One of: {classifiers.NAMES}.")
    group_norm: bool = setting("Whether a WRN has group normalization.", default=True)
    weight_standardization: bool = setting(
        "Whether the convolutions of a WRN are weight-standardized.", default=True
    )
    relu_first: bool = setting(
        "Whether a WRN has ReLU before each normalization, not behind it.", default=False
    )
    init_from: str | None = setting(
        "Start from this .keras file, of tfdpx or of any Keras image model, or from the run folder "
        "that holds it.",
        default=None,
    )
    pretrained_on: str | None = setting(
        "What --init_from was trained on; presets say so, nothing depends on it.", default=None
    )
    init_data: str | None = setting(
        "The data set that --init_from was trained on, where the file does not say.", default=None
    )
    trainable: str = setting(
        "Weights to train: all, or the last layer and what tfdpx.layers.trainable calls so.",
        choices=("all", *WHAT),
        default="all",
    )
    lora_rank: int = setting("Rank of --trainable=lora.", FROM_ONE, default=8)
    steps: int | None = setting("Model updates.", FROM_ONE, default=None)
    batch_size: int | None = setting("Expected examples a model update.", FROM_ONE, default=None)
    learning_rate: float | None = setting("Learning rate, independent of l2_norm_clip.", POSITIVE)
    momentum: float = setting("Momentum of dpsgd.", BELOW_ONE, default=0.0)
    weight_decay: float | None = setting(
        "Weight decay of dpadamw; default 0.004.", FINITE, default=None
    )
    augment_padding: int = setting(
        "Views are shifted by up to this many pixels.", NOT_NEGATIVE, default=0
    )
    augment_flip: bool = setting(
        "Whether views are flipped left to right at random.", default=False
    )
    augment_resize: float = setting(
        "Views are cut from images so many times --image_size high and wide.",
        Check(lambda v: 1 <= v < math.inf, "be at least 1 and finite"),
        default=1.0,
    )
    image_size: int | None = setting(
        "Height and width to resize images to, in pixels. Default: their own, if all have one; of "
        "folder:PATH: chosen from the files.",
        FROM_ONE,
        default=None,
    )
    center_crop: bool = setting(
        "Crop images around their centre before they are resized, so that they keep their aspect "
        "ratio.",
        default=False,
    )
    label_smoothing: float = setting(
        "Weight of the uniform distribution in the targets.", BELOW_ONE, default=0.0
    )
    precision: str = setting(
        "Keras dtype policy.", choices=("float32", "mixed_bfloat16"), default="float32"
    )
    jit_compile: str = setting(
        "Compile with XLA.", choices=("auto", "true", "false"), default="auto"
    )
    report_every: int = setting(
        "Updates between reports: the length of a Keras epoch.", FROM_ONE, default=100
    )
    seed: int | None = setting(
        "For repeatable experiments. Who knows it can remove the noise: never for release.",
        NOT_NEGATIVE,
        default=None,
    )

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, check = getattr(self, field.name), field.metadata["check"]
            if value is not None and check and not check.holds(value):
                raise UserError(
                    f"Flag --{field.name} must {check.text}. Received: --{field.name}={value}."
                )
        self._refuse_if(
            self.augment_resize > 1 and (self.augment_padding or not self.image_size),
            "Flag --augment_resize needs --image_size, and takes the place of --augment_padding.",
            *("augment_resize", "image_size", "augment_padding"),
        )
        self._refuse_if(
            self.eval_split == "validation" and not self.validation,
            "Flag --eval_split=validation measures on the images that --validation holds out.",
            "validation",
        )
        self._refuse_if(
            self.public_test and bool(self.validation) and self.eval_split != "test",
            "Flag --public_test is about test images, and this run measures on images held out: "
            "leave it out, or give --eval_split=test.",
            *("public_test", "validation"),
        )
        self._refuse_if(
            self.trainable != "all" and not (self.init_from or self.pretrained_on),
            "Flag --trainable keeps all other weights as they are and needs a trained model: give "
            "--init_from.",
            "trainable",
        )

    def _refuse_if(self, is_wrong, why, *names):
        """Raises UserError, with the values of the settings `names`, if something is wrong."""
        if is_wrong:
            received = " ".join(f"--{name}={getattr(self, name)}" for name in names)
            raise UserError(f"{why} Received: {received}.")

    @property
    def keras_jit_compile(self):
        """`jit_compile` as `keras.Model.compile` takes it."""
        return {"auto": "auto", "true": True, "false": False}[self.jit_compile]
