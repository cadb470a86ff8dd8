"""The flags of one training run: one for each field of `settings.Config`, unset by default."""

import dataclasses

from absl import flags

from tfdpx.train.config.errors import UserError
from tfdpx.train.config.settings import Config
from tfdpx.train.run import classifiers


class MicrobatchSizeParser(flags.ArgumentParser):
    """Parser of a flag that is an integer or `auto`."""

    syntactic_help = "an integer or auto"

    def parse(self, argument):
        """Returns the int, or the string `auto`."""
        if argument == "auto":
            return argument
        try:
            return int(argument)
        except ValueError:
            raise ValueError("give an integer or auto") from None

    def flag_type(self):
        """What `--help` calls values of this flag."""
        return "integer or auto"


_FINAL = flags.DEFINE_bool(
    "final", False, "Train on all training images: --validation=0 --eval_split=test."
)

# Unset means: as the preset says.
flags.DEFINE_string(
    "dataset",
    None,
    "digits, any image data set of TensorFlow Datasets, folder:PATH for PATH/train/CLASS/*.jpg and "
    "PATH/test, or NAME:FIRST-LAST for a part of the classes.",
)
flags.DEFINE_float(
    "validation", None, "Hold out this fraction of the training images, or this number from 2 on."
)
flags.DEFINE_enum(
    "eval_split",
    None,
    ["validation", "test"],
    "Images to measure on: those held out, or the test images. Default: those held out, if any.",
)
flags.DEFINE_string("model", None, f"One of: {classifiers.NAMES}.")
flags.DEFINE_bool("group_norm", None, "Whether a WRN has group normalization.")
flags.DEFINE_bool(
    "weight_standardization", None, "Whether the convolutions of a WRN are weight-standardized."
)
flags.DEFINE_string("init_from", None, "Start from the weights of this .keras file.")
flags.DEFINE_string(
    "pretrained_on", None, "What --init_from was trained on; presets say so, nothing depends on it."
)
flags.DEFINE_enum("trainable", None, ["all", "last"], "Layers to train: all, or the last alone.")
flags.DEFINE_bool("private", None, "False: the same step without clipping and noise.")
flags.DEFINE_float("epsilon", None, "Privacy budget.")
flags.DEFINE_float("delta", None, "The delta of (epsilon, delta)-differential privacy.")
flags.DEFINE_float("noise_multiplier", None, "Noise deviation over l2_norm_clip; 0: no privacy.")
flags.DEFINE_integer("steps", None, "Model updates.")
flags.DEFINE_integer("batch_size", None, "Expected examples a model update.")
flags.DEFINE_enum("sampling", None, ["poisson", "shuffle"], "How batches are drawn.")
flags.DEFINE_enum("accountant", None, ["pld", "rdp"], "Who computes epsilon.")
flags.DEFINE_enum("optimizer", None, ["dpsgd", "dpadam", "dpadamw"], "Optimizer.")
flags.DEFINE_float("learning_rate", None, "Learning rate, independent of l2_norm_clip.")
flags.DEFINE_float("momentum", None, "Momentum of dpsgd.")
flags.DEFINE_float("weight_decay", None, "Weight decay of dpadamw; default 0.004.")
flags.DEFINE_float("l2_norm_clip", None, "Bound on the norm of each example's gradient.")
flags.DEFINE(
    MicrobatchSizeParser(),
    "microbatch_size",
    None,
    "Examples a pass, or auto for what fits in memory; bounds memory, changes no result.",
)
flags.DEFINE_integer("augmult", None, "Augmented views of each example; 0: none.")
flags.DEFINE_integer("augment_padding", None, "Views are shifted by up to this many pixels.")
flags.DEFINE_bool("augment_flip", None, "Whether views are flipped left to right at random.")
flags.DEFINE_float(
    "augment_resize", None, "Views are cut from images so many times --image_size high and wide."
)
flags.DEFINE_integer("image_size", None, "Height and width to resize images to, in pixels.")
flags.DEFINE_float("label_smoothing", None, "Weight of the uniform distribution in the targets.")
flags.DEFINE_float("ema_momentum", None, "Decay of the average of the weights; 0: no average.")
flags.DEFINE_enum("precision", None, ["float32", "mixed_bfloat16"], "Keras dtype policy.")
flags.DEFINE_enum("jit_compile", None, ["auto", "true", "false"], "Compile with XLA.")
flags.DEFINE_integer("report_every", None, "Updates between reports: the length of a Keras epoch.")
flags.DEFINE_integer(
    "seed",
    None,
    "For repeatable experiments. Who knows it can remove the noise: never for release.",
)


def given():
    """Returns what the flags say, a dict from the fields of `Config`; None where they are unset.

    Raises:
        UserError: If --final comes with something that it excludes.
    """
    values = {field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Config)}
    if not _FINAL.value:
        return values
    final = {"validation": 0.0, "eval_split": "test"}
    for name, value in final.items():
        if values[name] not in (None, value):
            raise UserError(
                "Flag --final means --validation=0 --eval_split=test. Received: --final "
                f"--{name}={values[name]}."
            )
    return {**values, **final}
