"""The grid of a sweep, as `--grid` writes it, and the runs that it means."""

import dataclasses
import itertools
import urllib.parse

from absl import flags

from tfdpx.train import config, config_flags
from tfdpx.train.errors import UserError

# Images held out where neither preset nor flags say so: a sweep chooses, and what chooses must not
# be what is reported in the end.
HELD_OUT = 0.25


PRESET = "preset"


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run of a sweep.

    Attributes:
        point: Dict, the values of the swept settings.
        settings: The whole `config.Config`, seed included.
        arguments: Flags of `tfdpx.train.classify` that lead to these settings.
    """

    point: dict
    settings: config.Config
    arguments: tuple

    @property
    def name(self):
        """Name of the run's folder, such as `"learning_rate=2.0,seed=0"`."""
        pairs = {**self.point, "seed": self.settings.seed}
        return ",".join(f"{key}={urllib.parse.quote(str(v), safe='')}" for key, v in pairs.items())


def parse(text):
    """Returns the grid that `"learning_rate=1,2,4;batch_size=256,512"` describes.

    Args:
        text: String: settings apart by `;`, their values by `,`.

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
    settings = [field.name for field in dataclasses.fields(config.Config) if field.name != "seed"]
    return [PRESET, *settings]


def given_by_flags():
    """Returns the settings that the flags give for all runs, a dict.

    Raises:
        UserError: If they give a seed.
    """
    given = {name: value for name, value in config_flags.given().items() if value is not None}
    if "seed" in given:
        raise UserError(
            "A sweep runs every point with each of --seeds. Received: "
            f"--seed={given['seed']}. Use --seeds={given['seed']}."
        )
    return given


def runs(preset, given, grid, seeds):
    """Returns the `Run`s of a grid, those of a point together.

    Args:
        preset: Name of a preset, for a grid without presets.
        given: Dict of settings that hold for all runs.
        grid: What `parse` returned.
        seeds: Ints; every point is run once with each.

    Raises:
        UserError: If a setting is both swept and given, or a point is no valid configuration.
    """
    for name in grid:
        if name in given:
            raise UserError(
                f"Setting {name} is swept, and given for all runs. Received: --{name}="
                f"{given[name]}. Leave one of them out."
            )
    found = []
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        preset_here = point.get(PRESET, preset)
        for seed in seeds:
            chosen = {**hold_out(preset_here, given), **point, "seed": seed}
            chosen.pop(PRESET, None)
            flags_given = tuple(f"--{name}={_text(value)}" for name, value in chosen.items())
            settings = config.resolve(preset_here, chosen)
            found.append(Run(point, settings, (f"--preset={preset_here}", *flags_given)))
    return found


def hold_out(preset, given):
    """Returns `given`, with images held out for measuring unless preset or flags say otherwise."""
    settings = config.resolve(preset, given)
    if settings.validation or settings.eval_split or "validation" in given:
        return given
    return {**given, "validation": HELD_OUT}


def _parse_value(name, text):
    if name == PRESET:
        return text
    try:
        return flags.FLAGS[name].parser.parse(text)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"Flag --grid has a value that is none of {name}: {error}. Received: {text!r}."
        ) from error


def _text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)
