"""What a run on a table is asked to do: fields with their flags and checks."""

import dataclasses
import math

from absl import flags

from tfdpx.train.config import run_flags, setting_flags
from tfdpx.train.config.settings import BELOW_ONE, FROM_ONE, NOT_NEGATIVE, POSITIVE, Check, setting
from tfdpx.train.config.training import Training
from tfdpx.train.data import tfds
from tfdpx.train.errors import UserError
from tfdpx.train.run import devices, dry_run

CLASSIFICATION, REGRESSION = "classification", "regression"
MODELS = ("linear", "network")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Everything that determines a run on a table; each field is the flag of that name.

    Raises:
        UserError: If a value is out of its range, or values do not go together.
    """

    dataset: str = setting("csv:PATH or parquet:PATH.")
    target: str | None = setting(
        "Of csv:PATH and parquet:PATH: the column to predict.", default=None
    )
    task: str = setting(
        "Of tables: what is predicted, one of the labels or a number.",
        choices=(CLASSIFICATION, REGRESSION),
        default=CLASSIFICATION,
    )
    drop: list | None = setting("Of tables: columns to leave out.", default=None)
    categorical: list | None = setting(
        "Of tables: columns of numbers that name categories, such as postcodes.", default=None
    )
    bounds: list | None = setting(
        "Of tables: publicly known ranges of columns of numbers, as COLUMN:LOWER:UPPER, or "
        "*:LOWER:UPPER for all others. Ranges that are left out are found, which costs budget.",
        default=None,
    )
    classes: list | None = setting(
        "Of tables: all labels. Default: those in the column, which then count as public.",
        default=None,
    )
    target_lower: float | None = setting(
        "Of --task=regression: the least value of the target, public.", default=None
    )
    target_upper: float | None = setting(
        "Of --task=regression: the largest value of the target, public.", default=None
    )
    test_fraction: float = setting("As for images.", BELOW_ONE, default=0.2)
    test_seed: int = setting("As for images.", NOT_NEGATIVE, default=0)
    epsilon: float = setting("As for images.", POSITIVE, default=3.0)
    delta: float = setting(
        "As for images.", Check(lambda v: 0 < v < 1, "lie strictly between 0 and 1"), default=1e-5
    )
    accountant: str = setting("As for images.", default="pld")
    model: str | None = setting("As for images.", choices=MODELS, default=None)
    steps: int | None = setting("As for images.", FROM_ONE, default=None)
    batch_size: int | None = setting("As for images.", FROM_ONE, default=None)
    learning_rate: float | None = setting("As for images.", POSITIVE, default=None)
    seed: int | None = setting("As for images.", NOT_NEGATIVE, default=None)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, check = getattr(self, field.name), field.metadata["check"]
            if value is not None and check and not check.holds(value):
                raise UserError(
                    f"Flag --{field.name} must {check.text} for a table. Received: "
                    f"--{field.name}={value}."
                )
        if not self.target:
            raise UserError(
                "Name the column to predict: --target=COLUMN. Received: "
                f"--dataset={self.dataset} without it."
            )
        limits = (self.target_lower, self.target_upper)
        if self.is_regression and not _is_range(*limits):
            raise UserError(
                "Flag --task=regression clips the target to a range that is publicly known: give "
                "--target_lower and --target_upper, not read off the data. Received: "
                f"--target_lower={limits[0]} --target_upper={limits[1]}."
            )
        unfit = [n for n in ("target_lower", "target_upper") if getattr(self, n) is not None]
        if self.is_regression:
            unfit = ["classes"] if self.classes else []
        if unfit:
            raise UserError(f"Flag --{unfit[0]} does not belong to --task={self.task}.")
        self.ranges  # noqa: B018 - refuses what it cannot read.

    @property
    def is_regression(self):
        """Whether numbers are predicted."""
        return self.task == REGRESSION

    @property
    def ranges(self):
        """`--bounds` as a dict from a column, or "*", to a pair of floats."""
        found = {}
        for text in self.bounds or ():
            name, *limits = text.rsplit(":", 2)
            try:
                found[name] = tuple(map(float, limits))
            except ValueError:
                limits = ()
            if not (len(limits) == 2 and _is_range(*found[name])):
                raise UserError(
                    "Flag --bounds must be COLUMN:LOWER:UPPER with finite LOWER < UPPER, more "
                    f"separated by commas. Received: --bounds={text}."
                )
        return found


setting_flags.define(TableSettings)


def of_table(dataset):
    """Whether `--dataset` names a table."""
    return (dataset or "").partition(":")[0] in tfds.TABLES


def from_flags():
    """The `TableSettings` that the flags give.

    Raises:
        UserError: If one is unfit, or belongs to images.
    """
    for name in _of_images() - {field.name for field in dataclasses.fields(TableSettings)}:
        flag = flags.FLAGS[name]
        if flag.value != flag.default:
            raise UserError(
                f"Flag --{name} belongs to images, not to tables. Received: --{name}={flag.value}. "
                "Leave it out."
            )
    given = setting_flags.given(TableSettings)
    return TableSettings(**{name: value for name, value in given.items() if value is not None})


def refuse_for_images():
    """Raises UserError if a flag of tables is given where --dataset names images."""
    for name in {field.name for field in dataclasses.fields(TableSettings)} - _of_images():
        if (value := flags.FLAGS[name].value) is not None:
            raise UserError(
                f"Flag --{name} belongs to tables: --dataset=csv:PATH or parquet:PATH. Received: "
                f"--{name}={value}."
            )


def _of_images():
    """Names of the flags of runs on images but for --workdir, a set."""
    modules = (run_flags, devices, dry_run)
    found = [f.name for each in modules for f in flags.FLAGS.get_key_flags_for_module(each)]
    names = {field.name for field in dataclasses.fields(Training)} | set(found)
    other = {"preset", "final", "log_private_metrics", "head", "public_dataset", "shots"}
    return (names | other & set(flags.FLAGS)) - {"workdir"}


def _is_range(lower, upper):
    given = lower is not None and upper is not None
    return given and math.isfinite(lower) and math.isfinite(upper) and lower < upper
