"""A run that is resumed by its folder alone: what it was asked for stands there from its begin."""

import dataclasses
import json

from absl import flags

from tfdpx.train.config import run_flags
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import checkpoint

# Flags that are no settings, and that a resume takes from the run unless they are given.
_FLAGS = ("data_dir", "log_private_metrics", "strategy", "tpu", "cpu_devices")


def asked(base, settings):
    """What a run is asked for, JSON values to write down as it begins. No seed is in it.

    Args:
        base: String, the preset or recipe.
        settings: Dataclass of the settings, before anything is chosen for the user.
    """
    values = dataclasses.asdict(settings)
    del values["seed"]  # Who knows it can take the noise away.
    found = {name: flags.FLAGS[name].value for name in _FLAGS if name in flags.FLAGS}
    return {"base": base, "settings": values, "flags": found}


def settings(kind, base, given):
    """The settings of the unfinished run that --resume names; None without one.

    Flags that were not given, such as --data_dir, become what the run had.

    Args:
        kind: The dataclass of the settings.
        base: Pair of the flag of the preset or recipe and its value, None where it is not given.
        given: Dict of the settings that the flags give; None for all others.

    Raises:
        UserError: If a flag contradicts the run, or there is none and nothing else is asked for.
    """
    path = run_flags.WORKDIR.value
    if not run_flags.RESUME.value or path is None:
        return None
    run = checkpoint.begun(path)
    named = {name: value for name, value in {**dict([base]), **given}.items() if value is not None}
    if run is None and not named:
        raise UserError(
            f"There is no unfinished run in --workdir={path}. Name the folder of one, or give the "
            "flags of a new run."
        )
    if run is None or not run.get("asked"):
        return None
    run, chosen = run["asked"], run["settings"]
    recorded = {base[0]: run["base"], **run["settings"]}
    for name, value in named.items():
        known = (recorded.get(name), chosen.get(name))
        if name not in checkpoint.FREE and json.loads(json.dumps(value)) not in known:
            raise UserError(
                f"Cannot resume the run in --workdir={path} with other settings: it began with "
                f"{name}={recorded.get(name)}. Received: {name}={value}. Leave the flag out, "
                "or choose another --workdir."
            )
    for name, value in run["flags"].items():
        if flags.FLAGS[name].using_default_value:
            flags.FLAGS[name].value = value
    free = {name: value for name, value in named.items() if name in checkpoint.FREE}
    return kind(**{**run["settings"], **free})
