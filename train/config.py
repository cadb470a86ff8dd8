"""What one training run is asked to do: the preset's values, overridden by the given flags."""

import dataclasses
import importlib
import math
import pkgutil

from absl import flags

from tfdpx.train import presets
from tfdpx.train.errors import UserError

# The four quantities that determine each other: three are given, tfdpx.PrivacyPlan solves the last.
# The order is that in which values of the preset are dropped when the flags overdetermine them.
PRIVACY = ("noise_multiplier", "epsilon", "steps", "batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that determines a run; each field is the flag of that name.

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
    ema_momentum: float = 0.9999
    precision: str = "float32"
    jit_compile: str = "auto"
    validation: float = 0.0
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
        augments = bool(self.augment_padding or self.augment_flip)
        if augments != bool(self.augmult):
            raise UserError(
                "Flag --augmult is the number of augmented views of each example and needs "
                "--augment_padding or --augment_flip, which need it. Received: "
                f"--augmult={self.augmult} --augment_padding={self.augment_padding} "
                f"--augment_flip={self.augment_flip}."
            )


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


_RULES = (
    (("learning_rate", "l2_norm_clip"), lambda v: 0 < v < math.inf, "be positive and finite"),
    (("noise_multiplier", "weight_decay"), lambda v: 0 <= v < math.inf, "be at least 0 and finite"),
    (("delta",), lambda v: 0 < v < 1, "lie strictly between 0 and 1"),
    (("momentum", "ema_momentum", "validation"), lambda v: 0 <= v < 1, "lie in [0, 1)"),
    (("steps", "batch_size", "report_every"), lambda v: v >= 1, "be at least 1"),
    (("microbatch_size",), lambda v: v == "auto" or v >= 1, "be auto or at least 1"),
    (("augmult", "augment_padding", "seed"), lambda v: v >= 0, "not be negative"),
)


def preset_names():
    """Returns the names of the presets, one module of `tfdpx.train.presets` each."""
    return sorted(module.name for module in pkgutil.iter_modules(presets.__path__))


def resolve(preset, given):
    """Returns the `Config` of a preset with the given values in place of its own.

    Of noise_multiplier, epsilon, steps and batch_size exactly one is to be left open. Given values
    stay; where they and the preset's are too many, the preset's noise_multiplier goes first, then
    its epsilon, its steps, its batch_size. So `epsilon` alone chooses the noise, and
    `noise_multiplier` alone gives the epsilon that follows from it.

    Args:
        preset: Name of a preset.
        given: Dict of the fields of `Config` that the user chose; `None` counts as not chosen.

    Raises:
        UserError: If there is no such preset or a value is out of its range.
    """
    if preset not in preset_names():
        raise UserError(
            f"There is no preset {preset!r}. Received: --preset={preset}. "
            f"Use one of: {', '.join(preset_names())}."
        )
    given = {name: value for name, value in given.items() if value is not None}
    module = importlib.import_module(f"{presets.__name__}.{preset}")
    epsilon = given.get("epsilon", module.EPSILON)
    if not 0 < epsilon < math.inf:  # Checked before a preset computes with it.
        raise UserError(
            f"Flag --epsilon must be positive and finite. Received: --epsilon={epsilon}. "
            "For a run without privacy use --noise_multiplier=0."
        )
    values = {"epsilon": epsilon, **module.settings(epsilon), **given}
    for name in PRIVACY:
        if all(values.get(name) is not None for name in PRIVACY) and name not in given:
            del values[name]
    return Config(**values)
