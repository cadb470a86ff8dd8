"""The grid of a sweep, as `--grid` writes it, and the runs that it means."""

import dataclasses
import itertools
import urllib.parse

from absl import flags

from tfdpx.train.config import preset_lookup, setting_flags
from tfdpx.train.config.training import PRIVACY, Training
from tfdpx.train.errors import UserError

# Images held out where neither preset nor flags say so: a sweep chooses, and what chooses must not
# be what is reported in the end.
HELD_OUT = 0.25

PRESET = "preset"

# What changes the epsilon of a run that leaves it open.
_OF_THE_BUDGET = (
    *PRIVACY, PRESET, "dataset", "validation", "delta", "sampling", "accountant"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SweepRun:
    """One training run of a sweep.

    Attributes:
        preset: Name of the preset it starts from.
        point: Dict, the values of the swept settings.
        fixed: Dict, what holds for all runs of the sweep: the preset, unless presets are swept, and
            the settings that the flags give.
        settings: The whole `training.Training`, seed included.
        arguments: Flags of `tfdpx.train.classify` that lead to these settings.
    """

    preset: str
    point: dict
    fixed: dict
    settings: Training
    arguments: tuple

    @property
    def name(self):
        """Name of the run's folder, such as `"learning_rate=2.0,seed=0"`."""
        pairs = {**self.point, "seed": self.settings.seed}
        return ",".join(f"{key}={urllib.parse.quote(str(v), safe='')}" for key, v in pairs.items())


def parse(text):
    """Returns the grid that `"learning_rate=1,2,4;batch_size=256,512"` describes.

    Args:
        text: String: settings separated by `;`, their values by `,`.

    Returns:
        Dict from the names of settings to tuples of values, of the types of their flags.

    Raises:
        UserError: If a name is no setting or comes twice, or a value is missing, unfit or double.
    """
    grid = {}
    for part in text.split(";"):
        name, equals, values = (piece.strip() for piece in part.partition("="))
        if not equals or not values:
            raise UserError(
                "Flag --grid lists settings and their values, such as "
                f'--grid="learning_rate=1,2,4;batch_size=256,512". Received: {part.strip()!r} in '
                f"--grid={text}."
            )
        if name not in names():
            raise UserError(
                f"Flag --grid can sweep {', '.join(names())}. Received: --grid={name}={values}."
            )
        if name in grid:
            raise UserError(f"Flag --grid names {name} twice. Received: --grid={text}.")
        grid[name] = tuple(_parse_value(name, value.strip()) for value in values.split(","))
        if len(set(grid[name])) < len(grid[name]):
            raise UserError(f"Flag --grid has a value twice. Received: --grid={name}={values}.")
    return grid


def names():
    """What can be swept: presets, and settings. Seeds have a flag of their own."""
    settings = [field.name for field in dataclasses.fields(Training) if field.name != "seed"]
    return [PRESET, *settings]


def given_by_flags():
    """Returns the settings that the flags give for all runs, a dict.

    Raises:
        UserError: If they give a seed.
    """
    given = {name: value for name, value in setting_flags.given().items() if value is not None}
    if "seed" in given:
        raise UserError(
            "A sweep runs every point with each of --seeds. Received: "
            f"--seed={given['seed']}. Use --seeds={given['seed']}."
        )
    return given


def runs(preset, given, grid, seeds):
    """Returns the `SweepRun`s of a grid, those of a point together.

    Args:
        preset: Name of a preset, for a grid without presets.
        given: Dict of settings that hold for all runs.
        grid: What `parse` returned.
        seeds: Ints; every point is run once with each.

    Raises:
        UserError: If a setting is both swept and given, a point is no valid configuration, or
            points have budgets that differ without being swept.
    """
    for name in grid:
        if name in given:
            raise UserError(
                f"Setting {name} is swept, and given for all runs. Received: --{name}="
                f"{given[name]}. Leave one of them out."
            )
    fixed = dict(given) if PRESET in grid else {PRESET: preset, **given}
    found = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        chosen = {**given, **point}
        preset_here = chosen.pop(PRESET, preset)
        chosen = hold_out(preset_here, chosen)
        for seed in seeds:
            settings = preset_lookup.resolve(preset_here, {**chosen, "seed": seed})
            _check_budget(settings, grid)
            arguments = [f"--preset={preset_here}"]
            arguments += [f"--{name}={text_of(v)}" for name, v in {**chosen, "seed": seed}.items()]
            found.append(SweepRun(preset_here, point, fixed, settings, tuple(arguments)))
    return found


def hold_out(preset, given):
    """Returns `given`, with accuracy measured on images held out unless `given` says otherwise."""
    settings = preset_lookup.resolve(preset, given)
    if "eval_split" in given or given.get("validation") == 0:
        return given
    return {
        **given,
        "validation": settings.validation or HELD_OUT,
        "eval_split": "validation",
    }


def _check_budget(settings, grid):
    """Raises UserError where each point of `grid` would have an epsilon that only follows."""
    differing = [name for name in grid if name in _OF_THE_BUDGET]
    if differing and settings.private and settings.epsilon is None:
        raise UserError(
            f"Sweeping {', '.join(differing)} changes epsilon, and accuracies at different budgets "
            "are not to be compared: give --epsilon (the noise or the number of updates then "
            "follows), or sweep epsilon too. Received: no --epsilon."
        )


def _parse_value(name, text):
    if name == PRESET:
        return text
    try:
        return flags.FLAGS[name].parser.parse(text)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"Flag --grid has an invalid value of {name}: {error}. Received: {text!r}."
        ) from error


def text_of(value):
    """A value as its flag takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
